"""The `cuda_ipc` transport over a stand-in for the driver; tests/gpu runs it on a device."""

import ctypes
import logging
import subprocess
import sys
from array import array
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_form import LONG
from simulated import cuda_driver
from simulated.cuda_driver import DeviceBuffer, Library, SimulatedCudaIpc
from simulated.waiting import wait_for

import transfer.transports.cuda.copier
import transfer.transports.cuda.driver
from transfer.testing.conformance import TransportConformance
from transfer.testing.fixtures import DEADLINE_S, TransportFixtures
from transfer.testing.memory import MIB, Buffer, digest, folded, int64
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Cause, Unavailable
from transfer.transports.cuda.copier import Copier
from transfer.transports.cuda.driver import HANDLE_NBYTES, Allocation, CudaError, Driver, system_driver
from transfer.transports.cuda.ipc import CudaIpcTransport, decode_windows, encode_windows
from transfer.transports.memory import Memory
from transfer.transports.vectors import Vector
from transfer.transports.wire import PROBE_KEY, CopyOrder, WireError

TESTS = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """The stand-in, without a past; other processes find it as well."""
    monkeypatch.setenv("PYTHONPATH", TESTS)
    library = cuda_driver.LIBRARY
    library.__init__()
    yield library
    assert not library.contexts, "what the thread worked on before comes back"
    assert not library.opened, "what was opened is closed"
    assert not library.locked and not library._queues, "page-locked memory and streams are given back"


class TestCudaIpc(TransportConformance):
    transport = SimulatedCudaIpc

    @pytest.mark.long
    def test_more_pieces_than_one_order_takes_arrive(self, memory, there, peer, monkeypatch):
        if not LONG:
            cuda_driver.fewer_pieces(monkeypatch)
        super().test_more_pieces_than_one_order_takes_arrive(memory, there, peer)

    @pytest.mark.slow
    def test_a_piece_beyond_4_gib_arrives(self, memory, there, peer, library, monkeypatch):
        def device_memory(*arguments, **options):
            made = folded(*arguments, **options)
            library.allocate(made.address, made.nbytes)
            return made

        monkeypatch.setattr("transfer.testing.conformance.folded", device_memory)
        super().test_a_piece_beyond_4_gib_arrives(memory, there, peer)


def write(peer, source, grant):
    return outcome_of(peer.write(grant, int64(source.address), grant.addresses, grant.nbytes, deadline_s=DEADLINE_S))


def probe(addresses, sizes, attachment=b""):
    order = CopyOrder(0, PROBE_KEY, len(sizes), sum(sizes))
    return order.encode(addresses, sizes, addresses, attachment=attachment)


