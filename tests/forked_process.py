"""Other processes of the tests, as `transfer.testing.process.Process`, of which each costs no start of Python.

`python forked_process.py SOCKET MODULE...` imports what they need, and forks one for each connection to its socket. It
has no transport itself: threads, and the memory that a card knows, do not go with a fork.
"""

from __future__ import annotations

import importlib
import json
import os
import select
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
def forking(folder: Path, *modules: str) -> Iterator[Path]:
    """The socket of a process that forks others, which have these modules."""
    path = folder / "forking"
    # It ends with this process, however that ends.
    with subprocess.Popen([sys.executable, __file__, str(path), *modules], stdin=subprocess.PIPE, cwd="/") as process:
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
        with suppress(ConnectionResetError, ValueError):  # it had not read all that it was told, or is gone since long
            self.stdout.read()
        self._socket.close()


class Forked(Process):
    """Another process with a transport of the same class."""

    def __init__(self, path: Path, transport: type[Transport], options: dict[str, Any]) -> None:
        self.process: Any = _Child(path)
        self.tell(name=f"{transport.__module__}:{transport.__qualname__}", options=json.dumps(options))

    def stop(self) -> None:
        """Only a parent is told by the system when all threads have stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        while any(is_running(thread) for thread in Path(f"/proc/{self.process.pid}/task").iterdir()):
            time.sleep(0.001)


def is_running(thread: Path) -> bool:
    """By its folder in /proc."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] != "T"
    return False


def fork(path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen()
    os.rename(f"{path}.new", path)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
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
    for module in sys.argv[2:]:
        importlib.import_module(module)
    fork(sys.argv[1])
