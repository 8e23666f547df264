"""The receiving side: one thread for all peers of a transport. Every order is checked before a byte of it is written.

What differs between transports is what a `Connection` does with an order: `FetchingConnection`s get the bytes by
themselves, `transfer.tcp`'s come over the connection. A connection that says anything wrong is closed and logged; an
order that may not be executed is answered, and the connection goes on.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from mooncake_connector.log import get_logger, log_once
from transfer.base import Int64, TransferError
from transfer.handshake import MAX_FRAME_NBYTES, HandshakeError, Identity, Server
from transfer.memory import Memory, Revocable
from transfer.tls import TlsSocket
from transfer.vectors import Vector
from transfer.wire import HEADER_NBYTES, Order, Status, WireError, decode_columns, decode_order, encode_answer

logger = get_logger(__name__)

HANDSHAKE_S = 5.0
MAX_STRANGERS = 64
"""Connections that have not finished their handshake; more are closed at once."""
_MAX_UNSENT_NBYTES = 1 << 20
_TURN_STEPS = 16
"""Steps of one connection before the others get their turn."""


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
        self.unsent = bytearray()
        self.wants_out = False
        self._server, self._memory = server, memory
        self._header = np.zeros(HEADER_NBYTES, dtype=np.uint8)
        self._columns = np.zeros(0, dtype=np.uint8)
        self._order: Order | None = None
        self._held: Revocable | None = None
        self._vector = Vector.over(self._header)
        self._next: Callable[[], None] = self._shake

    @property
    def is_stranger(self) -> bool:
        return self._server.terms is None

    @property
    def pending(self) -> bool:
        """Whether bytes have arrived that polling the socket does not show."""
        return False

    @abstractmethod
    def execute(self, order: Order, columns: Int64, held: Revocable) -> None:
        """Write what the order says; its pieces lie inside the grant. Answers, now or later, or sets `_next`."""

    def decline(self, order: Order, columns: Int64, status: Status) -> None:
        """Write nothing, and be ready for the next order."""
        self.answer(order, status)

    def probe(self, order: Order, columns: Int64) -> None:
        """Answer a question of the transport's own."""
        raise WireError("a probe, of which this transport knows none")

    def welcome(self) -> None:
        """Called once after the handshake."""
        self._expect_order()

    def step(self) -> None:
        """Take what has arrived. Raises BlockingIOError where that is nothing, OSError or TransferError at the end."""
        self._next()

    def flush(self) -> None:
        """Send what is waiting to be sent. Raises OSError."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.write(self.unsent)]

    def answer(self, order: Order, status: Status) -> None:
        self._say(encode_answer(order.number, status))
        self._expect_order()

    def read(self, nbytes: int) -> bytes:
        """Bytes that have arrived, b"" at the end. Raises BlockingIOError."""
        return self.connection.recv(nbytes)

    def write(self, data: bytes | bytearray) -> int:
        """Send what the socket takes."""
        return self.connection.send(data)

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

    def _shake(self) -> None:
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

    def _expect(self, vector: Vector, then: Callable[[], None]) -> None:
        self._vector = vector
        self._next = lambda: self._fill(then)

    def _fill(self, then: Callable[[], None]) -> None:
        if self.fill(self._vector) == 0:
            raise ConnectionResetError("closed by the peer")
        if not self._vector.left:
            then()

    def _expect_order(self) -> None:
        self._order = self._held = None
        self._expect(Vector.over(self._header), self._take_header)

    def _take_header(self) -> None:
        self._order = decode_order(self._header.tobytes(), self.max_nbytes)
        self._columns = np.empty(self._order.pieces * self.columns * 8, dtype=np.uint8)
        self._expect(Vector.over(self._columns), self._take_columns)

    def _take_columns(self) -> None:
        order = self._order
        assert order is not None
        columns = decode_columns(order, self._columns)
        if order.key == bytes(len(order.key)):
            return self.probe(order, columns)
        self._held = self._memory.granted(order.key)
        if self._held is None:
            return self.decline(order, columns, Status.NO_GRANT)
        if not self._held.grant.covers(columns[0], columns[1]):
            log_once(
                "transfer.outside",
                "a peer wanted to write outside of the memory granted to it: refused",
                logger=logger,
            )
            return self.decline(order, columns, Status.OUTSIDE)
        self.execute(order, columns, self._held)


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
            for descriptor, event in self._epoll.poll(HANDSHAKE_S if self._strangers() else -1):
                if descriptor in self._listeners:
                    self._accept(self._listeners[descriptor])
                elif descriptor in self._connections:
                    self._serve(self._connections[descriptor], event)
            for connection in self._strangers():
                if time.monotonic() - connection.born_at > HANDSHAKE_S:
                    self._drop(connection, TransferError(f"no handshake within {HANDSHAKE_S:g} s"))
        for connection in list(self._connections.values()):
            connection.close()

    def _strangers(self) -> list[Connection]:
        return [connection for connection in self._connections.values() if connection.is_stranger]

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of file descriptors: the listener stays readable, so do not spin
            log_once(f"transfer.accept:{error.errno}", "cannot accept a peer: %s", error, logger=logger)
            time.sleep(0.05)
            return
        try:
            if len(self._strangers()) >= MAX_STRANGERS:
                raise TransferError(f"{MAX_STRANGERS} connections have not finished their handshake")
            connection = self._make(accepted, Server(self._identity, self._name))
            self._epoll.register(connection.descriptor, select.EPOLLIN)
        except Exception as error:
            self._log(error)
            accepted.close()
            return
        self._connections[connection.descriptor] = connection

    def _serve(self, connection: Connection, event: int) -> None:
        try:
            if event & select.EPOLLOUT:
                connection.flush()
            if event & ~select.EPOLLOUT:
                with contextlib.suppress(BlockingIOError):
                    steps = 0
                    while steps < _TURN_STEPS or connection.pending:
                        connection.step()
                        steps += 1
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
        self._epoll.unregister(connection.descriptor)
        connection.close()

    def _log(self, error: Exception) -> None:
        """Once for each kind: what a stranger says must not make a new kind, there is room for so many."""
        kind = re.split(r"[\d:']", str(error), maxsplit=1)[0] if isinstance(error, TransferError) else ""
        log_once(
            f"transfer.{self._name}:{type(error).__name__}:{kind[:40]}",
            "%s: a connection was closed: %s: %s", self._name, type(error).__name__, error, logger=logger,
            exc_info=not isinstance(error, (TransferError, OSError)),
        )  # fmt: skip
