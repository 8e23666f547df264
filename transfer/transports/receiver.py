"""The receiving side of a transport: one thread that runs the connections of all its peers and waits for none."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.control.pending import TOO_MANY, PendingHandshakes, origin_of
from transfer.transports.base import TransferError
from transfer.transports.incoming import Connection
from transfer.transports.unix import credentials

logger = get_logger(__name__)

HANDSHAKE_S = 5.0
LEAVE_S = 5.0
"""What is under way when its peer is gone has so long to end by itself; then it is cut off."""
MAX_CONNECTIONS = 512
"""Of peers, each of which has passed the handshake."""


class Receiver:
    """Listens, and runs the connections of one transport in a thread of its own."""

    def __init__(
        self,
        name: str,
        listeners: list[socket.socket],
        make: Callable[[socket.socket], Connection],
    ) -> None:
        """`make` gives the Connection for an accepted socket; it raises TransferError to refuse it at once.

        Raises OSError or RuntimeError where no descriptor or thread is left; the listeners are still the caller's then.
        """
        self._name, self._make = name, make
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._connections: dict[int, Connection] = {}
        self._pending: PendingHandshakes[Connection] = PendingHandshakes()
        self._watched: dict[int, int] = {}
        """What the kernel wakes this thread for, by descriptor."""
        self._polled: set[Connection] = set()
        self._leaving: dict[Connection, float] = {}
        """Closed ones with something under way, and when that is cut off."""
        self._posted: deque[tuple[Connection, Callable[[], None]]] = deque()
        self._post_lock = threading.Lock()
        self._closing = False
        for listener in listeners:
            listener.setblocking(False)
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            for descriptor in (self._wakeup, *self._listeners):
                self._epoll.register(descriptor, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name=f"mooncake-{name}-receive", daemon=True)
            self._thread.start()
        except BaseException:
            os.close(self._wakeup)
            self._epoll.close()
            raise

    def close(self) -> None:
        """Close everything; returns when no connection writes any more. Call it once."""
        self._closing = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        for listener in self._listeners.values():
            listener.close()
        self._epoll.close()
        with self._post_lock:  # its number may belong to another file next
            os.close(self._wakeup)
            self._wakeup = -1

    def _post(self, connection: Connection, work: Callable[[], None]) -> None:
        """Have this thread do something for a connection; for any thread."""
        with self._post_lock:
            if self._wakeup >= 0:
                self._posted.append((connection, work))
                os.eventfd_write(self._wakeup, 1)

    def _run(self) -> None:
        while not self._closing:
            self._turn()
        for descriptor in self._listeners:
            self._epoll.unregister(descriptor)
        for connection in list(self._connections.values()):
            self._leave(connection)
        while self._leaving:
            self._turn()

    def _turn(self) -> None:
        for descriptor, event in self._epoll.poll(self._wait_s()):
            if descriptor in self._listeners:
                self._accept(self._listeners[descriptor])
            elif descriptor in self._connections:
                connection = self._connections[descriptor]
                self._attempt(connection, partial(self._converse, connection, event))
            elif descriptor == self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(descriptor)
        while self._posted:
            connection, work = self._posted.popleft()
            self._attempt(connection, work)
        for connection in list(self._polled):
            self._attempt(connection, connection.poll)
        if self._leaving:
            self._cut_off()
        if self._pending:
            self._turn_away()

    def _wait_s(self) -> float:
        if not self._polled and not self._leaving:
            return HANDSHAKE_S if self._pending else -1
        waits = [connection.poll_s or 0.0 for connection in self._polled]
        if self._leaving:
            waits.append(max(0.0, min(self._leaving.values()) - time.monotonic()))
        return min(waits)

    def _cut_off(self) -> None:
        now = time.monotonic()
        for connection, until in list(self._leaving.items()):
            if connection.is_busy and now >= until:
                log_once(
                    f"transfer.cut_off:{self._name}",
                    "%s: a fetch did not end within %g s after its peer was gone: cut off",
                    self._name, LEAVE_S, logger=logger,
                )  # fmt: skip
                try:
                    connection.cut_off()
                except Exception as error:
                    self._log(error)
            if not connection.is_busy or now >= until:
                del self._leaving[connection]
                self._polled.discard(connection)

    def _turn_away(self) -> None:
        for connection in self._pending.all():
            if not connection.is_pending:
                self._pending.leave(connection)
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
            if len(self._connections) - len(self._pending) >= MAX_CONNECTIONS:
                raise TransferError(f"{MAX_CONNECTIONS} connections of peers are open")
            is_local = listener.family == socket.AF_UNIX
            origin = f"process {credentials(accepted)[0]}" if is_local else origin_of(address[0])
            connection = self._make(accepted)
            connection.post = partial(self._post, connection)
            self._epoll.register(connection.descriptor, select.EPOLLIN)
        except Exception as error:
            self._log(error)
            accepted.close()
            return
        self._watched[connection.descriptor] = select.EPOLLIN
        self._connections[connection.descriptor] = connection
        oldest = self._pending.enter(connection, origin)
        if oldest is not None and oldest.is_pending:
            self._drop(oldest, TransferError(f"{TOO_MANY}, the last from {origin}; the oldest is closed"))

    def _converse(self, connection: Connection, event: int) -> None:
        if event & select.EPOLLOUT:
            connection.flush()
        if not event & ~select.EPOLLOUT:
            return
        if connection.is_full:  # this is not what it waits for: nobody reads its answers any more
            raise ConnectionResetError("closed by the peer")
        self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            while connection.step():
                pass
        except BlockingIOError:
            pass

    def _attempt(self, connection: Connection, work: Callable[[], None]) -> None:
        """Do it, and see what the connection waits for then; one at which it fails is dropped."""
        try:
            work()
            if connection.is_closed:
                return
            wanted = 0 if connection.is_full else select.EPOLLIN
            if connection.unsent:
                wanted |= select.EPOLLOUT
            if self._watched[connection.descriptor] != wanted:
                self._watched[connection.descriptor] = wanted
                self._epoll.modify(connection.descriptor, wanted)
            if connection.poll_s is not None:
                self._polled.add(connection)
            elif self._polled:
                self._polled.discard(connection)
        except Exception as error:  # also a defect of ours costs this connection only
            self._drop(connection, error)

    def _drop(self, connection: Connection, error: Exception) -> None:
        error = connection.channel.why(error)
        if not isinstance(error, ConnectionError):  # peers come and go; a broken record of TLS is an OSError as well
            self._log(error)
        if not connection.is_closed:
            self._leave(connection)

    def _leave(self, connection: Connection) -> None:
        del self._connections[connection.descriptor], self._watched[connection.descriptor]
        self._pending.leave(connection)
        self._epoll.unregister(connection.descriptor)
        try:
            connection.close()
        except Exception as error:  # of its fetcher: what is under way is cut off later
            self._log(error)
        if connection.is_busy:
            self._leaving[connection] = time.monotonic() + LEAVE_S
        else:
            self._polled.discard(connection)

    def _log(self, error: Exception) -> None:
        """Once for each kind: what a newcomer says must not make a new kind, there is room for so many."""
        kind = kind_of(str(error)) if isinstance(error, TransferError) else ""
        log_once(
            f"transfer.{self._name}:{type(error).__name__}:{kind}",
            "%s: a connection was closed: %s: %s", self._name, type(error).__name__, error, logger=logger,
            exc_info=not isinstance(error, (TransferError, OSError)),
        )  # fmt: skip
