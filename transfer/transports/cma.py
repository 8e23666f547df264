"""Same host, one copy: the receiver fetches the pieces from the sender's memory with `process_vm_readv`.

The receiver copies, not the sender, although the kernel would allow both: only so a revoked grant ends for good. A
sender that was stopped between looking at the grant and writing would come back and write into memory that belongs to
another request by then. It takes the permission to trace the sender (same user; Yama's ptrace_scope and containers may
forbid it), which `connect` tries out.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np

from transfer.transports.base import Unavailable
from transfer.transports.channel import Channel
from transfer.transports.local import LocalTransport, probe
from transfer.transports.memory import Revocable
from transfer.transports.pull import Fetch, Fetcher, PullEncoder, PullTransport
from transfer.transports.stream import PayloadEncoder
from transfer.transports.unix import credentials
from transfer.transports.vectors import IOV_MAX, Pieces, Vector, read_process
from transfer.transports.wire import PROBE_KEY, CopyOrder, CopyStatus, WireError

MAX_ORDER_NBYTES = 256 << 20
STEP_NBYTES = 16 << 20
"""Copied in one go: what `revoke` and other peers may have to wait for."""


class CmaTransport(PullTransport, LocalTransport):
    """See the module."""

    name = "cma"
    max_nbytes = MAX_ORDER_NBYTES

    def _fetcher(self, channel: Channel) -> Fetcher:
        return _MemoryReader(credentials(channel.socket)[0])

    def _prepare(self, channel: Channel, deadline_at: float) -> PayloadEncoder:
        _ask_for_permission(channel, deadline_at)
        return PullEncoder(MAX_ORDER_NBYTES)


class _MemoryReader(Fetcher):
    """Reads the memory of one process. The kernel copies at once, so a fetch is over when it has had its turns."""

    is_stepwise = True
    max_under_way = 1
    poll_s = 0.0

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def start(self, fetch: Fetch) -> CopyStatus | None:
        fetch.progress = self._copy(fetch.pieces, fetch.held)
        return self.go_on(fetch)

    def go_on(self, fetch: Fetch) -> CopyStatus | None:
        try:
            return next(fetch.progress)
        except OSError as error:
            is_forbidden = error.errno in (errno.EPERM, errno.ENOSYS, errno.EACCES)
            return CopyStatus.FORBIDDEN if is_forbidden else CopyStatus.UNREADABLE

    def probe(self, fetch: Fetch, number: int) -> CopyStatus | None:
        """Whether this process can read the sender's memory, and whether it is the sender's that it reads."""
        pieces = fetch.pieces
        if pieces.total != 8 or len(pieces.nbytes) != 1:
            raise WireError("a probe of something else than 8 bytes")
        seen = np.zeros(1, dtype=np.uint64)
        fetch.progress = self._copy(Pieces(pieces.local, [seen.ctypes.data], pieces.nbytes, 8), None)
        status = self.go_on(fetch)
        return CopyStatus.UNREADABLE if status is CopyStatus.OK and int(seen[0]) != number else status

    def _copy(self, pieces: Pieces, held: Revocable | None) -> Iterator[CopyStatus | None]:
        """None after each turn, and what became of it at the end. Raises OSError."""
        if self._pid <= 0:
            yield CopyStatus.UNREADABLE
            return
        largest = int(np.max(pieces.nbytes)) if pieces.total > STEP_NBYTES else 1
        parts = [pieces] if largest <= STEP_NBYTES else pieces.slices(STEP_NBYTES, IOV_MAX)
        most = min(IOV_MAX, max(1, STEP_NBYTES // largest))
        turn = 0
        for part in parts:
            source, target = Vector.of(part.local, part.nbytes), Vector.of(part.remote, part.nbytes)
            while target.left:
                with nullcontext() if held is None else held.lock:
                    is_over = held is not None and held.revoked
                    if not is_over:
                        turn += read_process(self._pid, source, target, most)
                if is_over:
                    yield CopyStatus.NO_GRANT
                    return
                if turn >= STEP_NBYTES:
                    turn = 0
                    yield None
        yield CopyStatus.OK


def _ask_for_permission(channel: Channel, deadline_at: float) -> None:
    """Have the receiver read a number from this process's memory. Raises Unavailable where it cannot."""
    number = secrets.randbits(64)
    kept = np.array([number], dtype=np.uint64)
    here, size = [kept.ctypes.data], [8]
    order = CopyOrder(0, PROBE_KEY, 1, 8, place=number).encode(here, size, here)
    status = probe(channel, order, deadline_at, "our memory")
    if status is CopyStatus.FORBIDDEN:
        raise Unavailable(
            "the peer may not read this process's memory (process_vm_readv): Yama's ptrace_scope, a container without "
            "CAP_SYS_PTRACE, or a seccomp filter forbids it"
        )
    if status is not CopyStatus.OK:
        raise Unavailable("the peer does not find this process: it is in another PID namespace")
