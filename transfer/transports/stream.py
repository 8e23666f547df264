"""What the sending side puts on a connection: writes, their slices, and how the bytes of one reach the receiver."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import repeat
from types import MappingProxyType

from transfer.transports.base import Completion, Grant
from transfer.transports.channel import Channel
from transfer.transports.passing import Marker
from transfer.transports.vectors import Pieces, Small, Vector
from transfer.transports.wire import ANSWER_NBYTES, MAX_ORDER_PIECES, CopyStatus, decode_answer

_TAKEN_NBYTES = 64 * ANSWER_NBYTES


class WriteRequest:
    """One call of `Peer.write`. `lock` is held while its source is read."""

    __slots__ = ("_slices", "abandoned", "again", "completion", "grant", "left", "lock")

    def __init__(
        self, pieces: Pieces, grant: Grant, completion: Completion, max_nbytes: int, mark: Marker | None = None
    ) -> None:
        """A slice has at most `max_nbytes`. With `mark` all are marked here, by the thread that asks for the write."""
        self.grant = grant
        self.completion = completion
        self.left = pieces.total
        self.lock = threading.Lock()
        self.abandoned = False
        self.again: list[Slice] = []
        slices = pieces.slices(max_nbytes, MAX_ORDER_PIECES)
        self._slices = zip(slices, repeat(b"")) if mark is None else iter([(part, mark(part)) for part in slices])
        completion.stop_with(self._stop)

    def next_slice(self) -> Slice | None:
        """Slices of a broken stream first."""
        if self.again:
            return self.again.pop()
        found = next(self._slices, None)
        return None if found is None else Slice(self, *found)

    def _stop(self) -> None:
        with self.lock:
            self.abandoned = True


class Slice:
    """Part of a write that goes over one stream as one order."""

    __slots__ = ("mark", "number", "pieces", "place", "tries", "write")

    def __init__(self, write: WriteRequest, pieces: Pieces, mark: bytes = b"") -> None:
        self.write = write
        self.pieces = pieces
        self.mark = mark
        self.number = self.place = self.tries = 0


class PayloadEncoder(ABC):
    """How the bytes of slices reach the receiver."""

    max_nbytes: int
    """Of one slice."""
    num_paths = 1
    """Over which slices of one stream travel beside each other."""
    asked: Mapping[int, Slice] = MappingProxyType({})
    """Of the first stream, by number: what is under way on it already when writes begin."""
    is_relay = False
    """Whether the receiver begins with a slice when the sender is done with it: only several keep both busy."""

    def has_room(self) -> bool:
        """Whether another slice can be encoded now; it is asked again after each answer."""
        return True

    @abstractmethod
    def encode(self, part: Slice) -> Vector:
        """What to send for `part`: the order in one piece, then, where they go over the stream, its bytes.

        Called with the write's lock held; where the write was abandoned the source must not be read.
        """

    def errand(self) -> Slice | None:
        """Something of its own to send before anything else; asked before each slice, and at `errand_at`."""
        return None

    @property
    def errand_at(self) -> float | None:
        """When there will be one, in `time.monotonic()` seconds."""
        return None

    def release(self, part: Slice, status: CopyStatus | None) -> None:  # noqa: B027
        """`part` was answered so, or its stream broke (None)."""

    def failed(self, part: Slice, status: CopyStatus) -> bool:
        """The receiver answered so; whether to send it again. Raises OSError where the stream is of no use any more."""
        return False

    def close(self) -> None:  # noqa: B027
        """No slice is encoded any more."""


class Stream:
    """One connection to the receiver."""

    def __init__(self, channel: Channel, label: str) -> None:
        channel.hurry()
        self.channel = channel
        self.descriptor = channel.descriptor
        self.label = label
        self.vector: Vector | None = None
        self.part: Slice | None = None
        self.diverted = False
        self.wants_out = False
        self.unanswered: dict[int, Slice] = {}
        self._taken = Small(_TAKEN_NBYTES)
        self._rest = b""

    def answers(self) -> Iterator[tuple[int, CopyStatus]]:
        """What the receiver has said by now. Raises OSError at the end of the stream, WireError."""
        is_all = False
        while not is_all:
            try:
                taken = self.channel.fill(self._taken)
            except BlockingIOError:
                return
            if not taken:
                raise ConnectionResetError("the peer closed the connection")
            is_all = taken < _TAKEN_NBYTES
            data = self._rest + self._taken.bytes[:taken].tobytes()
            whole = len(data) - len(data) % ANSWER_NBYTES
            self._rest = data[whole:]
            for start in range(0, whole, ANSWER_NBYTES):
                yield decode_answer(data, start)
