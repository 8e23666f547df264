"""The receiving side of one peer: its orders become reads of its memory."""

from __future__ import annotations

import struct

from transfer.transports.pull import Fetch, Fetcher
from transfer.transports.rdma.card import CELL_NBYTES, Card
from transfer.transports.rdma.completions import Completions
from transfer.transports.rdma.keys import decode_keys
from transfer.transports.rdma.pair import END_NBYTES, decode_end
from transfer.transports.rdma.reader import Done, Reader
from transfer.transports.rdma.work import plan
from transfer.transports.vectors import Pieces
from transfer.transports.wire import CopyStatus, WireError

EPOCH = struct.Struct("<Q")
"""Before the keys that are attached to an order."""
MAX_EPOCH = 1 << 32


class RdmaFetcher(Fetcher):
    """See the module; the queue pair is made once the peer has shown who it is."""

    greets = True
    max_under_way = 64
    poll_s = 0.2

    def __init__(self, card: Card, completions: Completions, ack_timeout: int) -> None:
        self._card, self._completions, self._ack_timeout = card, completions, ack_timeout
        self._reader: Reader | None = None

    def greeting(self) -> bytes:
        """Our end of the queue pair. Raises OSError."""
        self._reader = Reader(self._card, self._completions)
        return self._reader.end.encode()

    def probe(self, fetch: Fetch, number: int) -> CopyStatus | None:
        """Connect to the sender's end, which is attached, and read the number that it said."""
        reader, cells = self._reader, self._card.cells
        if reader is None or reader.is_connected or fetch.pieces.total != CELL_NBYTES:
            raise WireError("a probe out of turn")
        place = cells.place()

        def done(status: CopyStatus) -> None:
            is_right = status is not CopyStatus.OK or cells.holds(place, number)
            fetch.done(status if is_right else CopyStatus.FORBIDDEN)

        reader.connect(decode_end(fetch.attachment[:END_NBYTES]), self._ack_timeout)
        pieces = Pieces(fetch.pieces.local, [cells.address_of(place)], [CELL_NBYTES], CELL_NBYTES)
        return self._begin(reader, fetch, pieces, done, 0, fetch.attachment[END_NBYTES:])

    def start(self, fetch: Fetch) -> CopyStatus | None:
        reader = self._reader
        if reader is None or not reader.is_connected or len(fetch.attachment) < EPOCH.size:
            raise WireError("an order before the queue pairs were connected")
        (epoch,) = EPOCH.unpack_from(fetch.attachment)
        if epoch >= MAX_EPOCH:
            raise WireError(f"epoch {epoch}: expected less than {MAX_EPOCH}")
        return self._begin(reader, fetch, fetch.pieces, fetch.done, epoch, fetch.attachment[EPOCH.size :])

    def go_on(self, fetch: Fetch) -> CopyStatus | None:
        assert self._reader is not None
        self._reader.look_after(fetch)
        return None

    def cancel(self, fetch: Fetch) -> None:
        assert self._reader is not None
        self._reader.cancel(fetch)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _begin(
        self, reader: Reader, fetch: Fetch, pieces: Pieces, done: Done, epoch: int, keys: bytes
    ) -> CopyStatus | None:
        here, _ = self._card.keys()
        work = plan(pieces, decode_keys(keys), here, self._card.max_request_nbytes, self._card.max_ranges)
        return CopyStatus.UNREADABLE if work is None else reader.add(fetch, done, work, epoch)
