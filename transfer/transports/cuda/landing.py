"""The receiving side of a process whose memory is on a device, for transports whose bytes come to the host first.

What an order brings is received into stages of page-locked memory and scattered from there by the device, while the
next part is received. An order holds its grant until its last part is where it belongs: so a revoked grant ends for
good. All of it is for the receiving thread.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable

import numpy as np

from mooncake_connector.log import get_logger, log_once
from transfer.control.handshake import Server
from transfer.transports.base import Numbers
from transfer.transports.channel import Channel
from transfer.transports.cuda.driver import CudaError
from transfer.transports.cuda.stage import STAGE_NBYTES, Stage, Stages
from transfer.transports.inline import InlineConnection
from transfer.transports.memory import Memory, Revocable
from transfer.transports.passing import Passing
from transfer.transports.vectors import Pieces, Vector
from transfer.transports.wire import MAX_ORDER_PIECES, CopyOrder, CopyStatus

logger = get_logger(__name__)

NUM_STAGES = 2
"""Of a connection: one is filled while the device empties the other."""


class Landing:
    """An order on its way to the device; holds its grant."""

    def __init__(
        self,
        order: CopyOrder,
        columns: list[Numbers],
        held: Revocable,
        post: Callable[[Callable[[], None]], None],
        passing: Passing | None,
    ) -> None:
        self.number = order.number
        self.left = order.nbytes
        """To receive."""
        self.parts = Pieces(columns[0], columns[0], columns[1], self.left).slices(STAGE_NBYTES, MAX_ORDER_PIECES)
        self.status = CopyStatus.OK
        self.under_way: deque[Stage] = deque()
        """Emptied by the device, oldest first."""
        self.is_received = self.was_looked_at = False
        self._held, self._post, self._passing = held, post, passing

    def hold(self) -> bool:
        """Whether the grant is there, and kept until `settle`."""
        return self._held.hold(self)

    def scatter(self, stage: Stage, part: Pieces) -> None:
        """Have the device bring a part to its place, if its grant has not ended; the stage is under way from now on."""
        self.under_way.append(stage)
        self.left -= part.total
        if self._held.revoked:
            self.status = CopyStatus.NO_GRANT
        if self.status is CopyStatus.OK:
            self._attempt(lambda: stage.begin_scatter(part))
            if self._passing is not None:  # while the device copies it
                self._passing.see(stage.view(part.total))

    def wait_for_oldest(self) -> Stage:
        """The stage that was given first, once the device has emptied it."""
        stage = self.under_way.popleft()
        self._attempt(stage.wait)
        return stage

    def cancel(self) -> None:
        """See `memory.Holder`."""
        self._post(self.end)

    cut_off = cancel

    def note(self) -> None:
        """All of it was received and is where it belongs, unless its status says otherwise."""
        if self._passing is not None and self.status is CopyStatus.OK:
            self._passing.note()

    def let_go(self) -> None:
        """Nothing of it is under way any more."""
        self._held.let_go(self)

    def end(self) -> None:
        """Nothing more of it is written once this returned."""
        if self.status is CopyStatus.OK:
            self.status = CopyStatus.NO_GRANT
        for stage in self.under_way:
            self._attempt(stage.wait)
        self.let_go()

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except CudaError as error:
            self.status = failed(error)


class LandingConnection(InlineConnection):
    """In place of `InlineConnection`: the granted memory is on a device."""

    def __init__(self, channel: Channel, server: Server, memory: Memory, stages: Stages) -> None:
        super().__init__(channel, server, memory)
        self._stages = stages
        self._taken: list[Stage] = []
        self._idle: list[Stage] = []
        """Of those."""
        self._landings: deque[Landing] = deque()
        """In the order in which they came; all but the last are received."""

    def execute(self, order: CopyOrder, columns: list[Numbers], held: Revocable) -> bool:
        landing = Landing(order, columns, held, self.post, self.passing)
        if not landing.hold():
            return self.decline(order, columns, CopyStatus.NO_GRANT)
        try:
            stage = self._stage()
        except CudaError as error:
            log_once("transfer.landing", "no page-locked memory for what a peer sends: %s", error, logger=logger)
            landing.let_go()
            return self.decline(order, columns, CopyStatus.UNWRITABLE)
        self._landings.append(landing)
        return self._receive(landing, stage)

    def poll(self) -> None:
        """Answer what the device has had a turn for: what arrived meanwhile is received by now."""
        while self._landings and self._landings[0].was_looked_at:
            self._conclude()
        for landing in self._landings:
            landing.was_looked_at = landing.is_received
        if not self._landings or not self._landings[0].is_received:
            self.poll_s = None

    def close(self) -> None:
        super().close()
        while self._landings:
            self._landings.popleft().end()
        self._give_back()

    def _receive(self, landing: Landing, stage: Stage) -> bool:
        part = next(landing.parts)

        def received() -> bool:
            landing.scatter(stage, part)
            if landing.left:
                return self._receive(landing, self._stage())
            landing.is_received, self.poll_s = True, 0.0
            self._next = self._take_block
            return False

        return self._expect(Vector.of([stage.address], [part.total]), received)

    def _stage(self) -> Stage:
        """One to fill: where enough are under way, the oldest of these once it is empty. Raises CudaError for none."""
        if self._idle:
            return self._idle.pop()
        if len(self._taken) < NUM_STAGES:
            try:
                self._taken.append(self._stages.take())
                return self._taken[-1]
            except CudaError:
                if not self._taken:
                    raise
        return next(landing for landing in self._landings if landing.under_way).wait_for_oldest()

    def _conclude(self) -> None:
        landing = self._landings.popleft()
        while landing.under_way:
            self._idle.append(landing.wait_for_oldest())
        landing.note()
        landing.let_go()
        if not self._landings:
            self._give_back()
        self.say_status(landing.number, landing.status)

    def _give_back(self) -> None:
        while self._taken:
            self._stages.give_back(self._taken.pop())
        self._idle.clear()


def land(stages: Stages, address: int, columns: list[Numbers], held: Revocable, passing: Passing | None) -> CopyStatus:
    """Have the device scatter what lies at `address` to granted pieces, and wait for it."""
    addresses, nbytes = columns
    pieces = Pieces(addresses, addresses, nbytes, int(np.sum(nbytes)))
    try:
        stage = stages.take()
    except CudaError as error:
        return failed(error)
    try:
        for part in pieces.slices(STAGE_NBYTES, MAX_ORDER_PIECES):
            ctypes.memmove(stage.address, address, part.total)
            address += part.total
            with held.lock:
                if held.revoked:
                    return CopyStatus.NO_GRANT
                stage.begin_scatter(part)
                if passing is not None:
                    passing.see(stage.view(part.total))
                stage.wait()
    except CudaError as error:
        return failed(error)
    finally:
        stages.give_back(stage)
    if passing is not None:
        passing.note()
    return CopyStatus.OK


def failed(error: CudaError) -> CopyStatus:
    """What to answer; it is logged."""
    log_once("transfer.landing", "a device does not take what a peer sends: %s", error, logger=logger)
    return CopyStatus.UNWRITABLE
