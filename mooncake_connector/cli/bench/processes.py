"""Child processes of a benchmark: each has a deadline, and none is left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.config.sources import ENV_PREFIX


@contextlib.contextmanager
def running(
    command: Sequence[str],
    log: IO[bytes],
    env: Mapping[str, str] | None = None,
    *,
    grace_s: float = 1.0,
    leave_s: float = 2.0,
    cwd: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``command`` in a session of its own, output to ``log``.

    It does not inherit our own settings: what a person set for an engine is not for the one that is measured.
    At the end its input is closed, it gets ``grace_s`` to leave by itself, then SIGTERM and ``leave_s`` more, and at
    last it and its children are killed.
    """
    # Where there is setpriv, the child also ends when this process is killed.
    ending = ("setpriv", "--pdeathsig", "TERM", "--") if shutil.which("setpriv") else ()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    process = subprocess.Popen(
        [*ending, *command],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        start_new_session=True,
        env={**inherited, **(env or {})},
        cwd=cwd,
    )
    try:
        yield process
    except BaseException:
        grace_s = 0
        raise
    finally:
        _end(process, grace_s, leave_s)


def _end(process: subprocess.Popen[bytes], grace_s: float, leave_s: float) -> None:
    try:
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace_s)
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=leave_s)
    finally:  # also when a person who waits for this presses Ctrl-C again
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)


def wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], log: IO[bytes], deadline_s: float, what: str
) -> None:
    """Wait until ``ready()``. Raises BenchError, with the end of ``log``, when ``process`` ends first or it is late."""
    end = time.monotonic() + deadline_s
    while not ready():
        if process.poll() is not None and not ready():
            raise BenchError(f"{what} ended with status {process.returncode} before it was done: {_last_lines(log)}")
        if time.monotonic() > end:
            raise BenchError(f"{what} was not done after {deadline_s:.0f} s: {_last_lines(log)}")
        time.sleep(0.02)


def end_of(process: subprocess.Popen[bytes], log: IO[bytes], what: str) -> str:
    """To add to an error that the end of ``process`` may explain: with what it ended; nothing while it runs."""
    if process.poll() is None:
        return ""
    return f"; {what} ended with status {process.returncode}: {_last_lines(log)}"


def _last_lines(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return " | ".join(line.strip() for line in lines[-3:]) or "no output"


def printed_by(python: str | Path, program: str, otherwise: str, *arguments: str) -> list[str]:
    """The lines that ``program`` prints in ``python``. Raises BenchError that says the reason, and what to do."""
    try:
        done = subprocess.run([python, "-c", program, *arguments], capture_output=True, text=True, timeout=180)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BenchError(f"{python} cannot be run: {reason}: {otherwise}") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BenchError(f"{python} lacks something ({reason}): {otherwise}")
    return done.stdout.strip().splitlines()


def free_ports(count: int) -> list[int]:
    """Different ports of the loopback that nobody listens on right now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()
