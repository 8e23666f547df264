"""The receiving side of a process whose memory is on a device, for transports whose fetches fill memory of the host.

What one of these does not fill on the device by itself is fetched a part at a time into stages of page-locked memory,
and the device scatters one of them while others are filled. Orders of a lane are fetched one after the other, beside
those of other lanes. An order holds its grant until its last part is where it belongs: so a revoked grant ends for
good. All of it is for the receiving thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mooncake_connector.log import get_logger, log_once
from transfer.transports.base import TransferError
from transfer.transports.cuda.driver import CudaError
from transfer.transports.cuda.landing import failed
from transfer.transports.cuda.stage import MORE_STAGES, NUM_STAGES, STAGE_NBYTES, Stage, Stages
from transfer.transports.pull import Fetch, Fetcher
from transfer.transports.vectors import Pieces
from transfer.transports.wire import MAX_ORDER_PIECES, CopyStatus

logger = get_logger(__name__)


class _Part(Fetch):
    """What of an order goes through one stage."""

    __slots__ = ("_arrived", "order", "stage", "target")

    def __init__(
        self, order: _Order, pieces: Pieces, stage: Stage, arrived: Callable[[_Part, CopyStatus], None]
    ) -> None:
        here, _, sizes = stage.packed(pieces)
        super().__init__(
            order.fetch.number,
            Pieces(pieces.local, here.tolist() if isinstance(pieces.local, list) else here, sizes, pieces.total),
            order.fetch.attachment, order.fetch.held, order.fetch.connection,
        )  # fmt: skip
        self.order, self.stage, self.target = order, stage, pieces
        self._arrived = arrived

    def done(self, status: CopyStatus) -> None:
        self.connection.post(lambda: self._arrived(self, status))


class _Order:
    """A fetch, and what of it is under way."""

    def __init__(self, fetch: Fetch, lane: int) -> None:
        self.fetch, self.lane = fetch, lane
        self.status = CopyStatus.OK
        self.filling: set[_Part] = set()
        self.num_emptying = 0
        self._left = fetch.pieces.total
        """That no stage has had yet."""
        self._parts = fetch.pieces.slices(STAGE_NBYTES, MAX_ORDER_PIECES)

    @property
    def is_begun(self) -> bool:
        """Whether no further part is fetched."""
        return not self._left or self.status is not CopyStatus.OK

    @property
    def is_over(self) -> bool:
        return self.is_begun and not self.filling and not self.num_emptying

    def next_part(self) -> Pieces:
        part = next(self._parts)
        self._left -= part.total
        return part

    def see(self, part: _Part) -> None:
        """It lies in its stage. An order of several, which come in any sequence, is not marked by senders of ours: it
        is noted as one that is wrong."""
        if self.fetch.passing is not None and part.target.total == self.fetch.pieces.total:
            self.fetch.passing.see(part.stage.view(part.target.total))

    def fail(self, status: CopyStatus) -> None:
        """The first one is the reason."""
        if self.status is CopyStatus.OK:
            self.status = status


class LandingFetcher(Fetcher):
    """See the module.

    Args:
        inner: fetches into the stages; closed with this one.
        stages: of which the transport was told.
    """

    def __init__(self, inner: Fetcher, stages: Stages) -> None:
        self._inner, self._stages = inner, stages
        self._num_stages = NUM_STAGES + MORE_STAGES * (inner.num_lanes - 1)
        self.max_under_way, self.poll_s, self.greets = inner.max_under_way, inner.poll_s, inner.greets
        self._taken: list[Stage] = []
        self._idle: list[Stage] = []
        """Of those."""
        self._orders: dict[Fetch, _Order] = {}
        self._waiting: list[deque[_Order]] = [deque() for _ in range(inner.num_lanes)]
        """Those with parts that no stage has had, by lane."""
        self._num_filling = [0] * inner.num_lanes
        self._emptying: deque[_Part] = deque()
        """Scattered by the device, oldest first."""

    def greeting(self) -> bytes:
        return self._inner.greeting()

    def probe(self, fetch: Fetch, number: int) -> CopyStatus | None:
        return self._inner.probe(fetch, number)

    def start(self, fetch: Fetch) -> CopyStatus | None:
        if fetch.passing is None and self._inner.fills(fetch):  # bytes that somebody is to see come by a stage
            return self._inner.start(fetch)
        if not self._taken:
            try:
                self._take()
            except (TransferError, OSError) as error:
                log_once("transfer.landing", "no page-locked memory to fetch into: %s", error, logger=logger)
                return CopyStatus.UNWRITABLE
        order = self._orders[fetch] = _Order(fetch, self._inner.lane(fetch))
        self._waiting[order.lane].append(order)
        self._go_on()
        return None

    def go_on(self, fetch: Fetch) -> CopyStatus | None:
        order = self._orders.get(fetch)
        if order is None:
            return self._inner.go_on(fetch)
        for part in tuple(order.filling):
            if (status := self._inner.go_on(part)) is not None:
                self._filled(part, status)
        while self._emptying:  # what else is filled may take long, and these are there
            self._settle_oldest()
        self._go_on()
        return None

    def cancel(self, fetch: Fetch) -> None:
        order = self._orders.get(fetch)
        if order is None:
            self._inner.cancel(fetch)
            return
        order.fail(CopyStatus.NO_GRANT)
        for part in tuple(order.filling):
            self._inner.cancel(part)
        while order.num_emptying:
            self._settle_oldest()
        self._conclude(order)

    def close(self) -> None:
        self._inner.close()
        for order in self._orders.values():
            order.filling.clear()
        self._num_filling = [0] * len(self._num_filling)
        for waiting in self._waiting:
            waiting.clear()
        while self._emptying:
            self._wait_for(self._emptying.popleft())
        self._orders.clear()
        self._give_back()

    def _go_on(self) -> None:
        """Fill what stages there are; tell what is over."""
        while (order := self._next()) is not None and self._find_stage():
            if order.is_begun:  # the device has just failed at what it had of it
                continue
            part = _Part(order, order.next_part(), self._idle.pop(), self._arrived)
            order.filling.add(part)
            self._num_filling[order.lane] += 1
            if (status := self._inner.start(part)) is not None:
                self._filled(part, status)
        while self._emptying and (len(self._emptying) > 1 or not self._is_filling()):
            self._settle_oldest()

    def _next(self) -> _Order | None:
        """Of which a part is fetched next: of the lane over which least comes."""
        for lane in sorted(range(len(self._waiting)), key=self._num_filling.__getitem__):
            waiting = self._waiting[lane]
            while waiting and waiting[0].is_begun:
                waiting.popleft()
            if waiting and self._num_filling[lane] < NUM_STAGES:
                return waiting[0]
        return None

    def _is_filling(self) -> bool:
        return any(self._num_filling)

    def _find_stage(self) -> bool:
        """Whether one is idle: where others are filled, one that the device empties is waited for if that is not the
        last one that it got."""
        if not self._idle and len(self._taken) < self._num_stages:
            try:
                self._take()
            except (TransferError, OSError) as error:
                log_once("transfer.landing.few", "little page-locked memory to fetch into: %s", error, logger=logger)
        if not self._idle and (len(self._emptying) > 1 or (self._emptying and not self._is_filling())):
            self._settle_oldest()
        return bool(self._idle)

    def _take(self) -> None:
        self._taken.append(self._stages.take())
        self._idle.append(self._taken[-1])

    def _arrived(self, part: _Part, status: CopyStatus) -> None:
        self._filled(part, status)
        self._go_on()

    def _filled(self, part: _Part, status: CopyStatus) -> None:
        """Have the device bring it to its place, if its grant has not ended."""
        order = part.order
        if part not in order.filling:  # it was given up, or says so twice
            return
        order.filling.remove(part)
        self._num_filling[order.lane] -= 1
        if status is not CopyStatus.OK:
            order.fail(status)
        elif order.fetch.held is None or order.fetch.held.revoked:
            order.fail(CopyStatus.NO_GRANT)
        if order.status is CopyStatus.OK:
            try:
                part.stage.begin_scatter(part.target)
                order.num_emptying += 1
                self._emptying.append(part)
                order.see(part)
                return
            except CudaError as error:
                order.fail(failed(error))
        self._idle.append(part.stage)
        self._conclude(order)

    def _settle_oldest(self) -> None:
        part = self._emptying.popleft()
        self._wait_for(part)
        self._idle.append(part.stage)
        part.order.num_emptying -= 1
        self._conclude(part.order)

    def _wait_for(self, part: _Part) -> None:
        try:
            part.stage.wait()
        except CudaError as error:
            part.order.fail(failed(error))

    def _conclude(self, order: _Order) -> None:
        if not order.is_over or self._orders.pop(order.fetch, None) is None:
            return
        if not self._orders:
            self._give_back()
        if order.fetch.passing is not None and order.status is CopyStatus.OK:
            order.fetch.passing.note()
        order.fetch.done(order.status)

    def _give_back(self) -> None:
        while self._taken:
            self._stages.give_back(self._taken.pop())
        self._idle.clear()
