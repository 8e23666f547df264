"""Nodes whose KV is in device memory, over a stand-in for the driver: what is moved and checked goes through it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_form import sampled
from msgspec.structs import replace
from simulated.completion_queue import StagedQueueTransport
from simulated.cuda_driver import LIBRARY
from simulated.library import SimulatedTransport
from simulated.nodes import Instances, endings, spoil_arrivals
from simulated.pair import P_TABLE
from simulated.verbs import Fabric

import transfer.integrity
import transfer.serving
import transfer.session
from transfer.control.handshake import OLDEST_VERSION, Client, Server
from transfer.integrity import page_checksums
from transfer.plan.granularity import Bounds, Granularity
from transfer.plan.pairing import PageRuns
from transfer.protocol.orders import Ending
from transfer.session import NodeOptions
from transfer.transports import registry, sender, wire
from transfer.transports.base import TransferError
from transfer.transports.cuda import copier, fetched, landing, staged
from transfer.transports.cuda.copier import Staging
from transfer.transports.cuda.driver import DMA_BUF_SUPPORTED, Driver
from transfer.transports.cuda.stage import Stage
from transfer.transports.passing import Passed, decode_mark


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """The stand-in, without a past."""
    LIBRARY.__init__()
    monkeypatch.setattr(transfer.session, "system_driver", lambda: Driver(LIBRARY))
    yield LIBRARY
    assert not LIBRARY.contexts and not LIBRARY.opened and not LIBRARY.locked and not LIBRARY._queues


@pytest.fixture
def pair(make, monkeypatch):
    prefill, decode = make

    def pair(
        granularity: Granularity,
        devices: tuple[int | None, int | None] = (0, 0),
        prefill_tp: int = 2,
        **settings: Any,
    ) -> tuple[Instances, Instances]:
        if None not in devices:
            monkeypatch.setattr(transfer.integrity, "ctypes", None)  # the processor cannot read a device's memory
        options = NodeOptions(page_tokens=16, bounds=Bounds(fixed=granularity), **settings)
        return prefill(prefill_tp, options=options, device=devices[0]), decode(options=options, device=devices[1])

    return pair


def ask(p: Instances, d: Instances) -> set[Ending | None]:
    d.fetch("t", p.where, computed=False)
    p.prefill("t")
    return endings(d.fetched())


@pytest.mark.parametrize("granularity", Granularity)
def test_kv_goes_from_device_to_device(pair, library, granularity):
    p, d = pair(granularity)
    assert ask(p, d) == {Ending.DONE}
    d.check()
    assert {ended.transport for ended in p.sent()} == {"cuda_ipc"}
    assert library.calls["cuMemcpyAsync"] > 0


def test_the_kernel_is_compiled_when_a_node_starts_and_not_by_its_first_transfer(pair, monkeypatch):
    widths = []

    def prepare(width):
        widths.append(width)
        raise RuntimeError("no compiler here: pieces go one by one")

    monkeypatch.setattr(copier, "_kernels", lambda: SimpleNamespace(prepare=prepare))
    p, d = pair(Granularity.FULL, (0, 0), prefill_tp=1)
    assert widths == [16, 16], "that of whole words"
    assert ask(p, d) == {Ending.DONE}
    d.check()


def test_a_node_starts_where_triton_cannot_be_imported_for_whatever_reason(pair, monkeypatch, caplog):
    def broken(name):
        raise RuntimeError("no driver is active")

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    monkeypatch.setattr(copier, "importlib", SimpleNamespace(import_module=broken))
    p, d = pair(Granularity.FULL, (0, 0), prefill_tp=1)
    assert ask(p, d) == {Ending.DONE}
    d.check()
    assert "pieces go one by one: no driver is active" in caplog.text


@pytest.mark.parametrize("devices, transport", [((0, 0), "cuda_ipc"), ((None, 0), "shm"), ((None, 0), "tcp")])
@pytest.mark.parametrize("times, ending", [(1, Ending.DONE), (2, Ending.FAILED)])
def test_wrong_bytes_on_a_device_are_noticed(pair, monkeypatch, times, ending, devices, transport):
    """One rank sends: with two, what is spoilt for one batch would be healed by what is spoilt for the other."""
    p, d = pair(Granularity.FULL, devices, prefill_tp=1, transports=[transport], hosts=["127.0.0.1"])
    spoil_arrivals(monkeypatch, d, times)
    assert ask(p, d) == {ending}


class Library(SimulatedTransport):
    name = "library"


class Marked:
    """Both sides are on a device, and go through stages: checksums travel with the bytes."""

    @pytest.fixture(autouse=True)
    def transports(self, monkeypatch):
        """Those of the tests too, and for `rdma` two cards."""
        for transport in (StagedQueueTransport, Library):
            monkeypatch.setitem(registry._registered, transport.name, transport)
        fabric = Fabric(monkeypatch, [400e6, 400e6])
        yield
        fabric.close()

    @pytest.fixture
    def reads(self, monkeypatch):
        """Bytes that were brought down from a device to be hashed, each time."""
        read, found = Staging.read, []

        def noted(staging, addresses, nbytes):
            found.append(int(nbytes.sum()))
            return read(staging, addresses, nbytes)

        monkeypatch.setattr(Staging, "read", noted)
        return found

    @pytest.fixture
    def spoil(self, monkeypatch):
        """`spoil(times)`: so many parts have a wrong byte at the end when they lie in a stage of the receiver."""
        scatter, left = Stage.begin_scatter, [0]

        def begin_scatter(stage, part):
            if left[0]:
                left[0] -= 1
                stage.view(part.total).cast("B")[part.total - 1] ^= 1
            scatter(stage, part)

        monkeypatch.setattr(Stage, "begin_scatter", begin_scatter)
        return lambda times: left.__setitem__(0, times)

    @pytest.fixture
    def begin(self, pair):
        def begin(transport, granularity=Granularity.FULL, prefill_tp=1, hosts=("127.0.0.1",)):
            return pair(granularity, prefill_tp=prefill_tp, transports=[transport], hosts=hosts)

        return begin


TRANSPORTS = ["tcp", "shm", "rdma", "queue", "library"]
each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


class TestMarked(Marked):
    @pytest.mark.long
    @pytest.mark.parametrize("transport, granularity", sampled(TRANSPORTS, Granularity))
    def test_what_comes_from_stages_into_stages_is_read_from_no_device_again(
        self, begin, reads, transport, granularity
    ):
        p, d = begin(transport, granularity, prefill_tp=2)
        assert ask(p, d) == {Ending.DONE}
        d.check()
        assert {ended.transport for ended in p.sent()} == {transport} and not reads

    @each_transport
    def test_so_it_is_in_many_orders_over_several_paths(self, begin, reads, monkeypatch, transport):
        monkeypatch.setattr(staged, "STAGE_NBYTES", 1000)
        monkeypatch.setattr(sender, "MIN_SHARE_NBYTES", 70)
        noted, note = [], Passed.note
        monkeypatch.setattr(Passed, "note", lambda self, *said: (noted.append(said), note(self, *said)))
        p, d = begin(transport, hosts=["127.0.0.1", "127.0.0.2"])
        assert ask(p, d) == {Ending.DONE}
        d.check()
        assert len(noted) > 10 and not reads

    @each_transport
    @pytest.mark.parametrize("pieces", [7, 8, 9, 10, 11, 12, 13])
    def test_so_it_is_whatever_fits_into_the_first_bytes_of_an_order(
        self, begin, reads, monkeypatch, transport, pieces
    ):
        """Which the next order overwrites before the device has this one's bytes."""
        monkeypatch.setattr(staged, "STAGE_NBYTES", pieces * 128)
        orders, order = [], wire.CopyOrder
        monkeypatch.setattr(wire, "CopyOrder", lambda *said: (orders.append(said), order(*said))[1])
        p, d = begin(transport)
        assert ask(p, d) == {Ending.DONE}
        d.check()
        assert pieces in {said[2] for said in orders} and not reads

    @each_transport
    @pytest.mark.parametrize("times, ending", [(1, Ending.DONE), (2, Ending.FAILED)])
    def test_one_wrong_byte_is_noticed(self, begin, reads, spoil, caplog, transport, times, ending):
        """It is sent once more, with the checksums of its pages, which are held against what the device has."""
        p, d = begin(transport)
        spoil(times)
        assert ask(p, d) == {ending}
        assert "a batch arrived with wrong bytes; it is sent once more" in caplog.text and len(reads) == 1
        if ending is Ending.DONE:
            d.check()

    @pytest.mark.parametrize("transport", ["tcp", "shm", "library"])
    def test_an_order_of_several_stages_is_seen_part_by_part(self, begin, reads, monkeypatch, transport):
        monkeypatch.setattr(landing, "STAGE_NBYTES", 300)
        p, d = begin(transport)
        assert ask(p, d) == {Ending.DONE}
        d.check()
        assert not reads

    def test_one_that_is_fetched_in_parts_is_sent_once_more(self, begin, reads, monkeypatch):
        """They come in any sequence; a sender whose stages are larger than ours would see this."""
        monkeypatch.setattr(fetched, "STAGE_NBYTES", 300)
        p, d = begin("queue")
        assert ask(p, d) == {Ending.DONE}
        d.check()
        assert len(reads) == 1

    @pytest.mark.parametrize("older", [Client, Server], ids=["decode", "prefill"])
    def test_with_a_peer_of_the_version_before_pages_are_read_from_the_device(self, begin, reads, monkeypatch, older):
        start, said = older.__init__, []

        def start_older(side, *arguments):
            start(side, *arguments)
            side.version = OLDEST_VERSION

        monkeypatch.setattr(older, "__init__", start_older)
        decode = transfer.serving.decode
        monkeypatch.setattr(transfer.serving, "decode", lambda data: (said.append(decode(data)), said[-1])[1])
        p, d = begin("tcp")
        assert ask(p, d) == {Ending.DONE}
        d.check()
        assert len(reads) == 1 and said[0].marks is False

    @pytest.mark.parametrize(
        "misname",
        [
            lambda mark: replace(mark, batch=mark.batch + 1),
            lambda mark: replace(mark, offset=mark.offset + 1),
            lambda mark: replace(mark, offset=1 << 63),
            lambda mark: replace(mark, digest=mark.digest ^ 1),
            None,
        ],
        ids=["batch", "offset", "far offset", "digest", "no mark"],
    )
    @pytest.mark.parametrize("transport", ["tcp", "rdma"])
    def test_a_peer_that_marks_wrongly_is_asked_for_the_checksums_of_pages(
        self, begin, reads, monkeypatch, transport, misname
    ):
        right = staged.marker

        def wrong_marker(*where):
            mark = right(*where)
            return None if misname is None else lambda pieces: misname(decode_mark(mark(pieces))).encode()

        monkeypatch.setattr(staged, "marker", wrong_marker)
        p, d = begin(transport)
        assert ask(p, d) == {Ending.DONE}
        d.check()
        assert len(reads) == 1

    def test_a_peer_that_never_has_them_fails_and_the_next_transfer_does_not(self, begin, monkeypatch):
        right, wrongly = transfer.serving._send, [True]

        def send(visitor, peer, order, *rest):
            begun, nbytes, checksums = right(visitor, peer, order, *rest)
            return begun, nbytes, list if wrongly[0] else checksums

        monkeypatch.setattr(transfer.serving, "_send", send)
        monkeypatch.setattr(staged, "marker", lambda *where: None)
        p, d = begin("tcp")
        assert ask(p, d) == {Ending.FAILED}
        wrongly[0] = False
        p.sent()
        d.fetch("u", p.where, computed=False)
        p.prefill("u")
        assert endings(d.fetched()) == {Ending.DONE}
        d.check()


