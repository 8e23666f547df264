"""The receiving side of one peer: its orders become reads of its memory, each over the rail that its sender chose."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence

from mooncake_connector.log import get_logger, log_once
from transfer.transports.cuda.driver import CudaError
from transfer.transports.pull import Fetch, Fetcher
from transfer.transports.rdma.card import CELL_NBYTES
from transfer.transports.rdma.gpudirect import DeviceRegions
from transfer.transports.rdma.keys import decode_keys
from transfer.transports.rdma.opened import OpenRail
from transfer.transports.rdma.pair import END_NBYTES, decode_end
from transfer.transports.rdma.rails import MAX_RAILS
from transfer.transports.rdma.reader import Done, Reader
from transfer.transports.rdma.work import plan
from transfer.transports.vectors import Pieces
from transfer.transports.wire import CopyStatus, WireError

logger = get_logger(__name__)

WHERE = struct.Struct("<II")
"""Before what else is attached to an order: the receiver's rail, by number, and the epoch of its queue pair."""
COUNT = struct.Struct("<B")
"""Before the ends in a greeting."""
MAX_GREETING_NBYTES = COUNT.size + MAX_RAILS * END_NBYTES


class RdmaFetcher(Fetcher):
    """See the module; the queue pairs are made once the peer has shown who it is, one for each rail."""

    greets = True
    max_under_way = 64
    poll_s = 0.2

    def __init__(self, rails: Sequence[OpenRail], device: DeviceRegions | None = None) -> None:
        """`device` has what the cards fill of a device's memory."""
        self._rails, self._device = rails, device
        self.num_lanes = len(rails)
        self._readers: list[Reader] = []

    def greeting(self) -> bytes:
        """Our ends of the queue pairs. Raises OSError."""
        for rail in self._rails:
            self._readers.append(Reader(rail.card, rail.completions))
        return COUNT.pack(len(self._readers)) + b"".join(reader.end.encode() for reader in self._readers)

    def probe(self, fetch: Fetch, number: int) -> CopyStatus | None:
        """Connect a rail to the sender's end, which is attached, and read the number that it said."""
        rail, epoch, rest = self._where(fetch)
        if fetch.pieces.total != CELL_NBYTES or len(fetch.pieces.nbytes) != 1:
            raise WireError("a probe of another size than a number's")
        reader, cells = self._readers[rail], self._rails[rail].card.cells
        place = cells.place()

        def read(status: CopyStatus) -> CopyStatus:
            is_right = status is not CopyStatus.OK or cells.holds(place, number)
            return status if is_right else CopyStatus.FORBIDDEN

        if not reader.connect(decode_end(rest[:END_NBYTES]), epoch):
            return CopyStatus.BROKEN
        pieces = Pieces(fetch.pieces.local, [cells.address_of(place)], [CELL_NBYTES], CELL_NBYTES)
        over = self._begin(rail, fetch, pieces, lambda status: fetch.done(read(status)), epoch, rest[END_NBYTES:])
        return None if over is None else read(over)

    def lane(self, fetch: Fetch) -> int:
        named, _ = WHERE.unpack(fetch.attachment[: WHERE.size].ljust(WHERE.size, b"\0"))
        return int(min(named, self.num_lanes - 1))

    def fills(self, fetch: Fetch) -> bool:
        return self._device is not None and self._device.cover(fetch.pieces.remote, fetch.pieces.nbytes)

    def start(self, fetch: Fetch) -> CopyStatus | None:
        rail, epoch, keys = self._where(fetch)
        device = self._device
        if device is None or not device.cover_first(fetch.pieces.remote, fetch.pieces.nbytes):
            return self._begin(rail, fetch, fetch.pieces, fetch.done, epoch, keys)
        over = self._begin(
            rail, fetch, fetch.pieces, lambda status: fetch.done(_settled(device, status)), epoch, keys
        )
        return None if over is None else _settled(device, over)

    def go_on(self, fetch: Fetch) -> CopyStatus | None:
        if fetch.progress is not None:  # else it named no rail, and its connection ends
            self._readers[fetch.progress].look_after(fetch)
        return None

    def cancel(self, fetch: Fetch) -> None:
        if fetch.progress is not None:
            self._readers[fetch.progress].cancel(fetch)

    def close(self) -> None:
        """Raises OSError where one of the queue pairs did not end; all others have."""
        with contextlib.ExitStack() as stack:
            if self._device is not None:
                stack.callback(_settle, self._device)
            for reader in self._readers:
                stack.callback(reader.close)

    def _where(self, fetch: Fetch) -> tuple[int, int, bytes]:
        """Number of the rail, epoch, and what is attached besides. Raises WireError."""
        if len(fetch.attachment) < WHERE.size:
            raise WireError("an order that names no rail")
        rail, epoch = WHERE.unpack_from(fetch.attachment)
        if rail >= len(self._readers):
            raise WireError(f"rail {rail}: there are {len(self._readers)}")
        fetch.progress = rail
        return rail, epoch, fetch.attachment[WHERE.size :]

    def _begin(
        self, rail: int, fetch: Fetch, pieces: Pieces, done: Done, epoch: int, keys: bytes
    ) -> CopyStatus | None:
        card = self._rails[rail].card
        here, _ = card.keys()
        work = plan(pieces, decode_keys(keys), here, card.max_request_nbytes, card.max_ranges)
        return CopyStatus.UNREADABLE if work is None else self._readers[rail].add(fetch, done, work, epoch)


def _settled(device: DeviceRegions, status: CopyStatus) -> CopyStatus:
    """A fetch into memory of a device is over, however it ended; it holds its grant until nothing is on its way."""
    if not _settle(device) and status is CopyStatus.OK:
        return CopyStatus.UNWRITABLE
    return status


def _settle(device: DeviceRegions) -> bool:
    """Whether the device sees all that cards wrote; one that does not has failed, with all that it had."""
    try:
        device.settle()
    except CudaError as error:
        log_once("transfer.rdma.settle", "rdma: a GPU does not take what a card wrote: %s", error, logger=logger)
        return False
    return True
