"""Takes control connections (`control.connection`): whose they are, how many at a time, and how long each may take."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable

from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.control.connection import MAX_LARGE, Access, Link, some, tune
from transfer.control.handshake import HandshakeError, Identity, Server, require_secret
from transfer.control.pending import TOO_MANY, PendingHandshakes, origin_of
from transfer.transports.base import TransferError
from transfer.transports.unix import OtherUser, check_user, credentials, listen_at_port

MAX_LINKS = 256
"""Connections of peers that have said what they want."""
_HANDSHAKE_S = 5.0
"""A connection without a handshake is closed after so long."""
_BACKLOG = 128
_ACCEPT_AGAIN_S = 0.05

logger = get_logger(__name__)
_Task = asyncio.Task[None]


async def listen(
    address: tuple[str, int], purpose: str, access: Access, serve: Callable[[Link], Awaitable[None]]
) -> Listener:
    """Accept connections from now on; `serve` runs for each one after its handshake, which is closed when it returns.

    Args:
        address: "" as the host is a Unix socket for processes of this user, named by the port; 0 is any port.

    Raises:
        TransferError: the address needs a secret, or cannot be listened at.
    """
    host, port = address
    context = None
    try:
        if not host:
            listening, port = listen_at_port(port, _BACKLOG)
        else:
            require_secret(host, access.identity)
            context = None if access.tls is None else access.tls.context(server=True)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server(address, family=family, backlog=_BACKLOG)
            port = listening.getsockname()[1]
    except (OSError, OverflowError) as error:
        raise TransferError(f"cannot listen at {host or 'this host'}, port {port}: {error}") from error
    return Listener(listening, port, purpose, access.identity, context, serve)


class Listener:
    """See `listen`. Connections count as pending from the start, before TLS has begun, until `Link.known`."""

    def __init__(
        self,
        listening: socket.socket,
        port: int,
        purpose: str,
        identity: Identity,
        context: ssl.SSLContext | None,
        serve: Callable[[Link], Awaitable[None]],
    ) -> None:
        self.port = port
        self._is_local = listening.family == socket.AF_UNIX
        self._purpose, self._identity, self._context, self._serve = purpose, identity, context, serve
        self._pending: PendingHandshakes[_Task] = PendingHandshakes()
        self._large = asyncio.Semaphore(MAX_LARGE)
        self._tasks: set[_Task] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listening))

    def close(self) -> None:
        """Accept nobody any more; connections go on."""
        self._accepting.cancel()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            listening.setblocking(False)
            while True:
                try:
                    connection, address = await loop.sock_accept(listening)
                except OSError as error:  # out of file descriptors: the listener stays readable, so do not spin
                    log_once(f"control.accept:{error.errno}", "cannot accept a peer: %s", error, logger=logger)
                    await asyncio.sleep(_ACCEPT_AGAIN_S)
                    continue
                try:
                    self._enter(connection, address)
                except (OSError, OtherUser) as error:
                    connection.close()
                    self._log_refusal("this host", str(error))
                await asyncio.sleep(0)  # others get their turn however fast connections come

    def _enter(self, connection: socket.socket, address: tuple[str, int]) -> None:
        if self._is_local:
            check_user(connection)
            host = origin = f"process {credentials(connection)[0]}"
        else:
            host = address[0]
            origin = origin_of(host)
        task = asyncio.get_running_loop().create_task(self._talk(connection, host))
        self._tasks.add(task)
        task.add_done_callback(self._left)
        oldest = self._pending.enter(task, origin)
        if oldest is not None:
            self._log_refusal(host, f"{TOO_MANY}; the oldest is closed")
            oldest.cancel()

    def _left(self, task: _Task) -> None:
        self._tasks.discard(task)
        self._pending.leave(task)

    async def _talk(self, connection: socket.socket, host: str) -> None:
        try:
            link = await self._shake(connection, host)
            if link is not None:
                try:
                    await self._serve(link)
                finally:
                    link.close()
        except Exception as error:
            log_once(
                f"control.{self._purpose}:{type(error).__name__}",
                "a %s connection failed: %r", self._purpose, error,
                logger=logger, exc_info=True,
            )  # fmt: skip

    async def _shake(self, connection: socket.socket, host: str) -> Link | None:
        try:
            return await asyncio.wait_for(self._greet(connection, host), _HANDSHAKE_S)
        except (OSError, asyncio.TimeoutError) as error:
            self._log_refusal(host, str(error) or f"no handshake within {_HANDSHAKE_S:g} s")
            return None

    async def _greet(self, connection: socket.socket, host: str) -> Link | None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._context)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        server = Server(self._identity, self._purpose)
        try:
            if not self._is_local:
                tune(writer)
            while server.peer is None:
                writer.write(server.receive(await some(reader)))
                await writer.drain()
            return Link(reader, writer, server.peer, server.leftover, server.version, self._large, self._known)
        except HandshakeError as error:
            self._log_refusal(host, str(error))
            with contextlib.suppress(OSError):
                writer.write(Server.refusal(error))
                writer.close()
            return None
        except BaseException:
            transport.abort()
            raise

    def _known(self) -> None:
        """Whoever serves the connection of this task has heard what it wants. Raises TransferError where it is full."""
        if len(self._tasks) - len(self._pending) >= MAX_LINKS:
            raise TransferError(f"{MAX_LINKS} peers are connected: more are not served")
        task = asyncio.current_task()
        assert task is not None
        self._pending.leave(task)

    def _log_refusal(self, host: str, reason: str) -> None:
        """Once for each kind: what a newcomer says must not make a new kind, there is room for so many."""
        log_once(
            f"control.refused:{self._purpose}:{kind_of(reason)}",
            "refused a %s connection from %s: %s", self._purpose, host, reason,
            logger=logger,
        )  # fmt: skip
