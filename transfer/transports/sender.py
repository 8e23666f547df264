"""The sending side: slices of writes put on streams, answers turned into outcomes. One thread a peer.

What differs between transports is a `PayloadEncoder`: how the bytes of a slice reach the receiver. A slice that was on
a stream when it broke goes out again on another; writing the same bytes twice to the same place does no harm.

A small write is sent by the thread that asks, without a change of thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from mooncake_connector.log import get_logger, log_once
from transfer.transports.base import OK, Cause, Completion, Grant, Int64, Outcome, Peer
from transfer.transports.memory import Memory
from transfer.transports.passing import Marker
from transfer.transports.stream import PayloadEncoder, Slice, Stream, WriteRequest
from transfer.transports.vectors import SMALL_NBYTES, Pieces, Vector
from transfer.transports.wire import CopyStatus, WireError

logger = get_logger(__name__)

TURN_NBYTES = 8 << 20
"""Sent on one stream before answers get their turn; beside other streams it is what one call takes, in turn."""
LONG_TURN_NBYTES = 64 << 20
"""The same beside a busy Python thread, where each turn costs 5 ms."""
SHARES = 4
"""Slices of a write for each stream, at least, of several or of a relay: the last ones even out their speeds..."""
MIN_SHARE_NBYTES = 256 << 10
"""...but none smaller than this for its sake."""

_FAILURES = {
    CopyStatus.NO_GRANT: Outcome(Cause.REFUSED, "the peer does not know the grant, or revoked it"),
    CopyStatus.OUTSIDE: Outcome(Cause.REFUSED, "the peer found a piece outside of its grant"),
    CopyStatus.UNREADABLE: Outcome(Cause.SOURCE, "the peer could not read the memory to send"),
    CopyStatus.FORBIDDEN: Outcome(Cause.SOURCE, "the peer may not read this process's memory"),
    CopyStatus.UNWRITABLE: Outcome(Cause.REFUSED, "the peer's device did not take it; the peer logged what failed"),
    CopyStatus.BROKEN: Outcome(Cause.SOURCE, "what the peer reads this process's memory through broke"),
}


def begun(pieces: Pieces, grant: Grant, deadline_s: float) -> Completion:
    """Of a write of these pieces, over at once where they hold nothing. Raises ValueError outside of the grant."""
    if not grant.covers(pieces.remote, pieces.nbytes):
        raise ValueError("a destination piece is outside of the grant")
    completion = Completion(time.monotonic() + deadline_s)
    if not pieces.total:
        completion.settle(OK)
    return completion


class SendingPeer(Peer):
    """See `base.Peer`; the streams are connected and past their handshake."""

    def __init__(
        self,
        transport: str,
        memory: Memory,
        streams: list[Stream],
        encoder: PayloadEncoder,
        on_close: Callable[[SendingPeer], None],
    ) -> None:
        self.transport = transport
        self._memory, self._encoder, self._on_close = memory, encoder, on_close
        streams[0].unanswered |= encoder.asked
        self._numbers = itertools.count(1 + max(encoder.asked, default=0))
        self._streams = {stream.descriptor: stream for stream in streams}
        self._scratch = np.zeros(0, dtype=np.uint8)
        self._lock = threading.Lock()
        """Guards the streams; taken by this peer's thread, and by threads that send."""
        self._queue_lock = threading.Lock()
        """Guards what follows."""
        self._queue: deque[WriteRequest] = deque()
        self._writes: set[WriteRequest] = set()
        self._dead: Outcome | None = None
        self._awake_at = float("inf")
        """When this peer's thread looks at deadlines by itself."""
        self._settled: list[tuple[WriteRequest, Outcome]] = []
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            for descriptor in (self._wakeup, *self._streams):
                self._epoll.register(descriptor, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name=f"mooncake-{transport}-send", daemon=True)
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

    @property
    def num_paths(self) -> int:
        """Of one stream; see `PayloadEncoder`."""
        return self._encoder.num_paths

    def write(
        self,
        grant: Grant,
        local: Int64,
        remote: Int64,
        nbytes: Int64,
        *,
        deadline_s: float,
        whole_nbytes: int = 0,
        mark: Marker | None = None,
    ) -> Completion:
        """As `base.Peer`; `whole_nbytes` is of what this is a part of, which is cut as that would be. With `mark` each
        order is marked."""
        pieces = Pieces.of(local, remote, nbytes)
        completion = begun(pieces, grant, deadline_s)
        if not pieces.total:
            return completion
        slice_nbytes = self._slice_nbytes(max(pieces.total, whole_nbytes))
        write = WriteRequest(pieces, grant, completion, slice_nbytes, mark)
        self._memory.begin_sending(completion, pieces.local, pieces.nbytes)
        with self._queue_lock:
            dead = self._dead
            is_alone = not self._queue
            if dead is None:
                self._queue.append(write)
                self._writes.add(write)
            oversleeps = completion.deadline_at < self._awake_at
        is_small = pieces.total <= SMALL_NBYTES
        if dead is not None:
            completion.settle(dead)
        elif not (is_small and is_alone and self._send_here()) or oversleeps:
            self._wake()
        completion.add_done_callback(lambda _: self._over(write))
        return completion

    def close(self) -> None:
        self._die(Outcome(Cause.PEER_LOST, "the connection was closed on this side"))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _slice_nbytes(self, total: int) -> int:
        num_paths = max(1, len(self._streams)) * self._encoder.num_paths  # no stream where the last has just broken
        is_shared = num_paths > 1 or self._encoder.is_relay
        share = max(total // (SHARES * num_paths), MIN_SHARE_NBYTES) if is_shared else total
        return min(share, self._encoder.max_nbytes)

    def _send_here(self) -> bool:
        """Send in this thread; return whether nothing is left to this peer's own."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._send_all()
        finally:
            self._lock.release()
        return not self._queue

    def _over(self, write: WriteRequest) -> None:
        self._memory.end_sending(write.completion)
        with self._queue_lock:
            self._writes.discard(write)

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
        except Exception as error:  # a defect of ours must not leave writes without an outcome
            log_once(f"transfer.sender:{type(error).__name__}", "transfer thread failed", logger=logger, exc_info=True)
            self._die(Outcome(Cause.PEER_LOST, f"{type(error).__name__}: {error}"))
        self._finish()

    def _sleep_s(self) -> float:
        now = time.monotonic()
        with self._queue_lock:
            first = min((write.completion.deadline_at for write in self._writes), default=float("inf"))
            if now < self._awake_at < first:  # the next write's deadline is probably later: it need not wake us
                first = self._awake_at
            self._awake_at = first
        errand_at = self._encoder.errand_at
        if errand_at is not None and any(stream.vector is None for stream in list(self._streams.values())):
            first = min(first, errand_at)
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
                    if stream is not None:
                        self._take_answers(stream)
        with self._lock:
            self._send_all()

    def _expire(self) -> None:
        now = time.monotonic()
        with self._queue_lock:
            late = [write for write in self._writes if write.completion.deadline_at <= now]
        self._settled += [(write, Outcome(Cause.DEADLINE, "the peer did not take it in time")) for write in late]

    def _settle(self) -> None:
        """Tell outcomes, holding no lock: callbacks may call us."""
        while self._settled:
            try:
                write, outcome = self._settled.pop()
            except IndexError:  # another thread took it
                return
            write.completion.settle(outcome)

    def _next_slice(self) -> Slice | None:
        with self._queue_lock:
            while self._queue:
                write = self._queue[0]
                part = None if write.completion.outcome else write.next_slice()
                if part is not None:
                    return part
                self._queue.popleft()
        return None

    def _send_all(self) -> None:
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
        turn, is_alone = 0, len(self._streams) == 1
        while turn < ((LONG_TURN_NBYTES if stream.channel.waits else TURN_NBYTES) if is_alone else 1):
            if stream.vector is None and not self._load(stream):
                return False
            assert stream.part is not None and stream.vector is not None
            write = stream.part.write
            with write.lock:
                if write.abandoned and not stream.diverted:
                    self._divert(stream, stream.vector)
                try:
                    turn += stream.channel.send_vector(stream.vector)
                except BlockingIOError:
                    return True
            if not stream.vector.left:
                stream.vector = stream.part = None
        return True

    def _divert(self, stream: Stream, vector: Vector) -> None:
        """The order is out, so bytes must follow; any will do, since the write has failed."""
        if not len(self._scratch):
            self._scratch = np.zeros(self._encoder.max_nbytes, dtype=np.uint8)
        vector.divert(self._scratch.ctypes.data, first=1)
        stream.diverted = True

    def _load(self, stream: Stream) -> bool:
        part = self._encoder.errand()
        if part is None and self._encoder.has_room():
            part = self._next_slice()
        if part is None:
            return False
        part.number = next(self._numbers)
        with part.write.lock:
            stream.vector = self._encoder.encode(part)
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
                self._encoder.release(part, status)
                self._answered(part, status)
        except (OSError, WireError) as error:
            self._drop(stream, error)

    def _answered(self, part: Slice, status: CopyStatus) -> None:
        write = part.write
        if status is not CopyStatus.OK:
            if self._encoder.failed(part, status):
                self._send_again([part])
            else:
                self._settled.append((write, _FAILURES[status]))
            return
        write.left -= part.pieces.total
        if not write.left:
            self._settled.append((write, OK))

    def _drop(self, stream: Stream, error: Exception) -> None:
        """A stream broke: what it had not delivered goes to the others, if there are any."""
        error = stream.channel.why(error)
        del self._streams[stream.descriptor]
        with contextlib.suppress(OSError):
            self._epoll.unregister(stream.descriptor)
        stream.channel.close()
        for part in stream.unanswered.values():
            self._encoder.release(part, None)
        if not self._streams:
            self._die(Outcome(Cause.PEER_LOST, str(error) or type(error).__name__))
            return
        log_once(
            f"transfer.transports.stream:{stream.label}",
            "path %s to a peer broke (%s); going on over %d others",
            stream.label, error, len(self._streams), logger=logger,
        )  # fmt: skip
        self._send_again(stream.unanswered.values())
        self._wake()  # the others may have had their turn, and nothing to do then

    def _send_again(self, parts: Iterable[Slice]) -> None:
        with self._queue_lock:
            for part in parts:
                part.write.again.append(part)
                if part.write not in self._queue:
                    self._queue.appendleft(part.write)

    def _die(self, outcome: Outcome) -> None:
        with self._queue_lock:
            self._dead = self._dead or outcome
        self._wake()

    def _finish(self) -> None:
        assert self._dead is not None
        with self._lock:
            for stream in self._streams.values():
                stream.channel.close()
            self._streams.clear()  # their numbers may belong to other files next
            self._encoder.close()
            self._epoll.close()
        self._on_close(self)  # who closes the transport waits for those that it knows, and then takes down the rest
        with self._queue_lock:  # its number may belong to another file next
            os.close(self._wakeup)
            self._wakeup = -1
            self._queue.clear()
            self._settled += [(write, self._dead) for write in self._writes]
        self._settle()
