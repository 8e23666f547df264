"""What the conformance tests of a transport start from: a sender, a receiver in this process, and one in another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from transfer.control.handshake import Identity
from transfer.testing.memory import Buffer, buffer_class, int64
from transfer.testing.process import Process, make_transport
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Grant, Int64, Outcome, Peer, Transport
from transfer.transports.memory import Memory

DEADLINE_S = 120.0


class TransportFixtures:
    """Of the transport that a test class names."""

    transport: ClassVar[type[Transport]]

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """For `make_transport`; JSON."""
        return {}

    @pytest.fixture(autouse=True)
    def _use(self, options: dict[str, Any]) -> None:
        self._options = options

    def make(self, memory: Memory, secret: bytes = b"") -> Transport:
        return make_transport(self.transport, memory, Identity(secret), self._options)

    def buffer(self, nbytes: int, seed: int | None = None) -> Buffer:
        """Memory to send from or to write to: of the transport's own kind, where it names one."""
        return buffer_class(self.transport)(nbytes, seed)

    @pytest.fixture
    def memory(self) -> Memory:
        """Of the sender."""
        return Memory()

    @pytest.fixture
    def sender(self, memory: Memory) -> Iterator[Transport]:
        with self.make(memory) as made:
            yield made

    @pytest.fixture
    def there(self) -> Memory:
        """Memory of the receiver."""
        return Memory()

    @pytest.fixture
    def receiver(self, there: Memory) -> Iterator[Transport]:
        """In this process."""
        with self.make(there) as made:
            yield made

    @pytest.fixture
    def peer(self, sender: Transport, receiver: Transport) -> Peer:
        return sender.connect(receiver.listen(), deadline_s=DEADLINE_S)

    @pytest.fixture
    def other(self) -> Iterator[Process]:
        """A receiver in another process."""
        process = Process(self.transport, self._options)
        yield process
        process.kill()

    def between(
        self, memory: Memory, there: Memory, nbytes: int, seed: int | None = None
    ) -> tuple[Buffer, Buffer, Grant]:
        """A source and a target of this size, both registered, and a grant of all of the target."""
        source, target = self.buffer(nbytes, seed), self.buffer(nbytes)
        memory.register(source.address, nbytes)
        there.register(target.address, nbytes)
        return source, target, there.grant(int64(target.address), int64(nbytes))

    def towards(
        self, other: Process, sender: Transport, nbytes: int, seed: int | None = None
    ) -> tuple[Peer, Buffer, Grant]:
        """A connection to the other process, a registered source of this size, and a grant of as much there."""
        endpoint, grant = other.offer(nbytes)
        peer = sender.connect(endpoint, deadline_s=DEADLINE_S)
        source = self.buffer(nbytes, seed)
        sender.memory.register(source.address, nbytes)
        return peer, source, grant

    def all_of(self, source: Buffer, grant: Grant) -> tuple[Int64, Int64, Int64]:
        """From the beginning of `source` to the whole grant, which is one range."""
        return int64(source.address), grant.addresses, grant.nbytes

    def send(self, peer: Peer, grant: Grant, source: Buffer, nbytes: int) -> None:
        start = int64(source.address)
        outcome = outcome_of(peer.write(grant, start, grant.addresses[:1], int64(nbytes), deadline_s=DEADLINE_S))
        assert outcome == Outcome()
