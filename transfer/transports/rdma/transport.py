"""Any host with a card: the receiver's reads the sender's memory (RDMA READ), so that only the receiver ever writes.

Orders and answers go over TCP connections, as those of `tcp`, and so do the ends of the queue pairs. A connection has
one reliable queue pair at each side. Where a request fails, as one with the key of memory that is not registered any
more does, the cards give up that pair; the receiver says so, and both sides begin a new epoch of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from mooncake_connector.log import get_logger, log_once
from transfer.control.handshake import Identity
from transfer.transports.base import Capabilities, Region, TransportOptions, Unavailable
from transfer.transports.channel import Channel
from transfer.transports.cuda.fetched import LandingFetcher
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.local import probe, take
from transfer.transports.memory import Memory
from transfer.transports.network import NetworkTransport
from transfer.transports.pull import GREET, Fetcher, PullEncoder, PullTransport
from transfer.transports.rdma.card import CELL_NBYTES, Card
from transfer.transports.rdma.completions import Completions
from transfer.transports.rdma.fetcher import EPOCH, RdmaFetcher
from transfer.transports.rdma.keys import MAX_NBYTES
from transfer.transports.rdma.pair import END_NBYTES, End, Pair, decode_end
from transfer.transports.stream import PayloadEncoder, Slice
from transfer.transports.tls import Tls
from transfer.transports.vectors import Pieces, Vector
from transfer.transports.wire import PROBE_KEY, CopyOrder, CopyStatus, WireError

logger = get_logger(__name__)

MAX_TRIES = 3
"""Of a slice: what broke the queue pair may have been another one."""
_TICK_S, _TRIES = 4.096e-6, 8
_MAX_ACK_TIMEOUT = 31


class RdmaTransport(PullTransport, NetworkTransport):
    """See the module.

    Args:
        hosts: the control connections use the first of them, and the card's port that has this address is preferred.
        device: the card's name in /sys/class/infiniband; by default whichever serves best.
        lost_after_s: what a card does not acknowledge for about this long, at least half of it, counts as lost.
    """

    name = "rdma"
    capabilities = Capabilities(device_memory=True, other_host=True, needs_registration=True, needs_library=True)
    fills_stages = True
    max_nbytes = 64 << 20
    max_attached = EPOCH.size + END_NBYTES + MAX_NBYTES

    def __init__(
        self,
        memory: Memory,
        identity: Identity | None = None,
        *,
        hosts: Sequence[str] = ("127.0.0.1",),
        tls: Tls | None = None,
        device: str = "",
        lost_after_s: float = 5.0,
        place: OnDevice | None = None,
    ) -> None:
        """Raises Unavailable with the reason where there is no card, or not what it takes to use it."""
        super().__init__(
            memory, identity, hosts=hosts[:1], streams=1, tls=tls, lost_after_s=lost_after_s, place=place
        )
        self._ack_timeout = ack_timeout(lost_after_s)
        self._card = Card(hosts[0], device)
        try:
            self._completions = Completions(self._card)
            # Of queue pairs that only answer: nothing is ever in it.
            self._silent = self._card.completion_queue(1)
        except (OSError, RuntimeError) as error:
            self._card.close()
            raise Unavailable(f"{self._card.rail} cannot be used: {error}") from error
        self._is_open = True

    @classmethod
    def make(cls, memory: Memory, options: TransportOptions) -> RdmaTransport:
        return cls(memory, options.identity, hosts=options.hosts, tls=options.tls, place=options.place)

    def register(self, region: Region) -> None:
        self._card.register(region)

    def unregister(self, region: Region) -> None:
        self._card.unregister(region)

    def close(self) -> None:
        super().close()
        with self._lock:
            is_open, self._is_open = self._is_open, False
        if is_open:
            self._completions.close()
            self._silent.close()
            self._card.close()

    def _fetcher(self, channel: Channel) -> Fetcher:
        fetcher = RdmaFetcher(self._card, self._completions, self._ack_timeout)
        return fetcher if self.stages is None else LandingFetcher(fetcher, self.stages)

    def _prepare(self, channel: Channel, deadline_at: float) -> PayloadEncoder:
        channel.settimeout(max(0.001, deadline_at - time.monotonic()))
        channel.sendall(GREET)
        said = take(channel, END_NBYTES, deadline_at, "our memory")
        try:
            encoder = _KeyEncoder(self._card, Pair(self._card, self._silent, 1), decode_end(said))
        except WireError as error:
            raise Unavailable(str(error)) from error
        try:
            self._try_out(channel, encoder, deadline_at)
        except BaseException:
            encoder.close()
            raise
        return encoder

    def _try_out(self, channel: Channel, encoder: _KeyEncoder, deadline_at: float) -> None:
        """Have the peer connect its queue pair and read a number. Raises Unavailable, OSError."""
        cells, pieces = self._card.cells, [self._card.cells.address]
        order = CopyOrder(0, PROBE_KEY, 1, CELL_NBYTES, cells.number)
        attached = encoder.end.encode() + self._card.keys()[1].encode(pieces)
        status = probe(
            channel, order.encode(pieces, [CELL_NBYTES], pieces, attachment=attached), deadline_at, "our memory"
        )
        if status is CopyStatus.FORBIDDEN:
            raise Unavailable(f"the peer's card read another memory than that of {self._card.rail}")
        if status is not CopyStatus.OK:
            raise Unavailable(
                f"the peer's card cannot read over {self._card.rail}: are both in one network, is UDP port 4791 open?"
            )


class _KeyEncoder(PullEncoder):
    """Tells the keys of the memory to send; has the queue pair by which it is read."""

    def __init__(self, card: Card, pair: Pair, peer: End) -> None:
        """Takes over the pair. Raises OSError."""
        super().__init__(RdmaTransport.max_nbytes)
        self._card, self._pair, self._peer, self._epoch = card, pair, peer, 0
        try:
            pair.serve(peer, 0)
        except OSError:
            pair.close()
            raise

    @property
    def end(self) -> End:
        return self._pair.end

    def attachment(self, pieces: Pieces) -> bytes:
        return EPOCH.pack(self._epoch) + self._card.keys()[1].encode(pieces.local)

    def encode(self, part: Slice) -> Vector:
        part.place = self._epoch
        return super().encode(part)

    def failed(self, part: Slice, status: CopyStatus) -> bool:
        """The first that says that this epoch's queue pair broke begins the next, where the others are sent again."""
        if status is not CopyStatus.BROKEN:
            return False
        if part.place == self._epoch:
            self._epoch += 1
            self._pair.serve(self._peer, self._epoch)
        part.tries += 1
        return part.tries < MAX_TRIES

    def close(self) -> None:
        try:
            self._pair.close()
        except OSError as error:
            log_once("transfer.rdma.close", "rdma: a queue pair cannot be closed: %s", error, logger=logger)


def ack_timeout(lost_after_s: float) -> int:
    """The verbs' code: a power of two, of which `_TRIES` take at most `lost_after_s`."""
    return max(1, min(_MAX_ACK_TIMEOUT, int(math.log2(lost_after_s / _TRIES / _TICK_S))))
