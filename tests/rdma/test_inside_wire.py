"""Over a cable that loses, delays, repeats or spoils packets everything arrives: real queue pairs and netem."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from rdma.wire import End, Wire

from transfer.control.handshake import Identity
from transfer.testing.fixtures import TransportFixtures
from transfer.testing.memory import MIB
from transfer.testing.process import make_transport
from transfer.transports.base import Peer, Transport
from transfer.transports.memory import Memory
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.transport import RdmaTransport

pytestmark = pytest.mark.inside


@pytest.fixture(scope="module")
def cable() -> Wire:
    return Wire()


@pytest.fixture
def wire(cable: Wire) -> Iterator[Wire]:
    yield cable
    cable.mend()


class TestWire(TransportFixtures):
    """The sender is at the near end. Its card answers, so what it sends is the data."""

    transport = RdmaTransport

    @pytest.fixture
    def sender(self, wire: Wire, memory: Memory) -> Iterator[Transport]:
        with self.at(wire.near, memory) as made:
            yield made

    @pytest.fixture
    def receiver(self, wire: Wire, there: Memory) -> Iterator[Transport]:
        with self.at(wire.far, there) as made:
            yield made

    def at(self, end: End, memory: Memory) -> Transport:
        settings = RdmaSettings(ports=[end.name], lost_after_s=4.0)
        return make_transport(
            RdmaTransport, memory, Identity(b"sixteen bytes or more"), {"hosts": [end.address], "settings": settings}
        )

    @pytest.mark.parametrize("how", ["loss 1%", "loss 1% delay 5ms", "duplicate 5%", "corrupt 1%"])
    def test_all_arrives_over_a_bad_wire(self, wire: Wire, memory: Memory, there: Memory, peer: Peer, how: str) -> None:
        source, target, grant = self.between(memory, there, 4 * MIB, seed=1)
        for end in (wire.near, wire.far):
            wire.harm(end, how)
        self.send(peer, grant, source, 4 * MIB)
        assert np.array_equal(target.bytes, source.bytes)
        assert wire.dropped(wire.near) or "loss" not in how
