"""One end of a connection between two cards: a queue pair, what the other end must know of it, and its states."""

from __future__ import annotations

import math
import secrets
import struct
from dataclasses import dataclass

from transfer.transports.rdma.abi import Access
from transfer.transports.rdma.card import Card
from transfer.transports.rdma.queue_pair import Chain
from transfer.transports.rdma.verbs import Queue
from transfer.transports.wire import WireError

_END = struct.Struct("<IIHBB16s")
END_NBYTES = _END.size
_NUMBER_BITS = 24
_EPOCH_STEP = 0x9E3779
"""Far apart, so that nothing late is taken for what came after it."""
_MAX_MTU = 5
_ROUTERS = 64
"""Hop limit."""
_TICK_S = 4.096e-6
_MAX_ACK_TIMEOUT = 31


@dataclass(frozen=True, slots=True)
class End:
    """What the other side must know.

    Args:
        number: of the queue pair, 24 bits; `sequence` as many, of the first packet it sends in epoch 0.
        mtu: the verbs' code for it, 1 to 5.
        max_reads: how many of the other side's it serves at a time, 1 to 255.
    """

    number: int
    sequence: int
    lid: int
    mtu: int
    max_reads: int
    gid: bytes

    def encode(self) -> bytes:
        return _END.pack(self.number, self.sequence, self.lid, self.mtu, self.max_reads, self.gid)


def decode_end(data: bytes) -> End:
    """Raises WireError for what no peer sends."""
    if len(data) != END_NBYTES:
        raise WireError(f"the end of a queue pair in {len(data)} bytes: expected {END_NBYTES}")
    end = End(*_END.unpack(data))
    if (end.number | end.sequence) >> _NUMBER_BITS or not 1 <= end.mtu <= _MAX_MTU or not end.max_reads:
        raise WireError(f"no queue pair has number {end.number:#x}, sequence {end.sequence:#x}, MTU code {end.mtu}")
    return end


class Pair:
    """This end. Every state is entered anew in each epoch, which both sides count. For one thread at a time."""

    def __init__(self, card: Card, completions: Queue, max_requests: int) -> None:
        """Raises OSError."""
        self._card = card
        self.queue_pair = card.queue_pair(completions, max_requests)
        sequence = secrets.randbits(_NUMBER_BITS)
        self.end = End(self.queue_pair.number, sequence, card.lid, card.mtu, card.max_reads, card.rail.gid)

    def serve(self, peer: End, epoch: int) -> None:
        """Let the peer read what it has keys of. Raises OSError."""
        self._receive(peer, epoch, Access.REMOTE_READ)
        self._send(peer, epoch)  # what binds memory windows

    def read_from(self, peer: End, epoch: int) -> None:
        """Be ready to read. Raises OSError."""
        self._receive(peer, epoch, Access(0))
        self._send(peer, epoch)

    def post(self, chain: Chain) -> None:
        """Raises OSError."""
        self.queue_pair.post(chain)

    def fail(self) -> None:
        """Have the card give up all that is under way, each with a completion. Raises OSError."""
        self.queue_pair.fail()

    def close(self) -> None:
        """Once this returned, the card neither reads nor writes for it. Raises OSError."""
        self.queue_pair.close()

    def _receive(self, peer: End, epoch: int, access: Access) -> None:
        if epoch:
            self.queue_pair.reset()
        rail, settings = self._card.rail, self._card.settings
        self.queue_pair.to_init(rail.port, access, settings.pkey_index)
        self.queue_pair.to_rtr(
            peer.number, _sequence(peer, epoch), peer.lid, peer.gid, rail.port, sgid_index=self._card.gid_index,
            mtu=min(self._card.mtu, peer.mtu), hop_limit=_ROUTERS, max_dest_rd_atomic=self._card.max_reads,
            sl=settings.service_level, traffic_class=settings.traffic_class,
        )  # fmt: skip

    def _send(self, peer: End, epoch: int) -> None:
        reads, settings = min(self._card.max_reads, peer.max_reads), self._card.settings
        timeout = ack_timeout(settings.lost_after_s, settings.retries)
        self.queue_pair.to_rts(
            _sequence(self.end, epoch), timeout=timeout, retry_cnt=settings.retries, max_rd_atomic=reads
        )


def _sequence(end: End, epoch: int) -> int:
    return (end.sequence + epoch * _EPOCH_STEP) % (1 << _NUMBER_BITS)


def ack_timeout(lost_after_s: float, retries: int) -> int:
    """The verbs' code, a power of two: what is said so often again takes at most `lost_after_s`."""
    return max(1, min(_MAX_ACK_TIMEOUT, int(math.log2(lost_after_s / (retries + 1) / _TICK_S))))