@pytest.mark.parametrize("name", ["cuMemcpyAsync", "cuStreamSynchronize"])
def test_a_device_that_fails_ends_the_transfer(pair, library, name):
    """Its checksums cannot be taken; nobody waits for them."""
    p, d = pair(Granularity.FULL)
    library.fail[name] = 0
    assert ask(p, d) == {Ending.FAILED}
    del library.fail[name]


@pytest.mark.long
@pytest.mark.parametrize(
    "transport, devices, granularity",
    sampled(["shm", "tcp"], [(0, 0), (0, None), (None, 0)], [Granularity.FULL, Granularity.LAYER]),
)
def test_kv_of_a_device_goes_through_the_host_too(pair, library, transport, devices, granularity):
    """Where cuda_ipc is not there, and where one side has its KV in host memory."""
    p, d = pair(granularity, devices, transports=["cma", transport], hosts=["127.0.0.1"])
    assert ask(p, d) == {Ending.DONE}
    d.check()
    assert {ended.transport for ended in p.sent()} == {transport}
    assert library.calls["cuMemcpyAsync"] > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "transport, devices, granularity", sampled(["shm", "tcp"], [(0, None), (None, 0)], Granularity)
)
def test_what_a_device_gave_to_a_stage_is_hashed_there_and_not_read_again(
    pair, monkeypatch, transport, devices, granularity
):
    """Decode does read what it has got, in its place."""
    ending = Ending.DONE if devices == (0, None) else Ending.FAILED
    monkeypatch.setattr(Staging, "read", lambda self, addresses, nbytes: 1 // 0)
    p, d = pair(granularity, devices, transports=[transport], hosts=["127.0.0.1"])
    assert ask(p, d) == {ending}
    if ending is Ending.DONE:
        d.check()


@pytest.mark.long
@pytest.mark.parametrize(
    "devices, granularity, is_direct",
    sampled([(0, 0), (0, None), (None, 0)], [Granularity.FULL, Granularity.LAYER], [True, False]),
)
def test_cards_move_kv_from_and_to_devices(pair, library, monkeypatch, devices, granularity, is_direct):
    """Stand-ins of cards. What goes straight from a device is read once more for checksums, as what went to one."""
    library.attributes[DMA_BUF_SUPPORTED] = int(is_direct)
    read = list[int]()
    sums = Staging.read
    monkeypatch.setattr(Staging, "read", lambda self, addresses, sizes: read.append(1) or sums(self, addresses, sizes))
    fabric = Fabric(monkeypatch, [1e12])
    p, d = pair(granularity, devices, transports=["rdma"], hosts=["127.0.0.1"])
    assert ask(p, d) == {Ending.DONE}
    d.check()
    assert {ended.transport for ended in p.sent()} == {"rdma"}
    counts = [rank.node.take_counts() for rank in p.ranks]
    assert any("rail_direct_bytes" in count for count in counts) is (is_direct and devices[0] is not None)
    assert bool(read) is (is_direct or devices == (None, 0)), "from stages into stages it is hashed in passing"
    for instances in (p, d):
        instances.close()
    fabric.close()


def test_a_host_and_a_device_find_what_both_have(pair):
    p, d = pair(Granularity.FULL, (0, None))
    assert ask(p, d) == {Ending.DONE}
    d.check()
    assert {ended.transport for ended in p.sent()} == {"shm"}


def test_where_nothing_serves_both_decode_hears_it_before_anything_is_computed(pair):
    """Whoever asks next as well; prefill is told, and holds nothing for them."""
    p, d = pair(Granularity.FULL, (0, None), transports=["cuda_ipc", "cma"])
    reason = "prefill cannot send here: no transport reaches the peer: cuda_ipc: the peer does not offer it"
    for name in ("t", "u"):
        p.open(name)
        d.announce(name, p.where, computed=False)
        (fetched,) = d.fetched()
        assert fetched.ending is Ending.FAILED and reason in fetched.cause
        p.finish(name)
        assert {reason in ended.cause for ended in p.sent()} == {True}


def test_without_a_driver_there_is_no_node_of_a_device(monkeypatch):
    def none() -> Driver:
        raise TransferError("no CUDA driver")

    monkeypatch.setattr(transfer.session, "system_driver", none)
    with pytest.raises(TransferError, match="no CUDA driver"):
        Instances(1, P_TABLE, device=0)


@pytest.mark.parametrize(
    "device, names, refusal",
    [
        (0, ["cma", "tcp"], "transports cma, tcp: none of them serves memory of a device; add cuda_ipc or shm, or set"),
        (None, ["cuda_ipc", "tcp"], "none of them serves memory of the host; add cma or shm, or set transfer_hosts"),
    ],
)
def test_there_is_no_node_without_a_transport_for_its_memory(device, names, refusal):
    with pytest.raises(TransferError, match=refusal):
        Instances(1, P_TABLE, options=NodeOptions(transports=names), device=device)


@given(
    sizes=st.lists(st.integers(1, 300), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    staging_nbytes=st.integers(1, 700),
)
def test_checksums_do_not_depend_on_the_parts_in_which_bytes_come_from_a_device(sizes, cuts, staging_nbytes):
    memory = np.random.default_rng(1).integers(0, 256, 16384, dtype=np.uint8)
    nbytes = np.array(sizes, dtype=np.int64)
    addresses = memory.ctypes.data + 17 + nbytes.cumsum() * 3 // 2
    bounds = np.array([0, *sorted({cut for cut in cuts if 0 < cut < len(sizes)}), len(sizes)], dtype=np.int64)
    runs = PageRuns(addresses, nbytes, bounds if sizes else bounds[:1])
    staging = Staging(Driver(LIBRARY), 0, staging_nbytes)
    try:
        assert page_checksums(runs, staging) == page_checksums(runs)
    finally:
        staging.close()