class TestDevices(TransportFixtures):
    """Claims about this transport alone."""

    transport = SimulatedCudaIpc

    @pytest.fixture
    def registered(self, memory, there):
        """Device memory of either side, and a grant of it."""
        return self.between(memory, there, MIB, seed=1)

    def test_an_allocation_is_opened_once_and_closed_with_the_connection(self, there, receiver, other, library):
        target = DeviceBuffer(64 * MIB)
        there.register(target.address, target.nbytes)
        grant = there.grant(int64(target.address), int64(target.nbytes))
        send = {"endpoint": receiver.listen().hex(), "key": grant.key.hex(), "address": target.address}
        other.tell(do="send", nbytes=target.nbytes, **send)
        wait_for(lambda: library.calls["cuMemcpyAsync"] >= 4)
        assert len(library.opened) == 1 and library.calls["cuIpcOpenMemHandle_v2"] == 1
        other.kill()
        wait_for(lambda: not library.opened)
        assert target.bytes.all()

    def test_a_peer_that_sends_from_too_many_allocations_is_closed(
        self, there, receiver, registered, other, library, monkeypatch, caplog
    ):
        _, target, grant = registered
        monkeypatch.setattr("transfer.transports.cuda.ipc.MAX_OPEN", 0)
        with caplog.at_level(logging.WARNING):
            send = {"endpoint": receiver.listen().hex(), "key": grant.key.hex(), "address": target.address}
            other.tell(do="send", nbytes=MIB, **send)
            wait_for(lambda: "sends from more than 0 allocations" in caplog.text)
        assert library.calls["cuIpcOpenMemHandle_v2"] == 0 and not target.bytes.any()

    @pytest.mark.parametrize("kind", ["of the host", "of another device"])
    def test_memory_there_that_is_not_of_one_device_is_unavailable(
        self, kind, sender, there, receiver, registered, library
    ):
        second = Buffer(4096) if kind == "of the host" else DeviceBuffer(4096)
        library.devices[second.address] = 1
        there.register(second.address, 4096)
        with pytest.raises(Unavailable, match="the peer's memory is not that of one device"):
            sender.connect(receiver.listen(), deadline_s=DEADLINE_S)

    @pytest.mark.parametrize("kind", ["of the host", "not to be shared", "beyond one allocation"])
    def test_memory_here_that_cannot_be_shared_is_unavailable(
        self, kind, memory, sender, receiver, registered, library
    ):
        """The driver does not share that of torch's expandable segments."""
        second = Buffer(8192)
        library.unshareable = kind == "not to be shared"
        if kind == "beyond one allocation":
            library.allocate(second.address, 4096)
        if not library.unshareable:
            memory.register(second.address, 8192)
        with pytest.raises(Unavailable, match="registered here is not device memory that can be shared"):
            sender.connect(receiver.listen(), deadline_s=DEADLINE_S)

    def test_an_order_names_the_allocations_of_its_pieces_only(self, memory, registered, peer, monkeypatch):
        source, _, grant = registered
        second = DeviceBuffer(4096)
        memory.register(second.address, 4096)
        named = []
        encode = lambda w: (named.append(set(w)), encode_windows(w))[1]  # noqa: E731
        monkeypatch.setattr("transfer.transports.cuda.ipc.encode_windows", encode)
        assert write(peer, source, grant).ok
        assert named == [{Allocation(0, source.address, MIB)}]

    def test_more_allocations_than_an_order_names_are_unavailable(
        self, memory, sender, receiver, registered, monkeypatch
    ):
        second = DeviceBuffer(4096)
        memory.register(second.address, 4096)
        monkeypatch.setattr("transfer.transports.cuda.ipc.MAX_WINDOWS", 1)
        with pytest.raises(Unavailable, match="1 pieces"):
            sender.connect(receiver.listen(), deadline_s=DEADLINE_S)

    def test_the_copy_is_made_by_the_device_of_the_destination(self, sender, receiver, registered, library):
        source, target, grant = registered
        library.devices[target.address] = 1
        assert write(sender.connect(receiver.listen(), deadline_s=DEADLINE_S), source, grant).ok
        assert list(receiver._copiers) == [1]

    def test_the_device_of_the_sender_gets_no_context_here(self, there, receiver, other, library):
        """As where CUDA_VISIBLE_DEVICES differ: what was opened is of a device that has no number here."""
        target = DeviceBuffer(4096)
        library.devices[target.address] = 1
        there.register(target.address, 4096)
        grant = there.grant(int64(target.address), int64(4096))
        send = {"endpoint": receiver.listen().hex(), "key": grant.key.hex(), "address": target.address}
        other.tell(do="send", nbytes=4096, **send)
        wait_for(lambda: target.bytes.all())
        assert library.opened and list(receiver.driver._contexts) == [1]
        other.kill()
        wait_for(lambda: not library.opened)

    def test_a_peer_whose_device_cannot_read_ours_is_unavailable(self, sender, other, memory, library, caplog):
        endpoint, _ = other.offer(4096)
        source = DeviceBuffer(4096)
        memory.register(source.address, 4096)
        sender.connect(endpoint, deadline_s=DEADLINE_S).close()
        library._allocated[source.address] = 1 << 41, 1  # a handle that nobody can open
        fresh = SimulatedCudaIpc(memory)
        with fresh, pytest.raises(Unavailable, match="the peer's device cannot read ours"):
            fresh.connect(endpoint, deadline_s=DEADLINE_S)

    @pytest.mark.parametrize(
        "forge",
        [
            lambda windows: {},
            lambda windows: {Allocation(0, one.address, one.nbytes + 1): handle for one, handle in windows.items()},
            lambda windows: {Allocation(0, one.address, one.nbytes - 1): handle for one, handle in windows.items()},
            lambda windows: {Allocation(0, one.address - 64, one.nbytes): handle for one, handle in windows.items()},
            lambda windows: {Allocation(0, one.address + 64, one.nbytes): handle for one, handle in windows.items()},
            lambda windows: {
                Allocation(0, one.address - 64, one.nbytes + 64): handle for one, handle in windows.items()
            },
        ],
    )
    def test_a_window_that_is_not_what_was_opened_is_not_read(self, registered, peer, monkeypatch, library, forge):
        source, target, grant = registered
        copied = library.calls["cuMemcpyAsync"]
        with monkeypatch.context() as patch:
            patch.setattr("transfer.transports.cuda.ipc.encode_windows", lambda windows: encode_windows(forge(windows)))
            assert write(peer, source, grant).cause is Cause.SOURCE
        assert library.calls["cuMemcpyAsync"] == copied and not target.bytes.any()
        assert write(peer, source, grant).ok, "the connection goes on"

    def test_memory_allocated_again_at_the_same_address_is_shared_anew(self, memory, sender, other, library):
        endpoint, grant = other.offer(4096)
        source = DeviceBuffer(4096, seed=1)
        region = memory.register(source.address, 4096)
        peer = sender.connect(endpoint, deadline_s=DEADLINE_S)
        assert write(peer, source, grant).ok
        for allocated_again in (False, True):
            shared = library.calls["cuIpcGetMemHandle"]
            if allocated_again:
                memory.unregister(region)
                library.allocate(source.address, 4096)
                memory.register(source.address, 4096)
            assert write(peer, source, grant).ok
            assert library.calls["cuIpcGetMemHandle"] == shared + allocated_again
        assert other.digest(grant) == digest(source)

    def test_a_driver_that_fails_in_the_middle_is_waited_for_before_the_answer(self, registered, peer, library):
        source, target, grant = registered
        sizes = np.full(4, 1000)
        places = np.arange(4) * 2000
        waited = library.calls["cuStreamSynchronize"]
        library.fail["cuMemcpyAsync"] = 2
        scattered = source.address + places, target.address + places, sizes
        outcome = outcome_of(peer.write(grant, *scattered, deadline_s=DEADLINE_S))
        assert outcome.cause is Cause.SOURCE
        assert library.calls["cuStreamSynchronize"] == waited + 1
        assert not any(library._queues.values()), "nothing is under way any more"
        del library.fail["cuMemcpyAsync"]
        assert write(peer, source, grant).ok

    def test_a_device_that_fails_while_copying_is_an_outcome(self, sender, receiver, registered, peer, library, caplog):
        """And over: what the device has not done by then it must not do later, when the memory may be another's."""
        source, target, grant = registered
        library.fail["cuStreamSynchronize"] = 0
        with caplog.at_level(logging.WARNING):
            assert write(peer, source, grant).cause is Cause.SOURCE
            said = "cuda_ipc: a peer's memory cannot be read: cuStreamSynchronize: CUDA_ERROR_STAND_IN (719)"
            wait_for(lambda: said in caplog.text)
        del library.fail["cuStreamSynchronize"]
        waited = library.calls["cuStreamSynchronize"]
        sender.connect(receiver.listen(), deadline_s=DEADLINE_S)  # has the device copy again, a byte
        assert library.calls["cuStreamSynchronize"] == waited + 1
        assert not target.bytes.any()

    @pytest.mark.parametrize(
        "order, complaint",
        [
            (array("B", b"\0" * 300), "header begins with"),
            (probe([8], [1], bytes(1025 * 80)), "82000 bytes attached"),
            (probe([8], [2]), "a probe of something else than a byte"),
            (probe([8, 9], [1, 1]), "a probe of something else"),
            (probe([8], [1], bytes(79)), "windows of 79 bytes"),
            (probe([8], [1], bytes(80)), "0 or 0 as its address or size"),
        ],
    )
    def test_bytes_that_no_sender_sends_end_the_connection(
        self, sender, receiver, registered, peer, monkeypatch, caplog, order, complaint
    ):
        source, target, grant = registered
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr("transfer.transports.pull.PullEncoder.encode", lambda *_: Vector.over(order))
            assert write(peer, source, grant).cause is Cause.PEER_LOST
            wait_for(lambda: complaint in caplog.text)
            assert not target.bytes.any()
        assert write(sender.connect(receiver.listen(), deadline_s=DEADLINE_S), source, grant).ok


