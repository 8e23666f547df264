"""The receiving side of one peer's connection: reads its orders and checks each before a byte of it is written.

What differs between transports is what a `Connection` does with an order: the bytes come over the connection (tcp),
through a ring (shm), or are fetched (see `transfer.transports.pull`). A connection that says anything wrong is closed;
an order that may not be executed is answered, and the connection goes on.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable

from mooncake_connector.log import get_logger, log_once
from transfer.control.handshake import MAX_FRAME_NBYTES, HandshakeError, Server
from transfer.transports.base import Numbers
from transfer.transports.channel import Channel
from transfer.transports.memory import Memory, Revocable
from transfer.transports.passing import MARK_NBYTES, Passing, decode_mark
from transfer.transports.vectors import Small, Vector
from transfer.transports.wire import (
    BLOCK_NBYTES,
    HEADER_NBYTES,
    PROBE_KEY,
    CopyOrder,
    CopyStatus,
    WireError,
    decode_columns,
    decode_order,
    encode_answer,
)

logger = get_logger(__name__)

_MAX_UNSENT_NBYTES = 1 << 20


class Connection(ABC):
    """One connection of one peer. `step` never waits."""

    columns = 2
    max_nbytes: int
    """Of one order."""
    max_attached = 0
    """Bytes that an order may have attached; `attachment` are those of the order at hand."""
    is_full = False
    """Whether nothing is read for now, since enough is under way."""
    is_busy = False
    """Whether something is under way that outlives the connection, until it is over or `cut_off`."""
    poll_s: float | None = None
    """How often `poll` is called; None: never."""
    post: Callable[[Callable[[], None]], None]
    """Has the receiving thread call something, soon; for any thread. Set by the receiver."""

    def __init__(self, channel: Channel, server: Server, memory: Memory) -> None:
        channel.hurry()
        self.channel = channel
        self.descriptor = channel.descriptor
        self.born_at = time.monotonic()
        self.unsent = b""
        self.is_closed = False
        self._server, self._memory = server, memory
        self._block = Small(BLOCK_NBYTES)
        self._got = 0
        self.attachment = b""
        self.passing: Passing | None = None
        """Of the order at hand, where it is marked."""
        self._next: Callable[[], bool] = self._shake

    @property
    def is_pending(self) -> bool:
        """Whether nobody knows yet who is at the other end."""
        return self._server.peer is None

    @abstractmethod
    def execute(self, order: CopyOrder, columns: list[Numbers], held: Revocable) -> bool:
        """Write what the order says; its pieces lie inside the grant. Answers it, now or later; as `step`."""

    def decline(self, order: CopyOrder, columns: list[Numbers], status: CopyStatus) -> bool:
        """Write nothing, and be ready for the next order; as `step`."""
        return self.answer(order, status)

    def probe(self, order: CopyOrder, columns: list[Numbers]) -> bool:
        """Answer a question of the transport's own; as `step`."""
        raise WireError("a probe, of which this transport knows none")

    def welcome(self) -> None:
        """Called once after the handshake."""
        self._next = self._take_block

    def step(self) -> bool:
        """Take what has arrived, and return whether more probably has: after an answer, others get their turn.

        Raises BlockingIOError where nothing has arrived, OSError or TransferError at the end.
        """
        return self._next()

    def flush(self) -> None:
        """Send what is waiting to be sent. Raises OSError."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.channel.send(self.unsent) :]
        except BlockingIOError:
            pass

    def poll(self) -> None:  # noqa: B027
        """Look after what is under way. Raises OSError or TransferError at the end."""

    def cut_off(self) -> None:  # noqa: B027
        """End what is under way, whatever it takes."""

    def answer(self, order: CopyOrder, status: CopyStatus) -> bool:
        """As `step`: the order is over, the next one may come."""
        self._next = self._take_block
        self.say_status(order.number, status)
        return False

    def say_status(self, number: int, status: CopyStatus) -> None:
        """Answer an order. Raises OSError, WireError."""
        self._say(encode_answer(number, status))

    def close(self) -> None:
        """The peer is gone, or has to go."""
        self.is_closed = True
        self.channel.close()

    def _say(self, data: bytes) -> None:
        self.unsent += data
        if len(self.unsent) > _MAX_UNSENT_NBYTES:
            raise WireError("the peer does not read our answers")
        self.flush()

    def _shake(self) -> bool:
        data = self.channel.recv(MAX_FRAME_NBYTES)
        if not data:
            raise ConnectionResetError("closed during the handshake")
        try:
            self._say(self._server.receive(data))
        except HandshakeError as error:
            self._say(self._server.refusal(error))
            raise
        if self._server.peer is not None:
            if self._server.leftover:
                raise WireError("bytes out of turn after the handshake")
            self.welcome()
        return False

    def _take_block(self) -> bool:
        taken = self.channel.fill(self._block, self._got)
        if taken == 0:
            raise ConnectionResetError("closed by the peer")
        self._got += taken
        if self._got < BLOCK_NBYTES:
            return False
        self._got = 0
        order = decode_order(self._block.bytes, self.max_nbytes, self.max_attached)
        rest = self._columns_end(order) + order.attached + MARK_NBYTES * order.is_marked - BLOCK_NBYTES
        if rest <= 0:
            return self._obey(order, self._block.bytes)
        whole = self._block.bytes + array("B", bytes(rest))
        vector = Vector.over(whole)
        vector.advance(BLOCK_NBYTES)
        return self._expect(vector, lambda: self._obey(order, whole))

    def _columns_end(self, order: CopyOrder) -> int:
        return HEADER_NBYTES + 8 * self.columns * order.pieces

    def _expect(self, vector: Vector, then: Callable[[], bool]) -> bool:
        """Fill `vector`, then call `then`; as `step`."""

        def fill() -> bool:
            if self.channel.fill_vector(vector) == 0:
                raise ConnectionResetError("closed by the peer")
            return not vector.left and then()

        self._next = fill
        return True

    def _obey(self, order: CopyOrder, data: array[int]) -> bool:
        columns = decode_columns(order, data, self.columns)
        end = self._columns_end(order)
        self.attachment = data[end : end + order.attached].tobytes() if order.attached else b""
        self.passing = None
        if order.key == PROBE_KEY:
            return self.probe(order, columns)
        held = self._memory.granted(order.key)
        if held is None:
            return self.decline(order, columns, CopyStatus.NO_GRANT)
        if not held.grant.covers(columns[0], columns[1]):
            log_once(
                "transfer.outside",
                "a peer wanted to write outside of the memory granted to it: refused",
                logger=logger,
            )
            return self.decline(order, columns, CopyStatus.OUTSIDE)
        if order.is_marked:
            assert self._server.peer is not None
            mark = decode_mark(data[end + order.attached : end + order.attached + MARK_NBYTES].tobytes())
            self.passing = Passing(held, self._server.peer, mark, columns[0], columns[1])
        return self.execute(order, columns, held)
