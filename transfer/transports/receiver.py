"""The receiving side: one thread for all peers of a transport. Every order is checked before a byte of it is written.

What differs between transports is what a `Connection` does with an order: `FetchingConnection`s get the bytes by
themselves, `tcp`'s come over the connection. A connection that says anything wrong is closed and logged; an
order that may not be executed is answered, and the connection goes on.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable

from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.control.handshake import MAX_FRAME_NBYTES, HandshakeError, Identity, Server
from transfer.control.pending import TOO_MANY, Strangers, origin_of
from transfer.transports.base import Numbers, TransferError
from transfer.transports.memory import Memory, Revocable
from transfer.transports.tls import TlsSocket
from transfer.transports.unix import credentials
from transfer.transports.vectors import Small, Vector, send_small
from transfer.transports.wire import (
    BLOCK_NBYTES,
    HEADER_NBYTES,
    PROBE_KEY,
    Order,
    Status,
    WireError,
    decode_columns,
    decode_order,
    encode_answer,
)

logger = get_logger(__name__)

HANDSHAKE_S = 5.0
MAX_CONNECTIONS = 512
"""Of peers, each of which has passed the handshake."""
_MAX_UNSENT_NBYTES = 1 << 20


class Connection(ABC):
    """One connection of one peer. `step` never waits."""

    columns = 2
    max_nbytes: int
    """Of one order."""

    def __init__(self, connection: socket.socket | TlsSocket, server: Server, memory: Memory) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.descriptor = connection.fileno()
        self.born_at = time.monotonic()
        self.unsent = b""
        self.wants_out = False
        self._server, self._memory = server, memory
        self._block = Small(BLOCK_NBYTES)
        self._got = 0
        self._next: Callable[[], bool] = self._shake

    @property
    def is_stranger(self) -> bool:
        return self._server.terms is None

    @property
    def pending(self) -> bool:
        """Whether bytes have arrived that polling the socket does not show."""
        return False

    @abstractmethod
    def execute(self, order: Order, columns: list[Numbers], held: Revocable) -> bool:
        """Write what the order says; its pieces lie inside the grant. Answers, or sets `_next`; as `step`."""

    def decline(self, order: Order, columns: list[Numbers], status: Status) -> bool:
        """Write nothing, and be ready for the next order; as `step`."""
        return self.answer(order, status)

    def probe(self, order: Order, columns: list[Numbers]) -> bool:
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
                self.unsent = self.unsent[self.write(self.unsent) :]
        except BlockingIOError:
            pass

    def answer(self, order: Order, status: Status) -> bool:
        """As `step`."""
        self._say(encode_answer(order.number, status))
        self._next = self._take_block
        return False

    def read(self, nbytes: int) -> bytes:
        """Bytes that have arrived, b"" at the end. Raises BlockingIOError."""
        return self.connection.recv(nbytes)

    def read_block(self, start: int) -> int:
        """Fill the block from `start` on; 0 at the end. Raises BlockingIOError."""
        return self._block.receive(self.descriptor, start)

    def write(self, data: bytes) -> int:
        """Send what the socket takes. Raises BlockingIOError."""
        return send_small(self.descriptor, data)

    def fill(self, vector: Vector) -> int:
        """Fill with bytes that have arrived, 0 at the end. Raises BlockingIOError."""
        return vector.receive(self.descriptor)

    def close(self) -> None:
        self.connection.close()

    def _say(self, data: bytes) -> None:
        self.unsent += data
        if len(self.unsent) > _MAX_UNSENT_NBYTES:
            raise WireError("the peer does not read our answers")
        self.flush()

    def _shake(self) -> bool:
        data = self.read(MAX_FRAME_NBYTES)
        if not data:
            raise ConnectionResetError("closed during the handshake")
        try:
            self._say(self._server.receive(data))
        except HandshakeError as error:
            self._say(self._server.refusal(error))
            raise
        if self._server.terms is not None:
            if self._server.leftover:
                raise WireError("bytes out of turn after the handshake")
            self.welcome()
        return False

    def _take_block(self) -> bool:
        taken = self.read_block(self._got)
        if taken == 0:
            raise ConnectionResetError("closed by the peer")
        self._got += taken
        if self._got < BLOCK_NBYTES:
            return False
        self._got = 0
        order = decode_order(self._block.bytes, self.max_nbytes)
        rest = HEADER_NBYTES + 8 * self.columns * order.pieces - BLOCK_NBYTES
        if rest <= 0:
            return self._obey(order, self._block.bytes)
        whole = self._block.bytes + array("B", bytes(rest))
        vector = Vector.over(whole)
        vector.advance(BLOCK_NBYTES)
        return self._expect(vector, lambda: self._obey(order, whole))

    def _expect(self, vector: Vector, then: Callable[[], bool]) -> bool:
        """Fill `vector`, then call `then`; as `step`."""

        def fill() -> bool:
            if self.fill(vector) == 0:
                raise ConnectionResetError("closed by the peer")
            return not vector.left and then()

        self._next = fill
        return True

    def _obey(self, order: Order, data: array[int]) -> bool:
        columns = decode_columns(order, data, self.columns)
        if order.key == PROBE_KEY:
            return self.probe(order, columns)
        held = self._memory.granted(order.key)
        if held is None:
            return self.decline(order, columns, Status.NO_GRANT)
        if not held.grant.covers(columns[0], columns[1]):
            log_once(
                "transfer.outside",
                "a peer wanted to write outside of the memory granted to it: refused",
                logger=logger,
            )
            return self.decline(order, columns, Status.OUTSIDE)
        return self.execute(order, columns, held)


class Receiver:
    """Listens, and runs the connections of one transport in a thread of its own."""

    def __init__(
        self,
        name: str,
        listeners: list[socket.socket],
        identity: Identity,
        make: Callable[[socket.socket, Server], Connection],
    ) -> None:
        """`make` gives the Connection for an accepted socket; it raises TransferError to refuse it at once."""
        self._name, self._identity, self._make = name, identity, make
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._connections: dict[int, Connection] = {}
        self._strangers: Strangers[Connection] = Strangers()
        self._closing = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        for descriptor in (self._wakeup, *self._listeners):
            self._epoll.register(descriptor, select.EPOLLIN)
        for listener in listeners:
            listener.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"mooncake-{name}-receive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close everything; returns when no connection writes any more. Call it once."""
        self._closing = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        for listener in self._listeners.values():
            listener.close()
        self._epoll.close()
        os.close(self._wakeup)

    def _run(self) -> None:
        while not self._closing:
            for descriptor, event in self._epoll.poll(HANDSHAKE_S if self._strangers else -1):
                if descriptor in self._listeners:
                    self._accept(self._listeners[descriptor])
                elif descriptor in self._connections:
                    self._serve(self._connections[descriptor], event)
            if self._strangers:
                self._turn_strangers_away()
        for connection in list(self._connections.values()):
            connection.close()

    def _turn_strangers_away(self) -> None:
        for connection in self._strangers.all():
            if not connection.is_stranger:
                self._strangers.leave(connection)
            elif time.monotonic() - connection.born_at > HANDSHAKE_S:
                self._drop(connection, TransferError(f"no handshake within {HANDSHAKE_S:g} s"))

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, address = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of file descriptors: the listener stays readable, so do not spin
            log_once(f"transfer.accept:{error.errno}", "cannot accept a peer: %s", error, logger=logger)
            time.sleep(0.05)
            return
        try:
            if len(self._connections) - len(self._strangers) >= MAX_CONNECTIONS:
                raise TransferError(f"{MAX_CONNECTIONS} connections of peers are open")
            is_local = listener.family == socket.AF_UNIX
            origin = f"process {credentials(accepted)[0]}" if is_local else origin_of(address[0])
            connection = self._make(accepted, Server(self._identity, self._name))
            self._epoll.register(connection.descriptor, select.EPOLLIN)
        except Exception as error:
            self._log(error)
            accepted.close()
            return
        self._connections[connection.descriptor] = connection
        oldest = self._strangers.enter(connection, origin)
        if oldest is not None and oldest.is_stranger:
            self._drop(oldest, TransferError(f"{TOO_MANY}, the last from {origin}; the oldest is closed"))

    def _serve(self, connection: Connection, event: int) -> None:
        try:
            if event & select.EPOLLOUT:
                connection.flush()
            if event & ~select.EPOLLOUT:
                try:
                    while connection.step() or connection.pending:
                        pass
                except BlockingIOError:
                    pass
            if connection.wants_out != bool(connection.unsent):
                connection.wants_out = bool(connection.unsent)
                wanted = select.EPOLLIN | (select.EPOLLOUT if connection.wants_out else 0)
                self._epoll.modify(connection.descriptor, wanted)
        except Exception as error:  # also a defect of ours costs this connection only
            self._drop(connection, error)

    def _drop(self, connection: Connection, error: Exception) -> None:
        if not isinstance(error, OSError):
            self._log(error)
        del self._connections[connection.descriptor]
        self._strangers.leave(connection)
        self._epoll.unregister(connection.descriptor)
        connection.close()

    def _log(self, error: Exception) -> None:
        """Once for each kind: what a stranger says must not make a new kind, there is room for so many."""
        kind = kind_of(str(error)) if isinstance(error, TransferError) else ""
        log_once(
            f"transfer.{self._name}:{type(error).__name__}:{kind}",
            "%s: a connection was closed: %s: %s", self._name, type(error).__name__, error, logger=logger,
            exc_info=not isinstance(error, (TransferError, OSError)),
        )  # fmt: skip
