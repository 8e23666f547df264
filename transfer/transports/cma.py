"""Same host, one copy: the receiver fetches the pieces from the sender's memory with `process_vm_readv`.

The receiver copies, not the sender, although the kernel would allow both: only so a revoked grant ends for good. A
sender that was stopped between looking at the grant and writing would come back and write into memory that belongs to
another request by then. It takes the permission to trace the sender (same user; Yama's ptrace_scope and containers may
forbid it), which `connect` tries out.
"""

from __future__ import annotations

import errno
import secrets
import socket

import numpy as np

from transfer.control.handshake import Server
from transfer.transports.base import Numbers, Unavailable
from transfer.transports.local import LocalTransport, probe
from transfer.transports.memory import Memory, Revocable
from transfer.transports.receiver import Connection
from transfer.transports.stream import Carriage, Slice
from transfer.transports.unix import credentials
from transfer.transports.vectors import IOV_MAX, Pieces, Vector, read_process
from transfer.transports.wire import PROBE_KEY, Order, Status, WireError

MAX_ORDER_NBYTES = 256 << 20
STEP_NBYTES = 16 << 20
"""Copied in one go: what `revoke` and other peers may have to wait for."""


class CmaTransport(LocalTransport):
    """See the module."""

    name = "cma"

    def _connection(self, connection: socket.socket, server: Server) -> Connection:
        return _FetchingConnection(connection, server, self.memory)

    def _prepare(self, connection: socket.socket, deadline_at: float) -> Carriage:
        _ask_for_permission(connection, deadline_at)
        return _Announce()


class _Announce(Carriage):
    """Sends where the bytes are, not the bytes."""

    max_nbytes = MAX_ORDER_NBYTES

    def load(self, part: Slice) -> Vector:
        pieces = part.pieces
        order = Order(part.number, part.batch.grant.key, len(pieces.nbytes), pieces.total)
        return Vector.over(order.encode(pieces.remote, pieces.nbytes, pieces.local))


class _FetchingConnection(Connection):
    """Reads the sender's memory."""

    columns = 3
    max_nbytes = MAX_ORDER_NBYTES

    def __init__(self, connection: socket.socket, server: Server, memory: Memory) -> None:
        super().__init__(connection, server, memory)
        self._pid, _ = credentials(connection)

    def execute(self, order: Order, columns: list[Numbers], held: Revocable) -> bool:
        pieces = Pieces(columns[2], columns[0], columns[1], order.nbytes)
        return self.answer(order, self._fetch(pieces, held))

    def probe(self, order: Order, columns: list[Numbers]) -> bool:
        """Whether this process can read the sender's memory, and whether it is the sender's that it reads."""
        if order.nbytes != 8 or order.pieces != 1:
            raise WireError("a probe of something else than 8 bytes")
        seen = np.zeros(1, dtype=np.uint64)
        target = Pieces(columns[2], [seen.ctypes.data], columns[1], order.nbytes)
        status = self._fetch(target, None)
        if status is Status.OK and int(seen[0]) != order.place:
            status = Status.UNREADABLE
        return self.answer(order, status)

    def _fetch(self, pieces: Pieces, held: Revocable | None) -> Status:
        if self._pid <= 0:
            return Status.UNREADABLE
        largest = int(np.max(pieces.nbytes)) if pieces.total > STEP_NBYTES else 1
        parts = [pieces] if largest <= STEP_NBYTES else pieces.slices(STEP_NBYTES, IOV_MAX)
        most = min(IOV_MAX, max(1, STEP_NBYTES // largest))
        try:
            for part in parts:
                source, target = Vector.of(part.local, part.nbytes), Vector.of(part.remote, part.nbytes)
                while target.left:
                    if held is None:
                        read_process(self._pid, source, target)
                        continue
                    with held.lock:
                        if held.revoked:
                            return Status.NO_GRANT
                        read_process(self._pid, source, target, most)
        except OSError as error:
            return Status.FORBIDDEN if error.errno in (errno.EPERM, errno.ENOSYS, errno.EACCES) else Status.UNREADABLE
        return Status.OK


def _ask_for_permission(connection: socket.socket, deadline_at: float) -> None:
    """Have the receiver read a number from this process's memory. Raises Unavailable where it cannot."""
    number = secrets.randbits(64)
    kept = np.array([number], dtype=np.uint64)
    here, size = [kept.ctypes.data], [8]
    order = Order(0, PROBE_KEY, 1, 8, place=number).encode(here, size, here)
    status = probe(connection, order, deadline_at, "our memory")
    if status is Status.FORBIDDEN:
        raise Unavailable(
            "the peer may not read this process's memory (process_vm_readv): Yama's ptrace_scope, a container without "
            "CAP_SYS_PTRACE, or a seccomp filter forbids it"
        )
    if status is not Status.OK:
        raise Unavailable("the peer does not find this process: it is in another PID namespace")
