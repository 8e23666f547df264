"""Peers of the same host and user, over Unix sockets (`unix`) whose random names the control plane tells."""

from __future__ import annotations

import secrets
import socket
import time
from array import array
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from transfer.control.handshake import insist
from transfer.transports.base import INSTANCE_NBYTES, Capabilities, Unavailable
from transfer.transports.channel import Channel
from transfer.transports.sockets import SocketTransport
from transfer.transports.stream import Stream
from transfer.transports.unix import check_user, listen_at, reach
from transfer.transports.wire import ANSWER_NBYTES, CopyStatus, WireError, decode_answer

_BACKLOG = 64


class LocalEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a process of this host listens."""

    boot: Annotated[str, Meta(max_length=64)]
    name: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
    instance: Annotated[bytes, Meta(min_length=INSTANCE_NBYTES, max_length=INSTANCE_NBYTES)]

    @property
    def address(self) -> bytes:
        return b"\0mooncake-connector/" + self.name.encode()


_decoder = msgspec.msgpack.Decoder(LocalEndpoint)
"""Made once, when this is imported: msgspec crashes where two threads use a type for the first time at once."""


def decode_endpoint(data: bytes) -> LocalEndpoint:
    """Raises Unavailable for bytes that are no endpoint."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unavailable(f"endpoint that cannot be read: {str(error)[:200]}") from None


class LocalTransport(SocketTransport):
    """What transports over Unix sockets share: listening and connecting."""

    capabilities = Capabilities()

    def _open(self) -> tuple[list[socket.socket], bytes]:
        endpoint = LocalEndpoint(boot_id(), secrets.token_hex(16), self.identity.instance)
        return [listen_at(endpoint.address, _BACKLOG)], msgspec.msgpack.encode(endpoint)

    def _reach(self, endpoint: bytes, deadline_at: float) -> list[Stream]:
        there = decode_endpoint(endpoint)
        if there.boot != boot_id():
            raise Unavailable("the peer is on another host")
        try:
            channel = insist(partial(self._dial, there, deadline_at), deadline_at)
        except ConnectionRefusedError:
            raise Unavailable("nobody listens there: the peer is gone, or in another network namespace") from None
        return [Stream(channel, self.name)]

    def _dial(self, there: LocalEndpoint, deadline_at: float) -> Channel:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(0.001, deadline_at - time.monotonic()))
            reach(connection, there.address, deadline_at)
            channel = Channel(connection)
            self._shake(channel, there.instance, deadline_at)
            return channel
        except BaseException:
            connection.close()
            raise

    def _admit(self, accepted: socket.socket) -> Channel:
        check_user(accepted)
        return Channel(accepted)


def boot_id() -> str:
    """Names this host until its next boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:64]
    except OSError:
        return socket.gethostname()[:64]


def probe(channel: Channel, order: array[int], deadline_at: float, what: str) -> CopyStatus:
    """Send a probe, which asks the receiver to read `what`, and wait for its answer. Raises Unavailable, OSError."""
    channel.settimeout(max(0.001, deadline_at - time.monotonic()))
    channel.sendall(order)
    return take_answer(channel, deadline_at, what)[1]


def take_answer(channel: Channel, deadline_at: float, what: str) -> tuple[int, CopyStatus]:
    """Wait for the receiver's next answer: to which order, and its status. Raises Unavailable, OSError."""
    data = take(channel, ANSWER_NBYTES, deadline_at, what)
    try:
        return decode_answer(data)
    except WireError as error:
        raise Unavailable(str(error)) from error


def take(channel: Channel, nbytes: int, deadline_at: float, what: str) -> bytes:
    """Wait for so many bytes of the receiver's. Raises Unavailable, OSError."""
    data = b""
    while len(data) < nbytes:
        channel.settimeout(max(0.001, deadline_at - time.monotonic()))
        more = channel.recv(nbytes - len(data))
        if not more:
            raise Unavailable(f"the peer closed the connection when asked to read {what}")
        data += more
    return data
