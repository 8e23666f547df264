"""What the transports share that listen on sockets: how they listen, connect, and are closed.

`LocalTransport` and `NetworkTransport` say how peers find each other; what is said then is each transport's own.
"""

from __future__ import annotations

import socket
import threading
import time
from abc import abstractmethod
from typing import ClassVar
from weakref import WeakSet

from transfer.control.handshake import Client, Identity, Server, shake
from transfer.transports.base import Numbers, Peer, TransferError, Transport, TransportOptions, Unavailable
from transfer.transports.channel import Channel
from transfer.transports.cuda.driver import CudaError
from transfer.transports.cuda.stage import OnDevice, Stages
from transfer.transports.cuda.staged import StagedPeer
from transfer.transports.incoming import Connection
from transfer.transports.memory import Memory
from transfer.transports.receiver import Receiver
from transfer.transports.sender import SendingPeer
from transfer.transports.stream import PayloadEncoder, Stream


class SocketTransport(Transport):
    """See the module."""

    fills_stages: ClassVar[bool] = False
    """Whether what it fetches with has to be told of the stages of a device's memory, which it fetches into."""

    def __init__(self, memory: Memory, identity: Identity | None = None, place: OnDevice | None = None) -> None:
        super().__init__(memory)
        self.place = place
        self.stages = None if place is None else Stages(place, filled_by=self if self.fills_stages else None)
        """For what is received."""
        self._sending = None if place is None else Stages(place, memory)
        self.identity = identity or Identity()
        self._lock = threading.Lock()
        self._receiver: Receiver | None = None
        self._endpoint = b""
        self._peers: set[SendingPeer] = set()
        self._staged: WeakSet[StagedPeer] = WeakSet()
        self._closed = False

    @classmethod
    def make(cls, memory: Memory, options: TransportOptions) -> SocketTransport:
        return cls(memory, options.identity, options.place)

    @abstractmethod
    def _open(self) -> tuple[list[socket.socket], bytes]:
        """Listening sockets, and the endpoint that names them. Raises OSError."""

    @abstractmethod
    def _admit(self, accepted: socket.socket) -> Channel:
        """An accepted socket, made ready. Raises TransferError to refuse it."""

    @abstractmethod
    def _reach(self, endpoint: bytes, deadline_at: float) -> list[Stream]:
        """One or more streams to who listens there, past their handshakes. Raises Unavailable or OSError."""

    @abstractmethod
    def _connection(self, channel: Channel, server: Server) -> Connection:
        """The receiving side of one that was admitted."""

    @abstractmethod
    def _prepare(self, channel: Channel, deadline_at: float) -> PayloadEncoder:
        """What the sending side needs after the handshake. Raises Unavailable or OSError."""

    def listen(self) -> bytes:
        with self._lock:
            if self._closed:
                raise TransferError("it is closed")
            if self._receiver is None:
                listeners, self._endpoint = self._open()
                try:
                    self._receiver = Receiver(self.name, listeners, self._accept)
                except (OSError, RuntimeError) as error:
                    for listener in listeners:
                        listener.close()
                    raise TransferError(f"cannot listen: {error}") from error
            return self._endpoint

    def close(self) -> None:
        with self._lock:
            peers, receiver = [*self._staged, *self._peers], self._receiver
            self._receiver = None
            self._closed = True
        for peer in peers:
            peer.close()
        if receiver is not None:
            receiver.close()
        for stages in (self.stages, self._sending):
            if stages is not None:
                stages.close()
        if self.capabilities.needs_registration:
            self.memory.unfollow(self)

    def connect(self, endpoint: bytes, *, deadline_s: float) -> Peer:
        peer = self._connect(endpoint, deadline_s)
        if self._sending is None:
            return peer
        try:
            staged = StagedPeer(peer, self.memory, self._sending, self.is_direct)
        except (CudaError, RuntimeError) as error:
            peer.close()
            raise Unavailable(f"no page-locked memory to send from, or no thread: {error}") from error
        with self._lock:
            self._staged.add(staged)
            closed = self._closed
        if closed:
            staged.close()
            raise Unavailable("this side was closed meanwhile")
        return staged

    def is_direct(self, addresses: Numbers, nbytes: Numbers) -> bool:
        """Whether these pieces of a device are sent from where they are; all others go through stages."""
        return False

    def _connect(self, endpoint: bytes, deadline_s: float) -> SendingPeer:
        deadline_at = time.monotonic() + deadline_s
        streams: list[Stream] = []
        encoder: PayloadEncoder | None = None
        try:
            streams = self._reach(endpoint, deadline_at)
            encoder = self._prepare(streams[0].channel, deadline_at)
            for stream in streams:
                stream.channel.hurry()
            peer = SendingPeer(self.name, self.memory, streams, encoder, self._forget)
        except BaseException as error:
            for stream in streams:
                stream.channel.close()
            if encoder is not None:
                encoder.close()
            if isinstance(error, (OSError, RuntimeError)):  # also where no descriptor or thread is left
                raise Unavailable(f"cannot connect: {error}") from error
            raise
        with self._lock:
            self._peers.add(peer)
            closed = self._closed
        if not peer.alive:  # it may have been forgotten before it was known
            peer.close()
            self._forget(peer)
        if closed:
            peer.close()
            raise Unavailable("this side was closed meanwhile")
        return peer

    def _accept(self, accepted: socket.socket) -> Connection:
        return self._connection(self._admit(accepted), Server(self.identity, self.name))

    def _shake(self, channel: Channel, instance: bytes, deadline_at: float) -> None:
        """Raises Unavailable, OSError; see `handshake.insist`."""
        client = Client(self.identity, self.name, instance)
        shake(channel, client, deadline_at)
        channel.version = client.version

    def _forget(self, peer: SendingPeer) -> None:
        with self._lock:
            self._peers.discard(peer)
