"""Processes that do TLS, seen from outside, and a pair of transports of which each has one."""

import os
import time
from contextlib import suppress
from pathlib import Path

from simulated.waiting import wait_for

from transfer.testing.memory import MIB, Buffer, int64
from transfer.testing.process import Process
from transfer.transports.base import Unavailable
from transfer.transports.memory import Memory
from transfer.transports.tcp import TcpTransport
from transfer.transports.tls import Tls


def helpers(pid=None):
    """Processes that do TLS and are children of `pid`, those that nobody has waited for included."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, _, rest = status.read_text().rpartition(")")
            is_ours = "tls_relay.py" in (status.parent / "cmdline").read_text() or rest.split()[0] == "Z"
            if is_ours and int(rest.split()[1]) == (pid or os.getpid()):
                found.append(int(status.parent.name))
    return found


def running():
    """The one that runs. It may have no name yet: who starts it goes on before the kernel has noted its arguments."""

    def named():
        return [pid for pid in helpers() if Path(f"/proc/{pid}/cmdline").read_text()]

    wait_for(named)
    (pid,) = named()
    return pid


class Pair:
    """A sender here, and a receiver in another process, which has a process for its TLS as well."""

    def __init__(self, stack, files, nbytes=64 * MIB, **options):
        self.other = Process(TcpTransport, {"tls": files, "lost_after_s": 60.0})
        stack.callback(self.other.kill)
        self.endpoint, self.grant = self.other.offer(nbytes)
        self.memory = Memory()
        self.source = Buffer(nbytes, seed=1)
        self.memory.register(self.source.address, nbytes)
        self.sender = stack.enter_context(TcpTransport(self.memory, tls=Tls(**files), **options))
        self.peer = None

    def connect(self):
        """Also where the process that did TLS has just ended, some times in a row."""
        for attempt in range(100):
            try:
                self.peer = self.sender.connect(self.endpoint, deadline_s=60)
                return self.peer
            except Unavailable:
                assert attempt < 99
                time.sleep(0.1)

    def write(self, deadline_s=60):
        return self.peer.write(
            self.grant, int64(self.source.address), self.grant.addresses, self.grant.nbytes, deadline_s=deadline_s
        )

    @property
    def helper_there(self):
        (pid,) = helpers(self.other.process.pid)
        return pid
