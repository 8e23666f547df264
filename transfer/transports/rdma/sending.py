"""The sender's side of one peer: which rail each slice goes over, with the keys that the peer's card needs for it."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_connector.log import get_logger, log_once
from transfer.transports.base import Completion, Grant
from transfer.transports.pull import PullEncoder
from transfer.transports.rdma.card import CELL_NBYTES, Card
from transfer.transports.rdma.fetcher import WHERE
from transfer.transports.rdma.gpudirect import DeviceRegions
from transfer.transports.rdma.opened import OpenRail
from transfer.transports.rdma.pair import End, Pair
from transfer.transports.rdma.paths import Path, Paths, RailCounts
from transfer.transports.rdma.rails import matched
from transfer.transports.rdma.reader import LOOK_S
from transfer.transports.rdma.verbs import Queue, Window
from transfer.transports.rdma.windows import BATCH, Windows
from transfer.transports.stream import Slice, WriteRequest
from transfer.transports.vectors import Pieces, Vector
from transfer.transports.wire import PROBE_KEY, CopyOrder, CopyStatus

logger = get_logger(__name__)

MAX_TRIES = 3
"""Of a slice: what broke the queue pair may have been another one."""
SHARED_NBYTES = 16 << 20
"""Of a slice where there are several rails, so that the last ones even out their speeds."""
_BYTES_PER_GBIT = 1e9 / 8
_BROKE = "its queue pair broke (the peer logged why)"
_DOWN = "its port is down"
_EPOCH_SHIFT = 8
"""Of `Slice.place`, above the number of the rail."""


class _Probe(WriteRequest):
    """Asks the peer to connect a rail anew and to read a number over it."""

    __slots__ = ("path",)

    def __init__(self, path: Path, address: int) -> None:
        pieces = Pieces([address], [address], [CELL_NBYTES], CELL_NBYTES)
        none = np.zeros(0, dtype=np.int64)
        super().__init__(pieces, Grant(PROBE_KEY, none, none), Completion(float("inf")), CELL_NBYTES)
        self.path = path


class RailEncoder(PullEncoder):
    """See the module. `Paths` decides."""

    def __init__(
        self,
        rails: Sequence[OpenRail],
        ends: Sequence[End],
        counts: RailCounts,
        max_nbytes: int,
        device: DeviceRegions | None = None,
    ) -> None:
        """`ends` are the peer's, one for each of its rails; `device` has what is sent straight from one. Raises
        OSError."""
        self._peer, self._counts, self._device = ends, counts, device
        self._cards: list[Card] = []
        self._pairs: list[Pair] = []
        self._queues: list[Queue] = []
        self._windows: list[Windows] = []
        self._opened: dict[Slice, list[Window]] = {}
        self.why_not = ""
        """The last reason for which a rail did not work."""
        paths = []
        try:
            for number, ours in enumerate(matched([rail.card.rail.gid for rail in rails], [end.gid for end in ends])):
                card = rails[ours].card
                self._cards.append(card)
                self._queues.append(card.completion_queue(2 * BATCH))  # also what an epoch before has left
                self._pairs.append(Pair(card, self._queues[-1], BATCH))
                self._windows.append(Windows(card, self._pairs[-1], self._queues[-1]))
                paths.append(Path(number, card.rail.name, (card.rail.gbit_per_s or 1.0) * _BYTES_PER_GBIT))
        except OSError:
            self.close()
            raise
        self._look_at = 0.0
        self.asked: dict[int, Slice] = {}
        super().__init__(max_nbytes if len(paths) == 1 else SHARED_NBYTES)
        self.num_paths = len(paths)
        self.paths = Paths(paths, counts)

    def has_room(self) -> bool:
        return self.paths.best() is not None

    def errand(self) -> Slice | None:
        """A rail is to be tried: it serves in a new epoch, of which the peer is told.

        Raises OSError where none works any more.
        """
        now = time.monotonic()
        self._look(now)
        for path in self.paths.due(now):
            path.begin_try()
            card = self._cards[path.number]
            try:
                if not card.is_up:
                    raise OSError(_DOWN)
                self._windows[path.number].drop()
                self._pairs[path.number].serve(self._peer[path.number], path.epoch)
            except OSError as error:
                self.why_not = f"{card.rail}: {error}"
                if not path.in_flight_nbytes:
                    self.paths.tried(path, now, str(error))
                    continue  # else the peer is told nevertheless, so that it gives up what it waits for
            return _Probe(path, card.cells.address).next_slice()
        self._insist()
        return None

    @property
    def errand_at(self) -> float | None:
        times = [self.paths.next_try_at, self._look_at if self.paths.is_busy else None]
        return min((at for at in times if at is not None), default=None)

    def _look(self, now: float) -> None:
        if now < self._look_at or not self.paths.is_busy:
            return
        self._look_at = now + LOOK_S
        for path in self.paths.all:
            if path.is_in and not self._cards[path.number].is_up:
                self.paths.broke(path, path.epoch, now, _DOWN)

    def encode(self, part: Slice) -> Vector:
        return Vector.over(self.order(part))

    def order(self, part: Slice) -> array[int]:
        """What says to the peer what to read, over which rail, with which keys."""
        write, pieces = part.write, part.pieces
        path = write.path if isinstance(write, _Probe) else self.paths.best()
        assert path is not None
        card = self._cards[path.number]
        part.place = path.number | path.epoch << _EPOCH_SHIFT
        expected, attached = 0, WHERE.pack(path.number, path.epoch)
        if isinstance(write, _Probe):
            expected = card.cells.number
            attached += self._pairs[path.number].end.encode() + card.keys()[1].encode(pieces.local)
        else:
            attached += self._told(path, part)
            path.order(pieces.total, time.monotonic())
        order = CopyOrder(part.number, write.grant.key, len(pieces.nbytes), pieces.total, expected)
        return order.encode(pieces.remote, pieces.nbytes, pieces.local, attachment=attached, mark=part.mark)

    def _told(self, path: Path, part: Slice) -> bytes:
        """Keys by which the peer may read a slice: of windows that are open until it is over, or of whole regions.

        Where a window does not open, one that the peer's card is refused: the slice goes over another rail then.
        """
        card, pieces = self._cards[path.number], part.pieces
        try:
            windows, keys = self._windows[path.number].open(pieces)
        except OSError as error:
            self._broke(path, error)
            return card.unreadable(pieces)
        if not windows:
            return self.keys(card, pieces)
        self._opened[part] = windows
        return keys.encode(pieces.local)

    def keys(self, card: Card, pieces: Pieces) -> bytes:
        """By which the peer may read these pieces where there are no windows."""
        return card.keys()[1].encode(pieces.local)

    def _broke(self, path: Path, error: OSError) -> None:
        """What it had is refused from now on."""
        with contextlib.suppress(OSError):
            self._pairs[path.number].fail()
        self.paths.broke(path, path.epoch, time.monotonic(), str(error))

    def release(self, part: Slice, status: CopyStatus | None) -> None:
        path, now, device = self._path_of(part), time.monotonic(), self._device
        if status is CopyStatus.BROKEN and not isinstance(part.write, _Probe):  # its windows do not close either then
            self.paths.broke(path, part.place >> _EPOCH_SHIFT, now, _BROKE)
        if windows := self._opened.pop(part, None):
            try:
                self._windows[path.number].close(windows)
            except OSError as error:
                self._broke(path, error)
        if not isinstance(part.write, _Probe):
            is_there = status is CopyStatus.OK
            self.paths.over(path, part.pieces.total, now, moved=is_there)
            if is_there and device is not None and device.cover_first(part.pieces.local, part.pieces.nbytes):
                self._counts.add("rail_direct_bytes", path.name, part.pieces.total)
        elif status is not None:
            self.why_not = self._said(status, self._cards[path.number])
            self.paths.tried(path, now, self.why_not)

    def failed(self, part: Slice, status: CopyStatus) -> bool:
        """What a broken queue pair had under way is sent again, over another one."""
        if isinstance(part.write, _Probe):
            self._insist()
            return False
        if status is not CopyStatus.BROKEN:
            return False
        part.tries += 1
        return part.tries < MAX_TRIES

    def close(self) -> None:
        ends = [windows.drop for windows in self._windows]
        ends += [pair.close for pair in self._pairs]
        ends += [queue.close for queue in self._queues]
        for end in ends:
            try:
                end()
            except OSError as error:
                log_once("transfer.rdma.close", "rdma: a queue pair cannot be closed: %s", error, logger=logger)

    def _insist(self) -> None:
        if self.paths.is_hopeless:
            raise OSError(f"no rail works any more: {self.why_not}")

    def _path_of(self, part: Slice) -> Path:
        found: Any = self.paths.all[part.place & ((1 << _EPOCH_SHIFT) - 1)]
        assert isinstance(found, Path)
        return found

    @staticmethod
    def _said(status: CopyStatus, card: Card) -> str:
        if status is CopyStatus.OK:
            return ""
        if status is CopyStatus.FORBIDDEN:
            return f"the peer's card read another memory than that of {card.rail}"
        return f"the peer's card cannot read over {card.rail}: are both in one network, is UDP port 4791 open?"