HANDLES = st.binary(min_size=HANDLE_NBYTES, max_size=HANDLE_NBYTES)
WINDOWS = st.lists(st.tuples(HANDLES, st.integers(1, 1 << 30), st.integers(1, 1 << 20)))


@given(WINDOWS)
def test_windows_survive_the_wire_unless_they_overlap(rows):
    handles = {Allocation(0, address, nbytes): handle for handle, address, nbytes in rows}
    known = sorted(handles, key=lambda one: one.address)
    data = encode_windows(handles)
    if any(a.address + a.nbytes > b.address for a, b in pairwise(known)):
        with pytest.raises(WireError, match="overlap"):
            decode_windows(data)
        return
    found, starts, sizes = decode_windows(data)
    assert found == [handles[one] for one in known]
    assert starts.tolist() == [one.address for one in known] and sizes.tolist() == [one.nbytes for one in known]


@given(st.integers(0, 5).flatmap(lambda n: st.binary(min_size=80 * n, max_size=80 * n)))
def test_windows_of_any_bytes_are_sane_or_an_error(data):
    try:
        _, starts, sizes = decode_windows(data)
    except WireError:
        return
    assert (starts > 0).all() and (sizes > 0).all() and ((starts + sizes) > 0).all()


class Kernels:
    """In place of `transfer.transports.cuda.kernels`: copies when it is launched."""

    def __init__(self):
        self.widths = []

    def prepare(self, width):
        self.widths.append(width)
        return self.launch

    def launch(self, table, chunks, stream):
        rows = np.ctypeslib.as_array((ctypes.c_int64 * (3 * chunks)).from_address(table)).reshape(3, -1)
        for source, target, nbytes in rows.T.tolist():
            ctypes.memmove(target, source, nbytes)


