"""Peers of any host, over TCP connections between the addresses that both sides are configured with.

Several streams, over several local addresses (NICs) where both sides have them. Slices go to whichever stream takes
bytes, so a faster path carries more; when a path dies, what it had not delivered goes over the others.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from transfer.control.handshake import Identity, insist, is_loopback, require_secret
from transfer.transports.base import INSTANCE_NBYTES, Capabilities, TransferError, TransportOptions, Unavailable
from transfer.transports.channel import Channel
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.memory import Memory
from transfer.transports.sockets import SocketTransport
from transfer.transports.stream import Stream
from transfer.transports.tls import Tls, hold_tls, release_tls, start_tls, take_ends_of_tls

FURTHER_PATH_S = 2.0
"""How long a path is tried where another is connected already: one that swallows everything must not hold that up."""
_BACKLOG = 128
_LOOPBACK_BUFFER_NBYTES = 512 << 10
_UNSENT_NBYTES = 1 << 20
"""What waits in the kernel for a network: more would be bound to a path that others may overtake."""
_TCP_NOTSENT_LOWAT = 25
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Host = Annotated[str, Meta(min_length=2, max_length=64)]


class NetworkEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a process listens: one literal address for each network."""

    addresses: Annotated[list[tuple[_Host, _Port]], Meta(min_length=1, max_length=64)]
    instance: Annotated[bytes, Meta(min_length=INSTANCE_NBYTES, max_length=INSTANCE_NBYTES)]


_decoder = msgspec.msgpack.Decoder(NetworkEndpoint)


def decode_endpoint(data: bytes) -> NetworkEndpoint:
    """Raises Unavailable for bytes that are no endpoint."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unavailable(f"endpoint that cannot be read: {str(error)[:200]}") from None


class NetworkTransport(SocketTransport):
    """See the module.

    Args:
        hosts: literal addresses to listen on and to connect from, one for each network. Anything but loopback needs a
            secret. A peer's addresses are paired with these in order.
        streams: connections over each pair of addresses; by default one over loopback, two over a network.
        tls: certificates for encrypted streams; both sides need them, or neither.
        lost_after_s: a path on which nothing is acknowledged for this long counts as dead.
        place: the device that has the memory; None for memory of the host.
    """

    capabilities = Capabilities(other_host=True)
    takes_one_path: ClassVar[bool] = False
    """Whether one connection is enough, over the first pair of addresses that works."""

    def __init__(
        self,
        memory: Memory,
        identity: Identity | None = None,
        *,
        hosts: Sequence[str] = ("127.0.0.1",),
        streams: int | None = None,
        tls: Tls | None = None,
        lost_after_s: float = 5.0,
        place: OnDevice | None = None,
    ) -> None:
        super().__init__(memory, identity, place)
        if not hosts or (streams is not None and streams < 1):
            raise ValueError(f"{len(hosts)} hosts, {streams} streams: expected at least one of each")
        for host in hosts:
            require_secret(host, self.identity, on_loopback=False)
            if ip_address(host).is_unspecified:
                raise ValueError(f"host {host}: name the addresses that peers reach, they are told them")
        self._hosts, self._num_streams, self._lost_after_s = tuple(hosts), streams, lost_after_s
        self._tls: Tls | None = None
        if tls is not None:
            tls.context(server=True)  # what is wrong with its files is said here
            self._tls = tls.absolute()
            hold_tls(self)

    @classmethod
    def make(cls, memory: Memory, options: TransportOptions) -> NetworkTransport:
        return cls(memory, options.identity, hosts=options.hosts, tls=options.tls, place=options.place)

    def close(self) -> None:
        super().close()
        if self._tls is not None:
            release_tls(self)

    def take_counts(self) -> Mapping[str, Mapping[str, int]]:
        ends = take_ends_of_tls() if self._tls is not None else {}
        return {"tls_process_ends": ends} if ends else {}

    def _open(self) -> tuple[list[socket.socket], bytes]:
        if self._tls is not None:
            start_tls()
        listeners: list[socket.socket] = []
        try:
            listeners += map(_listener, self._hosts)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        addresses = [listener.getsockname()[:2] for listener in listeners]
        return listeners, msgspec.msgpack.encode(NetworkEndpoint(addresses, self.identity.instance))

    def _reach(self, endpoint: bytes, deadline_at: float) -> list[Stream]:
        there = decode_endpoint(endpoint)
        streams: list[Stream] = []
        failures: list[str] = []
        paths = self._paths(there.addresses)
        for tried, (source, target) in enumerate(paths):
            if streams and self.takes_one_path:
                break
            left = max(0.0, deadline_at - time.monotonic())
            share = left / (len(paths) - tried)
            until = time.monotonic() + (min(share, FURTHER_PATH_S) if streams else share)
            try:
                require_secret(target[0], self.identity, on_loopback=False)
                for number in range(self._num_streams or (1 if is_loopback(target[0]) else 2)):
                    channel = insist(partial(self._dial, source, target, there.instance, until), until)
                    streams.append(Stream(channel, f"{source}->{target[0]}#{number}"))
            except (OSError, TransferError) as error:
                failures.append(f"{target[0]}:{target[1]}: {error}")
        if not streams:
            raise Unavailable("; ".join(failures)[:1000])
        return streams

    def _paths(self, addresses: list[tuple[str, int]]) -> list[tuple[str, tuple[str, int]]]:
        """Own and peer's address of each path; the shorter list is gone through again."""
        count = max(len(self._hosts), len(addresses))
        hosts, n = self._hosts, len(addresses)
        return [(hosts[i % len(hosts)], addresses[i % n]) for i in range(count)]

    def _dial(self, source: str, target: tuple[str, int], instance: bytes, deadline_at: float) -> Channel:
        left = max(0.001, deadline_at - time.monotonic())
        connection = socket.create_connection(target, timeout=left, source_address=(source, 0))
        channel = Channel(connection)
        try:
            self._tune(connection)
            if is_loopback(target[0]):  # more would fall out of the processor's cache before it is received
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_BUFFER_NBYTES)
            else:
                # With TLS about half of it waits before it is encrypted.
                unsent_nbytes = _UNSENT_NBYTES if self._tls is None else _UNSENT_NBYTES // 2
                connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, unsent_nbytes)
            if self._tls is not None:
                channel = self._tls.secure(connection, server=False)
            self._shake(channel, instance, deadline_at)
            return channel
        except Exception as error:
            known = channel.why(error)
            channel.close()
            raise known from None

    def _admit(self, accepted: socket.socket) -> Channel:
        self._tune(accepted)
        return Channel(accepted) if self._tls is None else self._tls.secure(accepted, server=True)

    def _tune(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(self._lost_after_s)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._lost_after_s * 1000))


def _listener(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
