"""Control connections: small messages between two processes over TCP, after the mutual handshake, inside TLS where set.

Runs on asyncio, in a thread of its own (`LoopThread`): bulk data goes another way. A connection carries frames, each a
length (uint32, little endian) and as many bytes. What cannot be sent is dropped; the protocol repeats itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import secrets
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from mooncake_connector.config import Config
from mooncake_connector.log import get_logger, kind_of, log_once
from mooncake_connector.secret import read_secret
from transfer.base import TransferError, Unavailable
from transfer.handshake import (
    MAX_FRAME_NBYTES,
    SESSION_NBYTES,
    AnotherInstance,
    Client,
    HandshakeError,
    Identity,
    Server,
    Terms,
    require_secret,
)
from transfer.messages import MAX_MESSAGE_NBYTES
from transfer.tls import Tls

_STRANGER_S = 5.0
"""A connection without a handshake is closed after so long."""
_MAX_STRANGERS = 64
_BACKLOG = 128
_ACCEPT_AGAIN_S = 0.05
_MAX_UNSENT_NBYTES = 16 << 20
"""A peer that does not read gets no further frames beyond so many bytes."""
_LOST_AFTER_S = 10
"""A connection on which nothing is acknowledged for so long counts as dead."""
_STOP_S = 5.0
_CANCEL_S = 0.1
"""A task that has not ended for so long is cancelled again."""

logger = get_logger(__name__)
_Result = TypeVar("_Result")


class Gone(Unavailable):
    """The process that was there has ended: nobody listens at its address any more, or another process does."""


@dataclass(frozen=True, slots=True)
class Access:
    """What opens a control connection to a peer, and what a peer must have to be let in."""

    identity: Identity
    tls: Tls | None = None

    @classmethod
    def configured(cls, config: Config, compatibility: bytes = b"") -> Access:
        """With the deployment's secret and certificates. Raises ConfigError for a secret that cannot be used."""
        secret = b"" if config.secret_file is None else read_secret(config.secret_file)
        tls = None
        if config.tls_certificate and config.tls_key and config.tls_authority:
            tls = Tls(str(config.tls_certificate), str(config.tls_key), str(config.tls_authority))
        return cls(Identity(secret, compatibility), tls)


