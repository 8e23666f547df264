"""The transports on NIXL and on Mooncake's Transfer Engine; skipped, and loudly, where these are not installed."""

import ctypes.util
import importlib
import subprocess
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from certificates import CAN_MAKE, make_certificate
from simulated.cuda_driver import LIBRARY, SealedBuffer

from transfer.control.handshake import Identity
from transfer.testing.conformance import TransportConformance
from transfer.testing.memory import Buffer, int64
from transfer.testing.waiting import outcome_of
from transfer.transports import registry
from transfer.transports.base import TransferError, TransportOptions
from transfer.transports.cuda.driver import Driver
from transfer.transports.cuda.stage import STAGE_NBYTES, OnDevice
from transfer.transports.libraries import mooncake
from transfer.transports.libraries.mooncake import MooncakeTransport
from transfer.transports.libraries.nixl import NixlReader, NixlTransport
from transfer.transports.memory import Memory
from transfer.transports.tls import Tls

MODULES = {"nixl": "nixl._api", "mooncake": "mooncake.engine"}


def need(name):
    try:
        importlib.import_module(MODULES[name])
    except (ImportError, OSError) as error:
        pytest.skip(f"NOT TESTED: transport {name} needs its library, see tests/requirements/{name}.txt ({error})")


class TestNixl(TransportConformance):
    transport = NixlTransport

    @pytest.fixture
    def options(self):
        return {"lost_after_s": 60.0}  # a busy machine may leave a thread waiting for seconds

    @pytest.fixture(autouse=True)
    def installed(self):
        need("nixl")


class Kept:
    """An engine of Mooncake's that the next one who wants one gets, without what was registered: its end takes a second
    of the whole process."""

    def __init__(self, unused):
        self._unused, self._addresses, self._is_used = unused, set(), bool(unused)
        self._engine = unused.pop() if unused else importlib.import_module(MODULES["mooncake"]).TransferEngine()

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def initialize(self, *arguments):
        return 0 if self._is_used else self._engine.initialize(*arguments)

    def register_memory(self, address, nbytes):
        self._addresses.add(address)
        return self._engine.register_memory(address, nbytes)

    def unregister_memory(self, address):
        self._addresses.discard(address)
        return self._engine.unregister_memory(address)

    def __del__(self):
        for address in self._addresses:
            self._engine.unregister_memory(address)
        self._unused.append(self._engine)


@pytest.fixture(scope="module")
def unused():
    """Engines that are `Kept`."""
    return []


class TestMooncake(TransportConformance):
    transport = MooncakeTransport

    @pytest.fixture
    def options(self):
        return {"lost_after_s": 60.0}  # a busy machine may leave a thread waiting for seconds

    @pytest.fixture(autouse=True)
    def installed(self):
        need("mooncake")

    @pytest.fixture(autouse=True)
    def engines_are_used_again(self, request, installed, unused, monkeypatch):
        """Except by the test of what an end leaves behind."""
        if request.function.__name__.startswith("test_closing"):
            unused.clear()
        else:
            library = SimpleNamespace(TransferEngine=lambda: Kept(unused))
            monkeypatch.setattr(mooncake, "_library", lambda: library)


def test_a_read_of_mooncakes_waits_no_longer_for_those_before_it_than_it_may_take(monkeypatch):
    need("mooncake")
    monkeypatch.setattr(mooncake, "READ_S", 0.05)
    reader = mooncake.MooncakeReader("127.0.0.1")
    turns = reader._turns["another engine"]
    while turns.acquire(blocking=False):
        pass
    with pytest.raises(TransferError, match="still reading from the engine another engine"):
        reader.read("another engine", int64(0), int64(0), int64(4096))
    reader.close()


@pytest.fixture(params=MODULES)
def name(request):
    return request.param


def test_it_is_loaded_only_where_it_is_configured(name):
    script = f"""
import sys
from transfer.control.handshake import Identity
from transfer.transports.base import TransportOptions
from transfer.transports.memory import Memory
from transfer.transports.registry import check_configured, make_transports
check_configured(["{name}", "tcp"], ["127.0.0.1"])
make_transports(["cuda_ipc", "cma", "shm", "tcp"], Memory(), TransportOptions(Identity())).close()
assert not [name for name in sys.modules if name.partition(".")[0] in ("nixl", "nixl_cu12", "mooncake")]
maps = open("/proc/self/maps").read()
assert "libucp" not in maps and "mooncake/engine" not in maps
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, cwd="/")


def test_a_process_that_has_it_beside_the_verbs_library_ends_without_a_crash(name):
    need(name)
    if ctypes.util.find_library("ibverbs") is None:
        pytest.skip("needs libibverbs: apt-get install libibverbs1")
    script = f"""
from transfer.control.handshake import Identity
from transfer.transports.base import TransportOptions, Unavailable
from transfer.transports.memory import Memory
from transfer.transports.rdma import opened
from transfer.transports.registry import make_transports
def of_a_card_that_is_down(*asked):
    opened.library()
    raise Unavailable("it is down")
opened._rails = of_a_card_that_is_down
options = TransportOptions(Identity(), hosts=["127.0.0.1"])
with make_transports(["rdma", "{name}"], Memory(), options) as made:
    assert list(made.listen()) == ["{name}"]
