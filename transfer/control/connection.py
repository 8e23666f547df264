"""Control connections: small messages between two processes, after the mutual handshake.

Between processes of one user and host they are Unix sockets (`transports.unix`) that are named by a port; other hosts
are reached over TCP, which needs a secret, inside TLS where set. An address is (host, port); "" is this host.

Runs on asyncio, in a thread of its own (`LoopThread`): bulk data goes another way. A connection carries frames, each a
length (uint32, little endian) and as many bytes. What cannot be sent is dropped; the protocol repeats itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mooncake_connector.config.schema import Config
from mooncake_connector.config.secret import read_secret
from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.control.handshake import (
    AGAIN_S,
    MAX_FRAME_NBYTES,
    AnotherInstance,
    Client,
    Identity,
    is_here,
    require_secret,
)
from transfer.protocol.messages import MAX_MESSAGE_NBYTES
from transfer.transports.base import TransferError, Unavailable
from transfer.transports.tls import Tls
from transfer.transports.unix import OtherUser, dial, port_name

_MAX_UNSENT_NBYTES = 1 << 20
"""A peer that does not read gets no further frames beyond so many bytes."""
_FRAME_S = 10.0
"""A frame whose first byte has come has ended by then, or its connection is closed."""
_LARGE_NBYTES = 64 << 10
MAX_LARGE = 8
"""Frames of a larger size that a listener, or a connection made here, takes in at the same time."""
_LOST_AFTER_S = 10
"""A connection on which nothing is acknowledged for so long counts as dead."""
_CLOSE_S = 5.0
"""How long what was sent may take to leave a connection that is closed."""
_NOBODY_THERE = (
    "nobody listens there: the instance is gone, or it is another user's or in another container or network namespace; "
    "those are reached with transfer_hosts and secret_file set on both sides"
)
_STOP_S = 60.0
"""The engine's thread takes over what belonged to a loop that has ended: so it is waited for on the busiest machine."""
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
    """One connection whose other side is known. Belongs to its event loop.

    Args:
        peer: the other side's instance.
        version: that both sides speak.
        large: places for large frames that are being taken in, shared with other connections.
        known: called when the peer has said what it wants; until then it may have to go for others.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: bytes,
        leftover: bytes,
        version: int,
        large: asyncio.Semaphore | None = None,
        known: Callable[[], None] = lambda: None,
    ) -> None:
        self.peer, self.version, self.known = peer, version, known
        self._reader, self._writer = reader, writer
        self._leftover = leftover
        self._large = large or asyncio.Semaphore(1)

    @property
    def alive(self) -> bool:
        return not self._writer.is_closing()

    def send(self, frame: bytes) -> None:
        """Send soon, or drop it where the peer does not read or the connection is over."""
        transport = self._writer.transport
        if not transport.is_closing() and transport.get_write_buffer_size() <= _MAX_UNSENT_NBYTES:
            self._writer.write(len(frame).to_bytes(4, "little") + frame)

    async def receive(self, deadline_s: float | None = None, max_nbytes: int = MAX_MESSAGE_NBYTES) -> bytes:
        """The next frame. Raises Unavailable at the deadline, or when the connection ends or carries no frame."""
        try:
            return await asyncio.wait_for(self._frame(max_nbytes), deadline_s)
        except asyncio.TimeoutError:
            raise Unavailable(f"nothing came within {deadline_s} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Unavailable(f"the connection ended: {error}") from None

    def close(self) -> None:
        if self.alive:
            self._writer.close()
            asyncio.get_running_loop().call_later(_CLOSE_S, self._writer.transport.abort)

    async def flush(self, deadline_s: float) -> None:
        """Wait until what was sent has left, for so long at most."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            self.close()  # sends what is buffered first
            await asyncio.wait_for(self._writer.wait_closed(), deadline_s)

    async def _frame(self, max_nbytes: int) -> bytes:
        first = await self._exactly(1)  # between frames a connection may be silent for as long as it likes
        try:
            return await asyncio.wait_for(self._rest(first, max_nbytes), _FRAME_S)
        except asyncio.TimeoutError:
            self._writer.transport.abort()
            raise self._refused(f"a frame has not ended for {_FRAME_S:g} s") from None

    async def _rest(self, first: bytes, max_nbytes: int) -> bytes:
        length = int.from_bytes(first + await self._exactly(3), "little")
        if length > max_nbytes:
            raise self._refused(f"a frame of {length} bytes: at most {max_nbytes} are read")
        if length <= _LARGE_NBYTES:
            return await self._exactly(length)
        async with self._large:
            return await self._exactly(length)

    def _refused(self, reason: str) -> Unavailable:
        log_once(f"control.frame:{kind_of(reason)}", "a peer's connection is closed: %s", reason, logger=logger)
        return Unavailable(reason)

    async def _exactly(self, nbytes: int) -> bytes:
        taken, self._leftover = self._leftover[:nbytes], self._leftover[nbytes:]
        return taken + await self._reader.readexactly(nbytes - len(taken)) if len(taken) < nbytes else taken


