"""The sending side: slices of batches put on streams, answers turned into outcomes. One thread a peer.

What differs between transports is a `Carriage`: how the bytes of a slice reach the receiver. A slice that was on a
stream when it broke goes out again on another; writing the same bytes twice to the same place does no harm.

A small batch costs no change of thread: the one that asks sends it, and where it waits it takes the answer as well.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from mooncake_connector.log import get_logger, log_once
from transfer.control.handshake import Terms
from transfer.transports.base import OK, Cause, Completion, Grant, Int64, Outcome, Peer
from transfer.transports.memory import Memory
from transfer.transports.stream import Batch, Carriage, Slice, Stream
from transfer.transports.vectors import SMALL_NBYTES, Pieces, Vector
from transfer.transports.wire import Status, WireError

logger = get_logger(__name__)

HELP_S = 0.002
"""How long a thread that waits for a small batch takes the answers by itself, at most."""
TURN_NBYTES = 8 << 20
"""Sent on one stream before answers get their turn; beside other streams it is what one call takes, in turn."""
SHARES = 4
"""Slices of a batch for each stream, at least, of several or of a relay: the last ones even out their speeds..."""
MIN_SHARE_NBYTES = 256 << 10
"""...but none smaller than this for its sake."""

_FAILURES = {
    Status.NO_GRANT: Outcome(Cause.REFUSED, "the peer does not know the grant, or revoked it"),
    Status.OUTSIDE: Outcome(Cause.REFUSED, "the peer found a piece outside of its grant"),
    Status.UNREADABLE: Outcome(Cause.SOURCE, "the peer could not read the memory to send"),
    Status.FORBIDDEN: Outcome(Cause.SOURCE, "the peer may not read this process's memory"),
}


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
        """Guards the streams; taken by this peer's thread, and by threads that send or help."""
        self._queue_lock = threading.Lock()
        """Guards what follows."""
        self._queue: deque[Batch] = deque()
        self._batches: set[Batch] = set()
        self._dead: Outcome | None = None
        self._awake_at = float("inf")
        """When this peer's thread looks at deadlines by itself."""
        self._settled: list[tuple[Batch, Outcome]] = []
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        for descriptor in self._streams:
            self._epoll.register(descriptor, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=f"mooncake-{transport}-send", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._wakeup)
            self._epoll.close()
            raise

    @property
    def alive(self) -> bool:
        return self._dead is None

    @property
    def paths(self) -> list[str]:
        """The streams in use."""
        return [stream.label for stream in list(self._streams.values())]

    def write(self, grant: Grant, local: Int64, remote: Int64, nbytes: Int64, *, deadline_s: float) -> Completion:
        pieces = Pieces.of(local, remote, nbytes)
        if not grant.covers(pieces.remote, pieces.nbytes):
            raise ValueError("a destination piece is outside of the grant")
        completion = Completion(time.monotonic() + deadline_s)
        if not pieces.total:
            completion.settle(OK)
            return completion
        batch = Batch(pieces, grant, completion, self._slice_nbytes(pieces.total))
        self._memory.begin_sending(batch, pieces.local, pieces.nbytes)
        with self._queue_lock:
            dead = self._dead
            is_alone = not self._queue
            if dead is None:
                self._queue.append(batch)
                self._batches.add(batch)
            oversleeps = completion.deadline_at < self._awake_at
        is_small = pieces.total <= SMALL_NBYTES
        if dead is not None:
            completion.settle(dead)
        elif not (is_small and is_alone and self._send_here()) or oversleeps:
            self._wake()
        if is_small:
            completion.help_with(lambda wait_s: self._help(batch, wait_s))
        completion.add_done_callback(lambda _: self._over(batch))
        return completion

    def close(self) -> None:
        self._die(Outcome(Cause.PEER_LOST, "the connection was closed on this side"))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _slice_nbytes(self, total: int) -> int:
        num_streams = max(1, len(self._streams))  # 0 where the last one has just broken
        is_shared = num_streams > 1 or self._carriage.is_relay
        share = max(total // (SHARES * num_streams), MIN_SHARE_NBYTES) if is_shared else total
        return min(share, self._carriage.max_nbytes)

    def _send_here(self) -> bool:
        """Send in this thread; return whether nothing is left to this peer's own."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._pump()
        finally:
            self._lock.release()
        return not self._queue

    def _help(self, batch: Batch, wait_s: float) -> None:
        """Take the answers, in the thread that waits for `batch`, while this peer's own thread looks away."""
        until = time.monotonic() + min(wait_s, HELP_S)
        with self._lock:
            stream = self._stream_of(batch)
            if stream is None:
                return
            stream.helped = True
            self._watch(stream)
        while batch.completion.outcome is None and (left := until - time.monotonic()) > 0:
            stream.wait(left)
            with self._lock:
                self._take_answers(stream)
                if self._queue:
                    self._pump()
            self._settle()
        with self._lock:
            stream.helped = False
            self._watch(stream)

    def _stream_of(self, batch: Batch) -> Stream | None:
        """The stream on which an answer will come, unless somebody else takes the answers there."""
        for stream in self._streams.values():
            if not stream.helped and any(part.batch is batch for part in stream.unanswered.values()):
                return stream
        return None

    def _over(self, batch: Batch) -> None:
        self._memory.end_sending(batch)
        with self._queue_lock:
            self._batches.discard(batch)

    def _wake(self) -> None:
        with self._queue_lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _run(self) -> None:
        try:
            while self._dead is None:
                self._turn(self._sleep_s())
                self._expire()
                self._settle()
        except Exception as error:  # a defect of ours must not leave batches without an outcome
            log_once(f"transfer.sender:{type(error).__name__}", "transfer thread failed", logger=logger, exc_info=True)
            self._die(Outcome(Cause.PEER_LOST, f"{type(error).__name__}: {error}"))
        self._finish()

    def _sleep_s(self) -> float:
        now = time.monotonic()
        with self._queue_lock:
            first = min((batch.completion.deadline_at for batch in self._batches), default=float("inf"))
            if now < self._awake_at < first:  # the next batch's deadline is probably later: it need not wake us
                first = self._awake_at
            self._awake_at = first
        return min(max(0.0, first - now), 3600.0)

    def _turn(self, wait_s: float) -> None:
        """Wait for something to do, and do it."""
        for descriptor, event in self._epoll.poll(wait_s):
            if descriptor == self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
            elif event & ~select.EPOLLOUT:
                with self._lock:
                    stream = self._streams.get(descriptor)
                    if stream is not None and not stream.helped:
                        self._take_answers(stream)
        with self._lock:
            self._pump()

    def _expire(self) -> None:
        now = time.monotonic()
        with self._queue_lock:
            late = [batch for batch in self._batches if batch.completion.deadline_at <= now]
        self._settled += [(batch, Outcome(Cause.DEADLINE, "the peer did not take it in time")) for batch in late]

    def _settle(self) -> None:
        """Tell outcomes, holding no lock: callbacks may call us."""
        while self._settled:
            try:
                batch, outcome = self._settled.pop()
            except IndexError:  # another thread took it
                return
            batch.completion.settle(outcome)

    def _next_slice(self) -> Slice | None:
        with self._queue_lock:
            while self._queue:
                batch = self._queue[0]
                part = None if batch.completion.outcome else batch.next_slice()
                if part is not None:
                    return part
                self._queue.popleft()
        return None

    def _pump(self) -> None:
        for stream in list(self._streams.values()):
            try:
                wants_out = self._push(stream)
            except OSError as error:
                self._drop(stream, error)
                continue
            if wants_out != stream.wants_out:
                stream.wants_out = wants_out
                self._watch(stream)

    def _watch(self, stream: Stream) -> None:
        """Tell the kernel what to wake this peer's thread for."""
        if self._streams.get(stream.descriptor) is stream:
            wanted = (0 if stream.helped else select.EPOLLIN) | (select.EPOLLOUT if stream.wants_out else 0)
            self._epoll.modify(stream.descriptor, wanted)

    def _push(self, stream: Stream) -> bool:
        """Send on one stream what it takes; return whether more is to be sent once it takes more."""
        turn, enough = 0, TURN_NBYTES if len(self._streams) == 1 else 1
        while turn < enough:
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

    def _take_answers(self, stream: Stream) -> None:
        if self._streams.get(stream.descriptor) is not stream:
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
        if status is not Status.OK:
            self._settled.append((batch, _FAILURES[status]))
            return
        batch.left -= part.pieces.total
        if not batch.left:
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
            f"transfer.transports.stream:{stream.label}",
            "path %s to a peer broke (%s); going on over %d others",
            stream.label, error, len(self._streams), logger=logger,
        )  # fmt: skip
        with self._queue_lock:
            for part in stream.unanswered.values():
                part.batch.again.append(part)
                if part.batch not in self._queue:
                    self._queue.appendleft(part.batch)
        self._wake()  # the others may have had their turn, and nothing to do then

    def _die(self, outcome: Outcome) -> None:
        with self._queue_lock:
            self._dead = self._dead or outcome
        self._wake()

    def _finish(self) -> None:
        assert self._dead is not None
        self._on_close(self)
        with self._lock:
            for stream in self._streams.values():
                stream.connection.close()
            self._streams.clear()  # their numbers may belong to other files next
            self._carriage.close()
            self._epoll.close()
        with self._queue_lock:  # its number may belong to another file next
            os.close(self._wakeup)
            self._wakeup = -1
            self._queue.clear()
            self._settled += [(batch, self._dead) for batch in self._batches]
        self._settle()