assert "libibverbs.so" in open("/proc/self/maps").read()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, cwd="/")


def test_where_it_is_not_installed_another_is_taken_with_one_line(name, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    for _ in range(2):
        with registry.make_transports([name, "tcp"], Memory(), TransportOptions(Identity())) as made:
            assert list(made.listen()) == ["tcp"]
            counted, again = made.take_counts(), made.take_counts()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"transport {name} is left out: ")
    assert counted == {"transports_left_out": {f"{name}: {line.partition(': ')[2]}": 1}} and not again
    assert line.endswith(f": pip install 'mooncake-connector[{name}]', or its wheel that fits this machine")


@pytest.mark.skipif(not CAN_MAKE, reason="NOT TESTED: certificates are made with openssl")
def test_where_tls_is_configured_it_is_left_out_since_it_does_not_encrypt(name, tmp_path, caplog):
    options = TransportOptions(Identity(), tls=Tls(**make_certificate(tmp_path)))
    with registry.make_transports([name, "tcp"], Memory(), options) as made:
        assert list(made.listen()) == ["tcp"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"transport {name} is left out: it does not encrypt, and TLS is configured"]


def test_it_takes_its_turn_in_the_order_of_the_configuration(name):
    need(name)
    source, target, here, there = Buffer(70_000, seed=1), Buffer(70_000), Memory(), Memory()
    here.register(source.address, source.nbytes)
    there.register(target.address, target.nbytes)
    options = TransportOptions(Identity())
    for order in ([name, "tcp"], ["tcp", name]):
        target.bytes[:] = 0
        grant = there.grant(int64(target.address), int64(target.nbytes))
        with (
            registry.make_transports(order, here, options) as near,
            registry.make_transports(order, there, options) as far,
        ):
            peer = near.connect(far.listen(), deadline_s=60)
            assert peer.transport == order[0]
            write = peer.write(grant, int64(source.address), grant.addresses, grant.nbytes, deadline_s=120)
            assert outcome_of(write).ok and (target.bytes == source.bytes).all()


def test_what_is_no_origin_is_refused(name):
    need(name)
    kind = registry.transport_class(name)
    with kind(Memory()) as transport:
        for origin in (b"", b"\xff" * 40):
            with pytest.raises(TransferError):
                transport.reader.meet(origin)


def test_memory_of_a_device_goes_through_stages_that_the_library_is_told_of(name):
    """Over a stand-in for the driver, whose device memory nothing else can touch."""
    need(name)
    LIBRARY.__init__()
    nbytes = 3 * STAGE_NBYTES + 5
    source, target, here, there = SealedBuffer(nbytes, seed=1), SealedBuffer(nbytes), Memory(), Memory()
    here.register(source.address, nbytes)
    there.register(target.address, nbytes)
    grant = there.grant(int64(target.address), int64(nbytes))
    options = TransportOptions(Identity(), place=OnDevice(Driver(LIBRARY), 0))
    with (
        registry.make_transports([name], here, options) as near,
        registry.make_transports([name], there, options) as far,
    ):
        peer = near.connect(far.listen(), deadline_s=60)
        assert peer.transport == name
        write = peer.write(grant, int64(source.address), grant.addresses, grant.nbytes, deadline_s=120)
        assert outcome_of(write).ok
        peer.close()
    assert (target.bytes == source.bytes).all() and not LIBRARY.locked


class Agent:
    """What of one of NIXL's is needed to be told of memory and of peers."""

    def __init__(self):
        self.is_full = False
        self.memory, self.peers = set(), set()

    def register_memory(self, rows, kind):
        assert not self.is_full, "no room"
        self.memory.update(rows)
        return rows

    def deregister_memory(self, rows):
        self.memory.difference_update(rows)

    def add_remote_agent(self, origin):
        assert not self.is_full, "no room"
        self.peers.add(origin)
        return origin

    def remove_remote_agent(self, name):
        self.peers.remove(name.encode())


@pytest.fixture
def reader():
    """Of which the last agent may be full; the library is not needed."""
    made = NixlReader.__new__(NixlReader)
    made._agents, made._lock, made._met = [Agent(), Agent()], threading.Lock(), Counter()
    return made


def test_memory_that_one_of_nixls_agents_refuses_is_known_to_none(reader):
    """It goes back to the system, and other memory may lie there next."""
    first, last = reader._agents
    last.is_full = True
    with pytest.raises(TransferError, match="no room"):
        reader.stage(4096, 100)
    assert not first.memory
    last.is_full = False
    reader.stage(4096, 100)
    assert first.memory == last.memory == {(4096, 100, 0, "")}


def test_a_peer_that_one_of_nixls_agents_refuses_is_known_to_none_unless_another_reads_from_there(reader):
    first, last = reader._agents
    last.is_full = True
    for _ in range(2):
        with pytest.raises(TransferError, match="no room"):
            reader.meet(b"peer")
        assert not first.peers
    last.is_full = False
    assert reader.meet(b"peer") == "peer"
    last.is_full = True
    with pytest.raises(TransferError, match="no room"):
        reader.meet(b"peer")
    assert first.peers == last.peers == {b"peer"}
    reader.part("peer")
    assert not first.peers and not last.peers
