"""The sending side: batches cut into slices, slices put on streams, answers turned into outcomes. One thread a peer.

What differs between transports is a `Carriage`: how the bytes of a slice reach the receiver. A slice that was on a
stream when it broke goes out again on another; writing the same bytes twice to the same place does no harm.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from mooncake_connector.log import get_logger, log_once
from transfer.base import OK, Cause, Completion, Grant, Int64, Outcome, Peer
from transfer.handshake import Terms
from transfer.memory import Memory
from transfer.tls import TlsSocket
from transfer.vectors import Pieces, Vector
from transfer.wire import ANSWER_NBYTES, MAX_ORDER_PIECES, Status, WireError, decode_answer

logger = get_logger(__name__)

INLINE_NBYTES = 64 << 10
"""Batches up to this size are sent from the thread that asks, which saves a change of thread."""
HELP_S = 0.002
"""How long a thread that waits for such a batch looks for the answer by itself, at most."""
TURN_NBYTES = 8 << 20
"""Sent on one stream before answers and other streams get their turn."""

_FAILURES = {
    Status.NO_GRANT: Outcome(Cause.REFUSED, "the peer does not know the grant, or revoked it"),
    Status.OUTSIDE: Outcome(Cause.REFUSED, "the peer found a piece outside of its grant"),
    Status.UNREADABLE: Outcome(Cause.SOURCE, "the peer could not read the memory to send"),
    Status.FORBIDDEN: Outcome(Cause.SOURCE, "the peer may not read this process's memory"),
}


class Batch:
    """One call of `Peer.write`. `lock` is held while its source is read."""

    def __init__(self, pieces: Pieces, grant: Grant, completion: Completion, slices: Iterator[Pieces]) -> None:
        self.grant = grant
        self.completion = completion
        self.left = pieces.total
        self.lock = threading.Lock()
        self.abandoned = False
        self.again: list[Slice] = []
        self._slices = slices
        completion.stop_with(self._stop)

    def next_slice(self) -> Slice | None:
        """Slices of a broken stream first."""
        if self.again:
            return self.again.pop()
        pieces = next(self._slices, None)
        return None if pieces is None else Slice(self, pieces)

    def abandon(self, outcome: Outcome) -> None:
        """See `memory.Sending`."""
        self.completion.settle(outcome)

    def _stop(self) -> None:
        with self.lock:
            self.abandoned = True


class Slice:
    """Part of a batch that goes over one stream as one order."""

    __slots__ = ("batch", "number", "pieces", "place")

    def __init__(self, batch: Batch, pieces: Pieces) -> None:
        self.batch = batch
        self.pieces = pieces
        self.number = self.place = 0


class Carriage(ABC):
    """How the bytes of slices reach the receiver."""

    max_nbytes: int
    """Of one slice."""

    def has_room(self) -> bool:
        """Whether another slice can be loaded now; it is asked again after each answer."""
        return True

    @abstractmethod
    def load(self, part: Slice) -> Vector:
        """What to send for `part`: the order in one piece, then, where they go over the stream, its bytes.

        Called with the batch's lock held; where the batch was abandoned the source must not be read.
        """

    def unload(self, part: Slice) -> None:  # noqa: B027
        """`part` was answered, or its stream broke."""

    def close(self) -> None:  # noqa: B027
        """No slice is loaded any more."""


class Stream:
    """One connection to the receiver."""

    def __init__(self, connection: socket.socket | TlsSocket, label: str) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.descriptor = connection.fileno()
        self.label = label
        self.vector: Vector | None = None
        self.part: Slice | None = None
        self.diverted = False
        self.wants_out = False
        self.unanswered: dict[int, Slice] = {}
        self._answers = bytearray()

    def send(self) -> int:
        """Send what is next. Raises BlockingIOError or another OSError."""
        assert self.vector is not None
        if isinstance(self.connection, TlsSocket):
            return self.connection.send_vector(self.vector)
        return self.vector.send(self.descriptor)

    def answers(self) -> Iterator[tuple[int, Status]]:
        """What the receiver has said by now. Raises OSError at the end of the stream, WireError."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self.connection.recv(64 * ANSWER_NBYTES)
                if not data:
                    raise ConnectionResetError("the peer closed the connection")
                self._answers += data
                while len(self._answers) >= ANSWER_NBYTES:
                    answer = bytes(self._answers[:ANSWER_NBYTES])
                    del self._answers[:ANSWER_NBYTES]
                    yield decode_answer(answer)


