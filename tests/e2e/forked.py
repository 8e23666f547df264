"""Servers that a process forks which has imported their engine: `forkserver.py` has the other side."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

__all__ = ["ForkServer", "Forked"]

SCRIPT = Path(__file__).with_name("forkserver.py")
IMPORT_S = 600.0
"""Within which it is there, on a busy machine as well."""
READ_AT_START = ("LD_", "MALLOC_", "OMP_", "ONEDNN_", "LRU_CACHE_", "TORCH", "PYTHONUNBUFFERED")
"""Variables of the C library, OpenMP, torch and Python. What tests set of vLLM's and SGLang's is read later."""


class Forked:
    """One server, as a `subprocess.Popen` of it."""

    def __init__(self, pid: int, report: socket.socket) -> None:
        self.pid, self._report, self._status = pid, report, None

    _status: int | None

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def _look(self, timeout: float | None) -> int | None:
        if self._status is None and select.select([self._report], [], [], timeout)[0]:
            with self._report:
                self._status = int(self._report.recv(64) or -signal.SIGKILL)  # with the fork server it has gone as well
        return self._status


class ForkServer:
    """Starts with the first server; another one with the first server that reads other settings as it starts.

    Args:
        module: what a server runs, as `python -m` does.
        imports: what is imported before.
    """

    def __init__(self, python: Path, module: str, imports: Sequence[str]) -> None:
        self._script, self._modules = [str(python), "-P", str(SCRIPT)], [module, *imports]
        self._controls: dict[frozenset[tuple[str, str]], socket.socket] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], log: IO[bytes], network: str | None = None
    ) -> Forked:
        """A server with these arguments, in a session of its own, and in the network namespace of this name if any."""
        early = frozenset((name, value) for name, value in env.items() if name.startswith(READ_AT_START))
        if early not in self._controls:
            self._controls[early] = self._begin(env, log)
        asked = {"argv": list(argv), "env": dict(env), "cwd": tempfile.gettempdir(), "network": network}
        message = json.dumps(asked).encode()
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            socket.send_fds(self._controls[early], [message], [log.fileno(), other.fileno()])
        mine.settimeout(IMPORT_S)
        pid = mine.recv(64)
        assert pid, f"the fork server has ended; see {log.name}"
        return Forked(int(pid), mine)

    def _begin(self, env: Mapping[str, str], log: IO[bytes]) -> socket.socket:
        """It ends when the socket is closed, as with this process."""
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            process = subprocess.Popen(
                [*self._script, str(other.fileno()), *self._modules],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=dict(env),
                cwd=tempfile.gettempdir(), pass_fds=[other.fileno()], start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return mine
