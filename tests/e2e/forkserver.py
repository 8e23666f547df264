"""Forks servers of an engine that it has imported already, which is most of what a small server does until it serves.

    forkserver.py CONTROL_FD MODULE IMPORTED...

`CONTROL_FD` is a SOCK_SEQPACKET socket, and its end the end of this process. A message is JSON: `argv`, `env` and `cwd`
of a server, which runs MODULE as `python -m` does, in a session of its own, and `network`, the name of a namespace or
null; with it come its log and a socket, over which whoever asked is told its process id, and later its exit status.
Standard library only: it runs in an engine's environment, with one thread, which is why a fork is safe. The tests' side
is `forked.py`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

MOST_NBYTES = 1 << 17
CLONE_NEWNET = 0x40000000


def serve(control: socket.socket) -> dict[str, Any] | None:
    """What to run, in the process of a new server; None in this one, at its end."""
    told, tell = os.pipe()
    for fd in (told, tell):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(tell)
    servers: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([control, told], [], [])
        if told in ready:
            os.read(told, 4096)
            bury(servers)
        if control not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(control, MOST_NBYTES, 2)
        if not message:  # whoever asked has been killed: nobody else would end these
            for pid in servers:
                for kill in (os.killpg, os.kill):  # one that was just forked has no group of its own yet
                    with suppress(ProcessLookupError):
                        kill(pid, signal.SIGKILL)
            return None
        log, report = fds[0], socket.socket(fileno=fds[1])
        pid = os.fork()
        if pid:
            os.close(log)
            report.send(str(pid).encode())
            servers[pid] = report
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for fd in (1, 2):
            os.dup2(log, fd)
        for fd in (told, tell, log):
            os.close(fd)
        for one in (control, report, *servers.values()):
            one.close()
        asked: dict[str, Any] = json.loads(message)
        return asked


def bury(servers: dict[int, socket.socket]) -> None:
    """Tell of servers that have ended."""
    for pid in list(servers):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with servers.pop(pid) as report, suppress(OSError):  # nobody waits for it any more
                report.send(str(os.waitstatus_to_exitcode(status)).encode())


def enter(network: str) -> None:
    """As `ip netns exec`."""
    with open(f"/run/netns/{network}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {network}")


def main() -> None:
    control, module = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    for name in sys.argv[3:]:
        importlib.import_module(name)
    asked = serve(control)
    if asked is None:
        return
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(asked["env"])
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # where it finds the plugins of its engine
    sys.path[:] = [*filter(None, own), *(path for path in sys.path if path not in {*inherited, *own})]
    os.chdir(asked["cwd"])
    if asked["network"]:
        enter(asked["network"])
    sys.argv[1:] = asked["argv"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