def test_many_small_pieces_go_through_the_kernel_and_long_ones_do_not(library, monkeypatch):
    kernels = Kernels()
    monkeypatch.setattr(transfer.transports.cuda.copier, "_kernels", lambda: kernels)
    copier = Copier(Driver(library), 0)
    source, target = DeviceBuffer(16 * MIB + 1, seed=1), DeviceBuffer(16 * MIB + 1)
    cases = (100, 20_001, True), (4, 20_001, False), (8, 2 << 20, False), (200, 1004, True), (150, 1004, True)
    for count, nbytes, by_kernel in cases:
        target.bytes[:] = 0
        copies = library.calls["cuMemcpyAsync"]
        starts = np.arange(count) * nbytes
        sizes = np.full(count, nbytes)
        copier.run(copier.plan(source.address + 1 + starts, target.address + 1 + starts[::-1], sizes))
        assert library.calls["cuMemcpyAsync"] - copies == (0 if by_kernel else count)
        for i in range(count):
            there = target.bytes[1 + starts[count - 1 - i] :][:nbytes]
            assert np.array_equal(there, source.bytes[1 + starts[i] :][:nbytes])
    assert sorted(kernels.widths) == [1, 4], "each is compiled once"
    copier.close()


def test_a_kernel_that_cannot_be_compiled_costs_no_bytes_and_one_line(library, monkeypatch, caplog):
    kernels = Kernels()
    kernels.prepare = lambda width: 1 / 0
    monkeypatch.setattr(transfer.transports.cuda.copier, "_kernels", lambda: kernels)
    copier = Copier(Driver(library), 0)
    source, target = DeviceBuffer(MIB, seed=1), DeviceBuffer(MIB)
    starts = np.arange(64) * 16_000
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            copier.run(copier.plan(source.address + starts, target.address + starts, np.full(64, 16_000)))
    assert np.array_equal(target.bytes[: 64 * 16_000], source.bytes[: 64 * 16_000])
    assert [record.getMessage() for record in caplog.records] == [
        "no copy kernel, pieces go one by one: division by zero"
    ]
    copier.close()


def test_a_machine_without_a_device_is_unavailable_with_the_reason():
    library = Library()
    library._cuDeviceGetCount = lambda out: None
    with pytest.raises(Unavailable, match="no CUDA device"):
        Driver(library)
    library.fail["cuInit"] = 0
    with pytest.raises(CudaError, match=r"cuInit: CUDA_ERROR_STAND_IN \(719\)"):
        Driver(library)


def test_a_machine_without_a_driver_is_unavailable_with_the_reason_and_imports_nothing(monkeypatch):
    monkeypatch.setattr(transfer.transports.cuda.driver, "_LIBRARY", "libno_such_cuda.so.1")
    system_driver.cache_clear()
    with pytest.raises(Unavailable, match="no CUDA driver: libno_such_cuda"):
        CudaIpcTransport(Memory())
    code = "import sys, transfer.transports.cuda.ipc; print([m for m in ('torch', 'triton') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/").stdout == "[]\n"
