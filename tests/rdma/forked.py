"""Other processes of the tests, as `transfer.testing.process.Process`, of which each costs no start of Python.

`python forked.py SOCKET` imports all that they need, and forks one for each connection to its socket. It has no card
itself: the memory that a card knows does not go with a fork.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transfer.testing.process import Process, main
from transfer.transports.base import Transport


@contextmanager
def forking(folder: Path) -> Iterator[Path]:
    """The socket of a process that forks others."""
    path = folder / "forking"
    with subprocess.Popen([sys.executable, __file__, str(path)], cwd="/") as process:
        try:
            while not path.exists():
                assert process.poll() is None
                time.sleep(0.05)
            yield path
        finally:
            process.kill()


class _Child:
    """What `Process` wants of a `subprocess.Popen`."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self.stdin, self.stdout = self._socket.makefile("w"), self._socket.makefile("r")
        self.pid = int(self.stdout.readline())

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Its end of the connection goes with it."""
        with suppress(ConnectionResetError):  # it had not read all that it was told
            self.stdout.read()
        self._socket.close()


class Forked(Process):
    """Another process with a transport of the same class."""

    def __init__(self, path: Path, transport: type[Transport], options: dict[str, Any]) -> None:
        self.process: Any = _Child(path)
        self.tell(name=f"{transport.__module__}:{transport.__qualname__}", options=json.dumps(options))


def fork(path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen()
    os.rename(f"{path}.new", path)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sys.stdin, sys.stdout = connection.makefile("r"), connection.makefile("w")
            print(os.getpid(), flush=True)
            main(**json.loads(sys.stdin.readline()))
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    import transfer.transports.rdma.transport  # noqa: F401
    from transfer.transports.rdma.verbs import binding

    binding()
    fork(sys.argv[1])
