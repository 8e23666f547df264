"""A command in a terminal of its own: what it draws, and what it leaves behind."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from simulated.waiting import wait_for

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07|\r")
HOME, OTHER_SCREEN, SCREEN_BACK = "\x1b[H", "\x1b[?1049h", "\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def _as_a_shell_would() -> None:
    """Also where the tests run by nohup or in the background, and ignore some signals themselves."""
    os.setpgrp()
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTSTP):
        signal.signal(number, signal.SIG_DFL)


class Terminal:
    """Runs `mooncake-connector ARGUMENTS` while it is entered."""

    def __init__(
        self, *arguments: str, columns: int = 80, lines: int = 40, environ: Mapping[str, str] | None = None
    ) -> None:
        self._arguments, self._environ = arguments, environ or {}
        self._ours, self._theirs = pty.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self._theirs)
        self.drawn = ""

    def __enter__(self) -> Terminal:
        command = [sys.executable, "-m", "mooncake_connector.cli.entry", *self._arguments]
        environ = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environ.pop(name, None)
        environ |= self._environ
        self.process = subprocess.Popen(
            command, stdin=self._theirs, stdout=self._theirs, stderr=self._theirs, env=environ,
            preexec_fn=_as_a_shell_would,
        )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    @property
    def attributes(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self) -> str:
        """All that was drawn so far."""
        while select.select([self._ours], [], [], 0)[0]:
            self.drawn += os.read(self._ours, 1 << 16).decode("utf-8", "replace")
        return self.drawn

    def frame(self) -> str:
        """The last screen that was drawn as a whole, without escapes."""
        frames = self.read().split(HOME)
        return ESCAPE.sub("", frames[-2]) if len(frames) > 2 else ""

    def shows(self, text: str) -> None:
        """Wait until a screen has this."""
        wait_for(lambda: text in self.frame() or self._ended())

    def ends(self, number: int) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.process.send_signal(number)
        wait_for(lambda: self.read() is not None and self.process.poll() is not None)
        self.read()
        return self.process.returncode

    def printed(self) -> str:
        """All that it prints until it ends by itself, without escapes."""
        wait_for(lambda: self.read() is not None and self.process.poll() is not None)
        return ESCAPE.sub("", self.read())

    def _ended(self) -> bool:
        assert self.process.poll() is None, f"it ended: {ESCAPE.sub('', self.read())[-2000:]}"
        time.sleep(0.02)
        return False


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
