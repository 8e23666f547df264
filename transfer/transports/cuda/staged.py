"""The sending side of a process whose memory is on a device, for transports that move memory of the host.

A part of a write is gathered into a stage of page-locked memory, and sent from there as a write of its own; while one
is sent the next is gathered. What the transport can send from where it is goes past all this. The receiver sees nothing
of either: its memory may be on a device or not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from mooncake_connector.log import get_logger, log_once
from transfer.transports.base import Cause, Completion, Grant, Int64, Numbers, Outcome, Peer, TransferError
from transfer.transports.cuda.driver import CudaError
from transfer.transports.cuda.stage import MORE_STAGES, NUM_STAGES, STAGE_NBYTES, Stage, Stages
from transfer.transports.memory import Memory
from transfer.transports.passing import marker
from transfer.transports.sender import SendingPeer, begun
from transfer.transports.vectors import Pieces
from transfer.transports.wire import MAX_ORDER_PIECES

logger = get_logger(__name__)

Seen: TypeAlias = Callable[[memoryview], None]
_LOST = Outcome(Cause.PEER_LOST, "the connection was closed on this side")


class StagedWrite:
    """One call of `Peer.write`. `lock` is held while its source is read."""

    def __init__(
        self,
        pieces: Pieces,
        grant: Grant,
        completion: Completion,
        seen: Seen | None = None,
        batch: int | None = None,
    ) -> None:
        self.grant, self.completion, self.batch, self._seen = grant, completion, batch, seen
        self.total = self.to_gather = pieces.total
        """Bytes, and those that no stage has had yet."""
        self._parts = pieces.slices(STAGE_NBYTES, MAX_ORDER_PIECES)
        self._lock = threading.Lock()
        """Guards what follows."""
        self._open_nbytes = pieces.total
        self._under_way: set[Completion] = set()
        self._reading = threading.Lock()
        self._is_abandoned = False
        completion.stop_with(self._stop)
        completion.add_done_callback(self._cancel_rest)

    def gather(self, stage: Stage) -> Pieces | None:
        """The next part, once it is in the stage; None where nobody wants it. Raises CudaError."""
        part = next(self._parts)
        self.to_gather -= part.total
        with self._reading:
            if self._is_abandoned:
                return None
            stage.gather(part)
            if self._seen is not None:
                self._seen(stage.view(part.total))
        return part

    def passed(self, part: Completion, nbytes: int, outcome: Outcome) -> None:
        """What became of a part."""
        with self._lock:
            self._under_way.discard(part)
            self._open_nbytes -= nbytes
            is_over = not self._open_nbytes
        if is_over or not outcome.ok:
            self.completion.settle(outcome)

    def follow(self, part: Completion) -> None:
        """It is sent, and cancelled where this write is."""
        with self._lock:
            self._under_way.add(part)
        if self.completion.outcome is not None:
            part.cancel()

    def _stop(self) -> None:
        with self._reading:
            self._is_abandoned = True

    def _cancel_rest(self, outcome: Outcome) -> None:
        with self._lock:
            parts = tuple(self._under_way)
        for part in parts:
            part.cancel()


class StagedPeer(Peer):
    """See the module, and `base.Peer`."""

    def __init__(
        self, inner: SendingPeer, memory: Memory, stages: Stages, is_direct: Callable[[Numbers, Numbers], bool]
    ) -> None:
        """Takes the peer over, unless it raises CudaError or RuntimeError: no page-locked memory or thread is left.

        Args:
            stages: registered in `memory`, as what is sent is.
            is_direct: of addresses and sizes: whether `inner` sends these pieces from where they are.
        """
        self.is_direct = is_direct
        self.transport = inner.transport
        self._inner, self._memory = inner, memory
        self._stages, self._own = stages, list[Stage]()
        self._changed = threading.Condition()
        """Guards what follows."""
        self._queue: deque[StagedWrite] = deque()
        self._open: set[StagedWrite] = set()
        self._is_closed = False
        try:
            self._take(MORE_STAGES * (inner.num_paths - 1))
            self._free = list(self._own)
            name = f"mooncake-{self.transport}-gather"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        except BaseException:
            self._release()
            raise

    @property
    def alive(self) -> bool:
        return self._inner.alive and not self._is_closed

    def write(
        self,
        grant: Grant,
        local: Int64,
        remote: Int64,
        nbytes: Int64,
        *,
        deadline_s: float,
        seen: Seen | None = None,
        batch: int | None = None,
    ) -> Completion:
        """As `base.Peer`; `seen` is told of all bytes once, part by part, in the order of the pieces, before the
        outcome is ok: whoever takes checksums need not read them from the device again. With `batch`, by which number
        the receiver will ask for them, checksums travel with the bytes: it must know of marks (`passing`). Either goes
        through stages in any case."""
        pieces = Pieces.of(local, remote, nbytes)
        if seen is None and batch is None and self.is_direct(pieces.local, pieces.nbytes):
            return self._inner.write(grant, local, remote, nbytes, deadline_s=deadline_s)
        completion = begun(pieces, grant, deadline_s)
        if not pieces.total:
            return completion
        self._memory.begin_sending(completion, pieces.local, pieces.nbytes)
        write = StagedWrite(pieces, grant, completion, seen, batch)
        with self._changed:
            is_alive = self.alive
            if is_alive:
                self._queue.append(write)
                self._open.add(write)
                self._changed.notify()
        completion.add_done_callback(lambda _: self._over(write))
        if not is_alive:
            completion.settle(_LOST)
        return completion

    def close(self) -> None:
        self._inner.close()
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _take(self, num_more: int) -> None:
        """Raises CudaError."""
        for _ in range(NUM_STAGES):
            self._own.append(self._stages.take())
        try:
            for _ in range(num_more):
                self._own.append(self._stages.take())
        except CudaError as error:
            said = "%s: little page-locked memory to send from: %s"
            log_once("transfer.staged.few", said, self.transport, error, logger=logger)

    def _over(self, write: StagedWrite) -> None:
        self._memory.end_sending(write.completion)
        with self._changed:
            self._open.discard(write)
            self._changed.notify()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._turn()
        except Exception as error:  # a defect of ours must not leave writes without an outcome
            log_once(f"transfer.staged:{type(error).__name__}", "gathering failed", logger=logger, exc_info=True)
        self._inner.close()
        with self._changed:
            self._is_closed = True
            left = tuple(self._open)
            self._queue.clear()
        for write in left:
            write.completion.settle(_LOST)
        self._release()

    def _turn(self) -> None:
        """Gather one part and send it, or wait until there is one, and a stage; tell who is late."""
        with self._changed:
            write = self._first()
            stage = self._free.pop() if write is not None and self._free else None
            if stage is None:
                self._changed.wait(self._patience_s())
            late = [one for one in self._open if one.completion.deadline_at <= time.monotonic()]
        for one in late:
            one.completion.settle(Outcome(Cause.DEADLINE, "the peer did not take it in time"))
        if write is not None and stage is not None:
            self._move(write, stage)

    def _first(self) -> StagedWrite | None:
        while self._queue and (self._queue[0].completion.outcome is not None or not self._queue[0].to_gather):
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def _patience_s(self) -> float:
        first = min((write.completion.deadline_at for write in self._open), default=float("inf"))
        return min(max(0.0, first - time.monotonic()), 3600.0)

    def _move(self, write: StagedWrite, stage: Stage) -> None:
        try:
            part = write.gather(stage)
            sent = None if part is None else self._send(write, stage, part)
        except (TransferError, ValueError) as error:  # the device failed, or memory was unregistered meanwhile
            what = "the device's memory could not be sent"
            if isinstance(error, CudaError):
                log_once("transfer.staged.gather", "%s: %s: %s", self.transport, what, error, logger=logger)
            write.completion.settle(Outcome(Cause.SOURCE, f"{what}: {error}"))
            part = sent = None
        if part is None or sent is None:
            self._give_back(stage)
            return
        write.follow(sent)
        sent.add_done_callback(lambda outcome: self._passed(write, stage, sent, part.total, outcome))

    def _send(self, write: StagedWrite, stage: Stage, part: Pieces) -> Completion:
        """Raises ValueError."""
        left_s = max(0.0, write.completion.deadline_at - time.monotonic())
        local, remote, nbytes = stage.packed(part)
        offset = write.total - write.to_gather - part.total
        mark = None if write.batch is None else marker(write.batch, stage.address, offset)
        whole_nbytes = write.total if self._inner.num_paths > 1 else 0  # several streams share each of few stages
        return self._inner.write(
            write.grant, local, remote, nbytes, deadline_s=left_s, whole_nbytes=whole_nbytes, mark=mark
        )

    def _passed(self, write: StagedWrite, stage: Stage, sent: Completion, nbytes: int, outcome: Outcome) -> None:
        self._give_back(stage)
        write.passed(sent, nbytes, outcome)

    def _give_back(self, stage: Stage) -> None:
        with self._changed:
            self._free.append(stage)
            self._changed.notify()

    def _release(self) -> None:
        """Nothing is gathered or sent any more."""
        while self._own:
            self._stages.give_back(self._own.pop())
