"""What the transports share that listen on sockets: one receiver, many peers, and how both are closed.

`LocalTransport` and `NetworkTransport` say how peers find each other; what is said then is each transport's own.
"""

from __future__ import annotations

import socket
import threading
from abc import abstractmethod

from transfer.control.handshake import Identity, Server, Terms
from transfer.transports.base import TransferError, Transport, TransportOptions, Unavailable
from transfer.transports.incoming import Connection
from transfer.transports.memory import Memory
from transfer.transports.receiver import Receiver
from transfer.transports.sender import SendingPeer
from transfer.transports.stream import PayloadEncoder, Stream
from transfer.transports.tls import TlsSocket


class SocketTransport(Transport):
    """See the module."""

    def __init__(self, memory: Memory, identity: Identity | None = None) -> None:
        super().__init__(memory)
        self.identity = identity or Identity()
        self._lock = threading.Lock()
        self._receiver: Receiver | None = None
        self._endpoint = b""
        self._peers: set[SendingPeer] = set()
        self._closed = False

    @classmethod
    def make(cls, memory: Memory, options: TransportOptions) -> SocketTransport:
        return cls(memory, options.identity)

    @abstractmethod
    def _open(self) -> tuple[list[socket.socket], bytes]:
        """Listening sockets, and the endpoint that names them. Raises OSError."""

    @abstractmethod
    def _accept(self, connection: socket.socket, server: Server) -> Connection:
        """The receiving side of an accepted socket. Raises TransferError to refuse it."""

    @abstractmethod
    def _connection(self, connection: socket.socket | TlsSocket, server: Server) -> Connection:
        """The same, of a socket that is ready to be read."""

    @abstractmethod
    def _prepare(self, connection: socket.socket | TlsSocket, deadline_at: float) -> PayloadEncoder:
        """What the sending side needs after the handshake. Raises Unavailable or OSError."""

    def listen(self) -> bytes:
        with self._lock:
            if self._closed:
                raise TransferError("it is closed")
            if self._receiver is None:
                listeners, self._endpoint = self._open()
                self._receiver = Receiver(self.name, listeners, self.identity, self._accept)
            return self._endpoint

    def close(self) -> None:
        with self._lock:
            peers, receiver = list(self._peers), self._receiver
            self._receiver = None
            self._closed = True
        for peer in peers:
            peer.close()
        if receiver is not None:
            receiver.close()
        if self.capabilities.needs_registration:
            self.memory.unfollow(self)

    def _peer(self, terms: Terms, streams: list[Stream], encoder: PayloadEncoder) -> SendingPeer:
        """A peer over these streams, which is closed with this transport.

        Raises Unavailable where that is closed, or where this process has no descriptors or threads left.
        """
        try:
            peer = SendingPeer(self.name, terms, self.memory, streams, encoder, self._forget)
        except (OSError, RuntimeError) as error:
            for stream in streams:
                stream.connection.close()
            encoder.close()
            raise Unavailable(f"no connection can be kept: {error}") from error
        with self._lock:
            self._peers.add(peer)
            closed = self._closed
        if not peer.alive:  # it may have been forgotten before it was known
            self._forget(peer)
        if closed:
            peer.close()
            raise Unavailable("this side was closed meanwhile")
        return peer

    def _forget(self, peer: SendingPeer) -> None:
        with self._lock:
            self._peers.discard(peer)
