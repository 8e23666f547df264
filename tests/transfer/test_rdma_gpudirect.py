"""Memory of a device that cards read and fill by themselves, over stand-ins for the cards and for CUDA's driver.

The processor cannot touch the stand-in's device memory here, and what a card writes to it is not there before a flush.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from long_form import LONG
from simulated.cuda_driver import LIBRARY, DeviceRdma, SealedBuffer, fewer_pieces, fold_on_device
from simulated.gpudirect import num_descriptors
from simulated.verbs import Fabric
from simulated.waiting import wait_for

from mooncake_connector.config.schema import Config
from transfer.testing.conformance import TransportConformance
from transfer.testing.fixtures import DEADLINE_S
from transfer.testing.memory import MIB, Buffer, int64
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Cause, Region
from transfer.transports.cuda import direct
from transfer.transports.cuda.driver import DMA_BUF_SUPPORTED, FLUSH_OPTIONS, WRITES_ORDERING
from transfer.transports.cuda.stage import STAGE_NBYTES
from transfer.transports.memory import Memory
from transfer.transports.rdma.sending import RailEncoder
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.transport import RdmaTransport
from transfer.transports.stream import Slice

NBYTES = 9 * MIB + 5

pytestmark = pytest.mark.usefixtures("stand_ins")


@pytest.fixture
def peer_memory(stand_ins: Fabric) -> None:
    direct.PEER_MEMORY.touch()
    stand_ins.has_peer_memory = True


class DeviceConformance(TransportConformance):
    transport = DeviceRdma

    @pytest.fixture
    def other(self) -> Any:
        pytest.skip("the stand-in's cards reach memory of one process")

    @pytest.mark.long
    def test_more_pieces_than_one_order_takes_arrive(self, memory, there, peer, monkeypatch):  # type: ignore[no-untyped-def]
        if not LONG:
            fewer_pieces(monkeypatch)
        super().test_more_pieces_than_one_order_takes_arrive(memory, there, peer)

    @pytest.mark.slow
    @pytest.mark.long
    def test_a_piece_beyond_4_gib_arrives(self, memory, there, peer, monkeypatch):  # type: ignore[no-untyped-def]
        if not LONG:
            pytest.skip("the plan of its requests is that of memory of the host (`make test-long`)")
        fold_on_device(monkeypatch)
        super().test_a_piece_beyond_4_gib_arrives(memory, there, peer)


class TestDirect(DeviceConformance):
    """All of it by the cards themselves."""

    @pytest.fixture(autouse=True)
    def no_stage(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("gather", "begin_scatter"):
            monkeypatch.setattr(f"transfer.transports.cuda.stage.Stage.{name}", lambda *_: 1 // 0)


class TestByModule(TestDirect):
    """The same, by nvidia_peermem alone."""

    @pytest.fixture(autouse=True)
    def without_dma_buf(self, peer_memory: None) -> None:
        LIBRARY.attributes[DMA_BUF_SUPPORTED] = 0


class TestThroughStages(DeviceConformance):
    """None of it."""

    @pytest.fixture(autouse=True)
    def without(self, stand_ins: Fabric) -> Iterator[None]:
        LIBRARY.attributes[DMA_BUF_SUPPORTED] = 0
        yield
        assert not LIBRARY.dma_bufs and not LIBRARY.calls["cuFlushGPUDirectRDMAWrites"]


class Sides:
    """A sender and a receiver, each with its memory on a device, and what is sent."""

    def __init__(self, **options: Any) -> None:
        self.memory, self.there = Memory(), Memory()
        self.sender, self.receiver = (DeviceRdma(memory, **options) for memory in (self.memory, self.there))
        for memory, transport in ((self.memory, self.sender), (self.there, self.receiver)):
            memory.follow(transport)
        self.source, self.target = SealedBuffer(NBYTES, seed=1), SealedBuffer(NBYTES)

    def register(self) -> None:
        self.memory.register(self.source.address, NBYTES)
        self.there.register(self.target.address, NBYTES)
        self.grant = self.there.grant(int64(self.target.address), int64(NBYTES))

    def connect(self) -> Any:
        return self.sender.connect(self.receiver.listen(), deadline_s=DEADLINE_S)

    def send(self, peer: Any) -> Any:
        whole = int64(self.source.address), self.grant.addresses, self.grant.nbytes
        return outcome_of(peer.write(self.grant, *whole, deadline_s=DEADLINE_S))

    def is_direct(self) -> tuple[bool, bool]:
        """Whether the sender's memory is, and the receiver's."""
        return (
            self.sender.is_direct(int64(self.source.address), int64(NBYTES)),
            self.receiver.is_direct(int64(self.target.address), int64(NBYTES)),
        )

    def close(self) -> None:
        for transport in (self.sender, self.receiver):
            transport.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Sides]]:
    made: list[Sides] = []

    def sides(**options: Any) -> Sides:
        made.append(Sides(**options))
        return made[-1]

    yield sides
    for one in made:
        one.close()


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_a_region_is_registered_with_every_card_for_its_own_bytes_and_once(
    make: Callable[..., Sides], stand_ins: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sides = make()
    exported = len(LIBRARY.dma_bufs), LIBRARY.calls["cuMemGetHandleForAddressRange"]
    middle = Region(sides.source.address + 77, 5000)
    sides.memory.register(middle.address, middle.nbytes)
    assert LIBRARY.calls["cuMemGetHandleForAddressRange"] == exported[1] + 1, "one descriptor for all cards"
    for rail in sides.sender._rails.all:
        made = rail.card._registered[middle]
        assert rail.card._domain.regions[made.rkey][:2] == (middle.address, 5000), "and no more of the page"
        assert num_descriptors() == 0
    said = [line for line in lines(caplog, logging.INFO) if "rdma: goes over" not in line]
    assert said == ["rdma: cards read and fill memory of GPU 0 by themselves (dma-buf, by memory windows)"]
    opened = sides.sender.take_counts()["rail_opened"]
    assert len(opened) == 2 and all(told.endswith("; memory of GPU 0: dma-buf, by memory windows") for told in opened)
    sides.memory.unregister(*sides.memory.regions)
    assert [list(rail.card._registered) for rail in sides.sender._rails.all] == [
        [rail.card.cells.region] for rail in sides.sender._rails.all
    ]


@pytest.mark.parametrize(
    "lacks, says",
    [
        ("everything", "exports no dma-buf (NVIDIA's open kernel modules do, on Linux 5.12 and newer), and nvidia_pee"),
        ("flush", "nobody can say when GPU 0 sees what a card wrote"),
        ("export", "dma-buf: cuMemGetHandleForAddressRange: CUDA_ERROR_STAND_IN"),
        ("card", "dma-buf: card1 takes no dma-buf: [Errno 95] Operation not supported"),
        ("way", "card1 does not reach GPU 0: remote operation error"),
        ("memory", "cuMemAlloc_v2: CUDA_ERROR_STAND_IN"),
        ("allowed", "rdma_gpudirect is off"),
    ],
)
def test_what_is_missing_is_told_once_and_all_goes_through_stages(
    make: Callable[..., Sides], stand_ins: Fabric, caplog: pytest.LogCaptureFixture, lacks: str, says: str
) -> None:
    options = {}
    if lacks == "everything":
        LIBRARY.attributes[DMA_BUF_SUPPORTED] = 0
    elif lacks == "flush":
        LIBRARY.attributes[FLUSH_OPTIONS] = 2
    elif lacks == "export":
        LIBRARY.fail["cuMemGetHandleForAddressRange"] = 0
    elif lacks == "card":
        stand_ins.cards["card1"].takes_dma_buf = False
    elif lacks == "way":
        stand_ins.cards["card1"].reaches_devices = False
    elif lacks == "memory":
        LIBRARY.fail["cuMemAlloc_v2"] = 0
    else:
        options["settings"] = RdmaSettings.configured(Config(rdma_gpudirect="off"))
    sides = make(**options)
    sides.register()
    assert sides.is_direct() == (False, False)
    (line,) = lines(caplog)
    assert line.startswith("rdma: all memory of GPU 0 goes through page-locked stages: ") and says in line
    assert sides.send(sides.connect()).ok
    assert np.array_equal(sides.target.bytes, sides.source.bytes)
    assert not sides.sender.take_counts().get("rail_direct_bytes")
    LIBRARY.fail.clear()


def test_a_device_that_orders_writes_itself_needs_no_flush(make: Callable[..., Sides]) -> None:
    LIBRARY.attributes |= {FLUSH_OPTIONS: 0, WRITES_ORDERING: 100}
    sides = make()
    sides.register()
    assert sides.send(sides.connect()).ok and sides.is_direct() == (True, True)
    assert np.array_equal(sides.target.bytes, sides.source.bytes)
    assert not LIBRARY.calls["cuFlushGPUDirectRDMAWrites"]


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("how", ["export", "card", "host"])
def test_a_region_that_is_refused_goes_through_stages_alone(
    make: Callable[..., Sides], stand_ins: Fabric, caplog: pytest.LogCaptureFixture, how: str, side: str
) -> None:
    sides = make()
    memory, buffer = (sides.memory, sides.source) if side == "source" else (sides.there, sides.target)
    if how == "host":
        LIBRARY.devices[buffer.address] = 1
    elif how == "export":
        LIBRARY.fail["cuMemGetHandleForAddressRange"] = 0
    else:
        stand_ins.cards["card1"].takes_dma_buf = False
    memory.register(buffer.address, NBYTES)
    LIBRARY.fail.clear()
    stand_ins.cards["card1"].takes_dma_buf = True
    more = SealedBuffer(MIB)
    memory.register(more.address, MIB)
    (line,) = lines(caplog)
    says = {"host": "it is not memory of GPU 0", "export": "cuMemGetHandle", "card": "card1 takes no dma-buf"}[how]
    assert f"rdma: {NBYTES} bytes at {buffer.address:#x} of GPU memory go through page-locked stages: " in line
    assert says in line
    other_memory, other = (sides.there, sides.target) if side == "source" else (sides.memory, sides.source)
    other_memory.register(other.address, NBYTES)
    sides.grant = sides.there.grant(int64(sides.target.address), int64(NBYTES))
    assert sides.is_direct() == (side == "target", side == "source")
    peer = sides.connect()
    assert sides.send(peer).ok and np.array_equal(sides.target.bytes, sides.source.bytes)
    direct_bytes = sum(sides.sender.take_counts().get("rail_direct_bytes", {}).values())
    assert direct_bytes == (NBYTES if side == "target" else 0)
    transport = sides.sender if side == "source" else sides.receiver
    assert transport.is_direct(int64(more.address), int64(MIB)), "the next region is not refused for it"
    for registered in memory.regions:
        memory.unregister(registered)


def test_what_no_card_takes_as_a_dma_buf_it_may_take_by_the_module(
    make: Callable[..., Sides], stand_ins: Fabric, peer_memory: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stand_ins.cards["card1"].takes_dma_buf = False
    sides = make()
    sides.register()
    assert sides.is_direct() == (True, True) and "by themselves (nvidia_peermem, by memory windows)" in caplog.text
    assert not lines(caplog)
    assert sides.send(sides.connect()).ok and np.array_equal(sides.target.bytes, sides.source.bytes)


def test_memory_over_which_a_card_binds_no_window_is_read_by_the_keys_of_its_regions(
    make: Callable[..., Sides], stand_ins: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stand_ins.cards["card1"].binds_devices = False
    sides = make()
    sides.register()
    assert sides.is_direct() == (True, True) and "by themselves (dma-buf, no memory windows)" in caplog.text
    assert not lines(caplog)
    assert sides.send(sides.connect()).ok and np.array_equal(sides.target.bytes, sides.source.bytes)


def test_what_cards_take_as_a_dma_buf_and_do_not_reach_they_may_reach_by_the_module(
    make: Callable[..., Sides], stand_ins: Fabric, peer_memory: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stand_ins.cards["card1"].blocked.add(direct.DMA_BUF)
    sides = make()
    sides.register()
    assert sides.is_direct() == (True, True) and "by themselves (nvidia_peermem, by memory windows)" in caplog.text
    assert not lines(caplog)
    assert sides.send(sides.connect()).ok and np.array_equal(sides.target.bytes, sides.source.bytes)


def test_no_region_is_taken_by_a_way_that_was_not_tried(
    make: Callable[..., Sides], stand_ins: Fabric, peer_memory: None, caplog: pytest.LogCaptureFixture
) -> None:
    """All that is sent from there would fail."""
    stand_ins.cards["card1"].blocked.add(direct.BY_MODULE)
    sides = make()
    LIBRARY.fail["cuMemGetHandleForAddressRange"] = 0
    sides.memory.register(sides.source.address, NBYTES)
    LIBRARY.fail.clear()
    sides.there.register(sides.target.address, NBYTES)
    sides.grant = sides.there.grant(int64(sides.target.address), int64(NBYTES))
    assert sides.is_direct() == (False, True)
    (line,) = lines(caplog)
    assert "of GPU memory go through page-locked stages: dma-buf: cuMemGetHandleForAddressRange" in line
    assert sides.send(sides.connect()).ok and np.array_equal(sides.target.bytes, sides.source.bytes)


def test_pieces_of_which_one_is_not_direct_go_through_stages_together(make: Callable[..., Sides]) -> None:
    sides = make()
    sides.register()
    refused = SealedBuffer(MIB, seed=2)
    LIBRARY.devices[refused.address] = 1
    sides.memory.register(refused.address, MIB)
    local = int64(sides.source.address, refused.address)
    remote, sizes = int64(sides.target.address, sides.target.address + MIB), int64(MIB, MIB)
    assert outcome_of(sides.connect().write(sides.grant, local, remote, sizes, deadline_s=DEADLINE_S)).ok
    expected = np.concatenate((sides.source.bytes[:MIB], refused.bytes))
    assert np.array_equal(sides.target.bytes[: 2 * MIB], expected)


def test_a_host_sends_to_a_device_and_a_device_to_a_host(make: Callable[..., Sides]) -> None:
    sides, host, buffer = make(), Memory(), Buffer(NBYTES)
    sides.register()
    with RdmaTransport(host) as transport:
        host.follow(transport)
        host.register(buffer.address, NBYTES)
        grant = host.grant(int64(buffer.address), int64(NBYTES))
        peer = sides.sender.connect(transport.listen(), deadline_s=DEADLINE_S)
        whole = int64(sides.source.address), grant.addresses, grant.nbytes
        assert outcome_of(peer.write(grant, *whole, deadline_s=DEADLINE_S)).ok
        assert np.array_equal(buffer.bytes, sides.source.bytes)
        peer = transport.connect(sides.receiver.listen(), deadline_s=DEADLINE_S)
        whole = int64(buffer.address), sides.grant.addresses, sides.grant.nbytes
        assert outcome_of(peer.write(sides.grant, *whole, deadline_s=DEADLINE_S)).ok
        assert np.array_equal(sides.target.bytes, sides.source.bytes)


def test_a_device_that_does_not_take_what_was_written_is_an_outcome(
    make: Callable[..., Sides], caplog: pytest.LogCaptureFixture
) -> None:
    sides = make()
    sides.register()
    peer = sides.connect()
    LIBRARY.fail["cuFlushGPUDirectRDMAWrites"] = 0
    outcome = sides.send(peer)
    assert outcome.cause is Cause.REFUSED and "the peer's device did not take it" in outcome.detail
    assert "a GPU does not take what a card wrote: cuFlushGPUDirectRDMAWrites" in caplog.text
    LIBRARY.fail.clear()
    assert sides.send(peer).ok and np.array_equal(sides.target.bytes, sides.source.bytes)


def test_a_grant_that_ends_leaves_nothing_on_its_way_to_the_device(
    make: Callable[..., Sides], stand_ins: Fabric
) -> None:
    for card in stand_ins.cards.values():
        card.bytes_per_s = 50e6
    sides = make()
    sides.register()
    peer = sides.connect()
    whole = int64(sides.source.address), sides.grant.addresses, sides.grant.nbytes
    completion = peer.write(sides.grant, *whole, deadline_s=DEADLINE_S)
    while not LIBRARY.on_their_way and completion.outcome is None:
        pass
    sides.there.revoke(sides.grant)
    assert not LIBRARY.on_their_way
    sides.target.bytes[:] = 7
    assert outcome_of(completion).cause is Cause.REFUSED
    assert (sides.target.bytes == 7).all()


@pytest.mark.parametrize("is_direct", [False, True])
def test_slices_for_several_rails_are_as_large_from_stages_as_they_may_be(
    make: Callable[..., Sides], monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    LIBRARY.attributes[DMA_BUF_SUPPORTED] = int(is_direct)
    slices: list[int] = []
    encode = RailEncoder.order

    def order(self: RailEncoder, part: Slice) -> Any:
        slices.append(part.pieces.total)
        return encode(self, part)

    sides = make()
    source, target = SealedBuffer(40 * MIB, seed=1), SealedBuffer(40 * MIB)
    sides.memory.register(source.address, 40 * MIB)
    sides.there.register(target.address, 40 * MIB)
    grant = sides.there.grant(int64(target.address), int64(40 * MIB))
    peer = sides.connect()
    wait_for(lambda: all(path.is_in for path in peer._inner._encoder.paths.all))
    monkeypatch.setattr(RailEncoder, "order", order)
    write = peer.write(grant, int64(source.address), grant.addresses, grant.nbytes, deadline_s=DEADLINE_S)
    assert outcome_of(write).ok and np.array_equal(target.bytes, source.bytes)
    assert slices == ([5 * MIB] * 8 if is_direct else [STAGE_NBYTES] * 10)