class LoopThread:
    """An event loop in a daemon thread; the only thread that may touch what belongs to it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, call: Callable[..., object], *args: object) -> None:
        """Have `call` made soon, in order; dropped once the loop is closed. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(call, *args)

    def run(self, work: Coroutine[Any, Any, _Result], deadline_s: float) -> _Result:
        """The result of `work`. Raises what it raises, TransferError at the deadline. Not from the loop's thread."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(deadline_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TransferError(f"the control plane did not answer within {deadline_s:g} s") from None

    def close(self) -> None:
        """Cancel all tasks and end the thread. May be called twice."""
        self.post(self.loop.stop)
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        self.loop.run_forever()
        # More than once: a task may lose a cancellation (`wait_for` does, before Python 3.12, where it comes with the
        # result), and others begin meanwhile.
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_S))
        self.loop.run_until_complete(asyncio.sleep(0))  # connections that were closed last let go of their sockets
        self.loop.close()


class Link:
    """One connection whose other side is known. Belongs to its event loop."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, terms: Terms, leftover: bytes
    ) -> None:
        self.terms = terms
        self._reader, self._writer = reader, writer
        self._leftover = leftover

    @property
    def alive(self) -> bool:
        return not self._writer.is_closing()

    def send(self, frame: bytes) -> None:
        """Send soon, or drop it where the peer does not read or the connection is over."""
        transport = self._writer.transport
        if not transport.is_closing() and transport.get_write_buffer_size() <= _MAX_UNSENT_NBYTES:
            self._writer.write(len(frame).to_bytes(4, "little") + frame)

    async def receive(self, deadline_s: float | None = None) -> bytes:
        """The next frame. Raises Unavailable at the deadline, or when the connection ends or carries no frame."""
        try:
            return await asyncio.wait_for(self._frame(), deadline_s)
        except asyncio.TimeoutError:
            raise Unavailable(f"nothing came within {deadline_s} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Unavailable(f"the connection ended: {error}") from None

    def close(self) -> None:
        self._writer.close()

    async def flush(self, deadline_s: float) -> None:
        """Wait until what was sent has left, for so long at most."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            self._writer.close()  # sends what is buffered first
            await asyncio.wait_for(self._writer.wait_closed(), deadline_s)

    async def _frame(self) -> bytes:
        length = int.from_bytes(await self._exactly(4), "little")
        if length > MAX_MESSAGE_NBYTES:
            reason = f"a frame of {length} bytes: at most {MAX_MESSAGE_NBYTES} are read"
            log_once("control.frame", "a peer's connection is closed: %s", reason, logger=logger)
            raise Unavailable(reason)
        return await self._exactly(length)

    async def _exactly(self, nbytes: int) -> bytes:
        taken, self._leftover = self._leftover[:nbytes], self._leftover[nbytes:]
        return taken + await self._reader.readexactly(nbytes - len(taken)) if len(taken) < nbytes else taken


async def connect(
    address: tuple[str, int], purpose: str, access: Access, *, deadline_s: float, expected: bytes | None = None
) -> Link:
    """A connection to whoever listens there; `expected` is the instance that must answer, where it is known.

    Raises:
        Gone: nobody listens there, or another instance.
        Unavailable: everything else that stands in the way, within `deadline_s`.
    """
    host, port = address
    try:
        require_secret(host, access.identity)
        client = Client(access.identity, purpose, secrets.token_bytes(SESSION_NBYTES), expected)
        context = None if access.tls is None else access.tls.context(server=False)
        return await asyncio.wait_for(_open(host, port, client, context), deadline_s)
    except (ConnectionRefusedError, AnotherInstance) as error:
        raise Gone(_failure(error, address)) from error
    except asyncio.TimeoutError:
        raise Unavailable(_failure(f"no answer within {deadline_s:.1f} s", address)) from None
    except (OSError, TransferError) as error:
        raise Unavailable(_failure(error, address)) from error


def _failure(reason: object, address: tuple[str, int]) -> str:
    """Begins with what does not depend on the address, which may come from anybody (`log.kind_of`)."""
    return f"{getattr(reason, 'strerror', None) or reason} (at {address[0]!r}, port {address[1]})"


async def _open(host: str, port: int, client: Client, context: ssl.SSLContext | None) -> Link:
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        _tune(writer)
        writer.write(client.start())
        while client.terms is None:
            writer.write(client.receive(await _some(reader)))
        return Link(reader, writer, client.terms, client.leftover)
    except BaseException:
        writer.close()
        raise


async def listen(
    address: tuple[str, int], purpose: str, access: Access, serve: Callable[[Link], Awaitable[None]]
) -> Listener:
    """Accept connections from now on; `serve` runs for each one after its handshake, which is closed when it returns.

    Raises:
        TransferError: the address needs a secret, or cannot be listened at.
    """
    host, port = address
    require_secret(host, access.identity)
    context = None if access.tls is None else access.tls.context(server=True)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server(address, family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise TransferError(f"cannot listen at {host}, port {port}: {error}") from error
    return Listener(listening, purpose, access.identity, context, serve)


class Listener:
    """See `listen`. Connections count as strangers from the start, before TLS has begun."""

    def __init__(
        self,
        listening: socket.socket,
        purpose: str,
        identity: Identity,
        context: ssl.SSLContext | None,
        serve: Callable[[Link], Awaitable[None]],
    ) -> None:
        self.port: int = listening.getsockname()[1]
        self._purpose, self._identity, self._context, self._serve = purpose, identity, context, serve
        self._strangers = 0
        self._tasks: set[asyncio.Task[None]] = set()
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
                if self._strangers >= _MAX_STRANGERS:
                    connection.close()
                    reason = f"too many connections, {_MAX_STRANGERS}, have not finished their handshake"
                    self._log_refusal(address[0], reason)
                    continue
                self._strangers += 1
                task = loop.create_task(self._talk(connection, address[0]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

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
            return await asyncio.wait_for(self._greet(connection, host), _STRANGER_S)
        except (OSError, asyncio.TimeoutError) as error:
            self._log_refusal(host, str(error) or f"no handshake within {_STRANGER_S:g} s")
            return None
        finally:
            self._strangers -= 1

    async def _greet(self, connection: socket.socket, host: str) -> Link | None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._context)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        server = Server(self._identity, self._purpose)
        try:
            _tune(writer)
            while server.terms is None:
                writer.write(server.receive(await _some(reader)))
                await writer.drain()
            return Link(reader, writer, server.terms, server.leftover)
        except HandshakeError as error:
            self._log_refusal(host, str(error))
            writer.write(Server.refusal(error))
            writer.close()
            return None
        except BaseException:
            writer.close()
            raise

    def _log_refusal(self, host: str, reason: str) -> None:
        """Once for each kind: what a stranger says must not make a new kind, there is room for so many."""
        log_once(
            f"control.refused:{self._purpose}:{kind_of(reason)}",
            "refused a %s connection from %s: %s", self._purpose, host, reason,
            logger=logger,
        )  # fmt: skip


async def _some(reader: asyncio.StreamReader) -> bytes:
    data = await reader.read(MAX_FRAME_NBYTES)
    if not data:
        raise ConnectionResetError("closed by the peer during the handshake")
    return data


def _tune(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_AFTER_S * 1000)