class SendingPeer(Peer):
    """See `base.Peer`; the streams are connected and past their handshake."""

    def __init__(
        self,
        transport: str,
        terms: Terms,
        memory: Memory,
        streams: list[Stream],
        carriage: Carriage,
        on_close: Callable[[SendingPeer], None],
    ) -> None:
        self.transport = transport
        self.instance = terms.instance
        self._memory, self._carriage, self._on_close = memory, carriage, on_close
        self._numbers = itertools.count(1)
        self._streams = {stream.descriptor: stream for stream in streams}
        self._scratch = np.zeros(0, dtype=np.uint8)
        self._lock = threading.Lock()
        """Guards the streams; taken by this peer's thread, and by others only where it is free."""
        self._helping = threading.Lock()
        """Held by another thread while it does this peer's thread's work."""
        self._queue_lock = threading.Lock()
        self._queue: deque[Batch] = deque()
        self._batches: set[Batch] = set()
        self._dead: Outcome | None = None
        self._settled: list[tuple[Batch, Outcome]] = []
        self._awake_at = 0.0
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wakeup, select.EPOLLIN)
        for descriptor in self._streams:
            self._epoll.register(descriptor, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=f"mooncake-{transport}-send", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._dead is None

    @property
    def paths(self) -> list[str]:
        """The streams in use."""
        return [stream.label for stream in list(self._streams.values())]

    def write(self, grant: Grant, local: Int64, remote: Int64, nbytes: Int64, *, deadline_s: float) -> Completion:
        pieces = Pieces.of(local, remote, nbytes)
        completion = Completion(time.monotonic() + deadline_s)
        if not grant.covers(pieces.remote, pieces.nbytes):
            raise ValueError("a destination piece is outside of the grant")
        slices = pieces.slices(self._carriage.max_nbytes, MAX_ORDER_PIECES)
        batch = Batch(pieces, grant, completion, slices)
        self._memory.begin_sending(batch, pieces.local, pieces.nbytes)
        completion.add_done_callback(lambda _: self._memory.end_sending(batch))
        if not pieces.total:
            completion.settle(OK)
            return completion
        with self._queue_lock:
            dead = self._dead
            if dead is None:
                self._queue.append(batch)
                self._batches.add(batch)
        if dead is not None:
            completion.settle(dead)
        else:
            self._hurry(batch, pieces.total)
        return completion

    def close(self) -> None:
        self._die(Outcome(Cause.PEER_LOST, "the connection was closed on this side"))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _hurry(self, batch: Batch, nbytes: int) -> None:
        if nbytes <= INLINE_NBYTES and self._lock.acquire(blocking=False):
            try:
                self._pump()
            finally:
                self._lock.release()
            self._settle()
            batch.completion.help_with(functools.partial(self._look_for, batch.completion))
            if batch.completion.deadline_at >= self._awake_at and not self._queue:
                return
        self._wake()

    def _wake(self) -> None:
        with self._queue_lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _run(self) -> None:
        try:
            while self._dead is None:
                self._awake_at = float("inf")  # so that a batch that comes while we look wakes us
                self._awake_at = self._first_deadline()
                self._turn(min(max(0.0, self._awake_at - time.monotonic()), 3600.0))
                self._expire()
                self._settle()
        except Exception as error:  # a defect of ours must not leave batches without an outcome
            log_once(f"transfer.sender:{type(error).__name__}", "transfer thread failed", logger=logger, exc_info=True)
            self._die(Outcome(Cause.PEER_LOST, f"{type(error).__name__}: {error}"))
        self._finish()

    def _turn(self, wait_s: float) -> None:
        """Wait for something to do, and do it."""
        for descriptor, event in self._epoll.poll(wait_s):
            if descriptor == self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
            elif event & ~select.EPOLLOUT:
                with self._lock:
                    self._take_answers(descriptor)
        with self._lock:
            self._pump()

    def _look_for(self, completion: Completion, wait_s: float) -> None:
        """Do this peer's thread's work in the thread that waits for `completion`, which saves a change of thread.

        The kernel wakes the thread that came last. Where another one takes the answer, this one notices at the end.
        """
        until = time.monotonic() + min(wait_s, HELP_S)
        with self._helping:
            while completion.outcome is None and self._dead is None and (left := until - time.monotonic()) > 0:
                self._turn(left)
                self._settle()

    def _first_deadline(self) -> float:
        with self._queue_lock:
            return min((batch.completion.deadline_at for batch in self._batches), default=float("inf"))

    def _expire(self) -> None:
        now = time.monotonic()
        with self._queue_lock:
            settled = {batch for batch in self._batches if batch.completion.outcome is not None}
            self._batches -= settled
            late = [batch for batch in self._batches if batch.completion.deadline_at <= now]
            self._batches.difference_update(late)
        self._settled += [(batch, Outcome(Cause.DEADLINE, "the peer did not take it in time")) for batch in late]

    def _settle(self) -> None:
        """Tell outcomes, holding no lock: callbacks may call us."""
        while self._settled:
            with contextlib.suppress(IndexError):  # the other thread took it
                batch, outcome = self._settled.pop()
                batch.completion.settle(outcome)

    def _next_slice(self) -> Slice | None:
        while True:
            with self._queue_lock:
                batch = self._queue[0] if self._queue else None
            if batch is None:
                return None
            part = None if batch.completion.outcome else batch.next_slice()
            if part is not None:
                return part
            with self._queue_lock:
                self._queue.popleft()

    def _pump(self) -> None:
        for stream in list(self._streams.values()):
            try:
                wants_out = self._push(stream)
            except OSError as error:
                self._drop(stream, error)
                continue
            if wants_out != stream.wants_out:
                stream.wants_out = wants_out
                self._epoll.modify(stream.descriptor, select.EPOLLIN | (select.EPOLLOUT if wants_out else 0))

    def _push(self, stream: Stream) -> bool:
        """Send on one stream what it takes; return whether more is to be sent once it takes more."""
        turn = 0
        while turn < TURN_NBYTES:
            if stream.vector is None and not self._load(stream):
                return False
            assert stream.part is not None and stream.vector is not None
            batch = stream.part.batch
            with batch.lock:
                if batch.abandoned and not stream.diverted:
                    self._divert(stream, stream.vector)
                try:
                    turn += stream.send()
                except BlockingIOError:
                    return True
            if not stream.vector.left:
                stream.vector = stream.part = None
        return True

    def _divert(self, stream: Stream, vector: Vector) -> None:
        """The order is out, so bytes must follow; any will do, since the batch has failed."""
        if not len(self._scratch):
            self._scratch = np.zeros(self._carriage.max_nbytes, dtype=np.uint8)
        vector.divert(self._scratch.ctypes.data, first=1)
        stream.diverted = True

    def _load(self, stream: Stream) -> bool:
        if not self._carriage.has_room():
            return False
        part = self._next_slice()
        if part is None:
            return False
        part.number = next(self._numbers)
        with part.batch.lock:
            stream.vector = self._carriage.load(part)
            stream.diverted = False
        stream.part = part
        stream.unanswered[part.number] = part
        return True

    def _take_answers(self, descriptor: int) -> None:
        stream = self._streams.get(descriptor)
        if stream is None:
            return
        try:
            for number, status in stream.answers():
                part = stream.unanswered.pop(number, None)
                if part is None or part is stream.part:
                    raise WireError(f"answer to order {number}, which is not open")
                self._carriage.unload(part)
                self._answered(part, status)
        except (OSError, WireError) as error:
            self._drop(stream, error)

    def _answered(self, part: Slice, status: Status) -> None:
        batch = part.batch
        batch.left -= part.pieces.total
        if status is not Status.OK:
            self._settled.append((batch, _FAILURES[status]))
        elif not batch.left:
            self._settled.append((batch, OK))

    def _drop(self, stream: Stream, error: Exception) -> None:
        """A stream broke: what it had not delivered goes to the others, if there are any."""
        del self._streams[stream.descriptor]
        with contextlib.suppress(OSError):
            self._epoll.unregister(stream.descriptor)
        stream.connection.close()
        for part in stream.unanswered.values():
            self._carriage.unload(part)
        if not self._streams:
            self._die(Outcome(Cause.PEER_LOST, str(error) or type(error).__name__))
            return
        log_once(
            f"transfer.stream:{stream.label}",
            "path %s to a peer broke (%s); going on over %d others",
            stream.label, error, len(self._streams), logger=logger,
        )  # fmt: skip
        with self._queue_lock:
            for part in stream.unanswered.values():
                part.batch.again.append(part)
                if part.batch not in self._queue:
                    self._queue.appendleft(part.batch)

    def _die(self, outcome: Outcome) -> None:
        with self._queue_lock:
            self._dead = self._dead or outcome
        self._wake()

    def _finish(self) -> None:
        assert self._dead is not None
        with self._queue_lock:
            batches = [*self._batches]
            self._batches.clear()
            self._queue.clear()
        self._on_close(self)
        with self._helping, self._lock:
            for stream in self._streams.values():
                stream.connection.close()
            self._streams.clear()  # their numbers may belong to other files next
            self._carriage.close()
            self._epoll.close()
        with self._queue_lock:  # its number may belong to another file next
            os.close(self._wakeup)
            self._wakeup = -1
        self._settled += [(batch, self._dead) for batch in batches]
        self._settle()