async def connect(
    address: tuple[str, int], purpose: str, access: Access, *, deadline_s: float, expected: bytes | None = None
) -> Link:
    """A connection to whoever listens there; `expected` is the instance that must answer, where it is known.

    A loopback address is this host, and TCP only where a secret is set and no process of this user listens there.

    Raises:
        Gone: nobody listens there, or another instance.
        Unavailable: everything else that stands in the way, within `deadline_s`.
    """
    try:
        client = partial(Client, access.identity, purpose, expected)
        return await asyncio.wait_for(_connect(address, client, access), deadline_s)
    except (ConnectionRefusedError, AnotherInstance) as error:
        raise Gone(_failure(error, address)) from error
    except asyncio.TimeoutError:
        raise Unavailable(_failure(f"no answer within {deadline_s:.1f} s", address)) from None
    except (OSError, TransferError) as error:
        raise Unavailable(_failure(error, address)) from error


def _failure(reason: object, address: tuple[str, int]) -> str:
    """Begins with what does not depend on the address, which may come from anybody (`log.kind_of`)."""
    return f"{getattr(reason, 'strerror', None) or reason} (at {address[0]!r}, port {address[1]})"


async def _connect(address: tuple[str, int], client: Callable[[], Client], access: Access) -> Link:
    """As `insist`, for an event loop; whoever calls has the deadline."""
    for pause_s in AGAIN_S:
        try:
            return await _shake(client(), *await _open(address, access))
        except ConnectionRefusedError:
            raise
        except ConnectionError:
            await asyncio.sleep(pause_s)
    return await _shake(client(), *await _open(address, access))


async def _open(address: tuple[str, int], access: Access) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address
    if is_here(host):
        try:
            return await asyncio.open_unix_connection(sock=await dial(port_name(port)))
        except (ConnectionRefusedError, OtherUser) as error:
            if not host or not access.identity.secret:
                raise error if isinstance(error, OtherUser) else ConnectionRefusedError(_NOBODY_THERE) from None
    require_secret(host, access.identity)
    context = None if access.tls is None else access.tls.context(server=False)
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    tune(writer)
    return reader, writer


async def _shake(client: Client, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Link:
    try:
        writer.write(client.start())
        while client.peer is None:
            writer.write(client.receive(await some(reader)))
        return Link(reader, writer, client.peer, client.leftover, client.version)
    except BaseException:
        writer.transport.abort()
        raise


async def some(reader: asyncio.StreamReader) -> bytes:
    """What has come of a handshake. Raises ConnectionResetError at the end."""
    data = await reader.read(MAX_FRAME_NBYTES)
    if not data:
        raise ConnectionResetError("closed by the peer during the handshake")
    return data


def tune(writer: asyncio.StreamWriter) -> None:
    """Notice a peer over TCP that is gone without a word."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_AFTER_S * 1000)
