"""A thousand strangers beside honest peers: what they may take is bounded, and nobody else notices them."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import replace

import msgspec
import pytest
from causes import forget_causes
from certificates import CAN_MAKE, make_certificate
from simulated.pair import Pair
from simulated.sides import introduction
from simulated.strangers import dial, greet, is_closed, tcp_port
from simulated.waiting import wait_for

import transfer.control.connection
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import SegmentLayout
from transfer.control import pending
from transfer.control.directory import PURPOSE
from transfer.control.handshake import Identity
from transfer.driver import RANK_PURPOSE
from transfer.plan.layout import LayoutError, RankLayout
from transfer.protocol.messages import MAX_MESSAGE_NBYTES, encode
from transfer.session import NodeOptions
from transfer.transports import unix
from transfer.transports.tls import Tls

THOUSAND = 1000
NOBODY = 65534
MIB = 1 << 20


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Target(Pair):
    """A pair whose prefill instance is attacked, at its ports for control and, over TCP, its port for data."""

    def __init__(self, tls: Tls | None = None, hosts: tuple[str, ...] = ()) -> None:
        transports = ["tcp"] if hosts else ["cma", "shm"]
        super().__init__(NodeOptions(transports=transports, hosts=hosts, page_tokens=16), tls=tls)
        self.tcp = bool(hosts)
        self.all_ports = list(self.ports.values())
        if hosts:
            self.all_ports.append(tcp_port(self.decode.ranks[0].node._transports.listen()["tcp"]))

    def dial(self, number: int = 1):
        return dial(self.all_ports[number % len(self.all_ports)], tcp=self.tcp)


@pytest.fixture(params=["unix", "tcp", "tls"])
def pair(request, tmp_path):
    if request.param == "tls" and not CAN_MAKE:
        pytest.skip("makes its certificates with `openssl`")
    tls = Tls(**make_certificate(tmp_path)) if request.param == "tls" else None
    pair = Target(tls, () if request.param == "unix" else ("127.0.0.1",))
    yield pair
    pair.close()


@pytest.fixture
def here():
    pair = Target()
    yield pair
    pair.close()


@pytest.fixture(autouse=True)
def fresh_log():
    forget_causes()


@pytest.mark.parametrize("says", [b"", (1000).to_bytes(4, "little") + b"half"], ids=["nothing", "half a frame"])
def test_a_thousand_strangers_lock_nobody_out(pair, says):
    before, memory = open_files(), resident_nbytes()
    with ExitStack() as stack:
        for number in range(THOUSAND):
            connection = stack.enter_context(pair.dial(number))
            with suppress(OSError):
                connection.sendall(says)
        pair.serves()
        most = len(pair.all_ports) * pending.MAX_PENDING
        wait_for(lambda: open_files() - before <= THOUSAND + most + 40)
        assert resident_nbytes() - memory < 128 * MIB
    pair.serves()


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: to become another user needs root")
def test_another_user_is_turned_away_before_he_has_said_anything(here, caplog):
    """Also one who floods: he takes no place at all."""
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            ctypes.CDLL(None).setuid(NOBODY)
            for port in here.all_ports:
                for _ in range(100):
                    with socket.socket(socket.AF_UNIX) as connection:
                        connection.settimeout(20)
                        connection.connect(f"\0mooncake-connector/0/{port}".encode())
                        with suppress(ConnectionError):
                            assert connection.recv(1) == b""
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    here.serves()
    wait_for(lambda: f"the other end belongs to user {NOBODY}" in caplog.text)


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: to become another user needs root")
def test_a_name_that_another_user_took_is_not_believed(here):
    """He listens at the name of a port of ours: nobody tells him anything."""
    ready, done = os.pipe(), os.pipe()
    port = 1023
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            name = unix.port_name(port)
            ctypes.CDLL(None).setuid(NOBODY)
            with unix.listen_at(name, 8):
                os.write(ready[1], b"x")
                os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        with socket.socket(socket.AF_UNIX) as connection, pytest.raises(unix.OtherUser, match=f"user {NOBODY}"):
            unix.reach(connection, unix.port_name(port), time.monotonic() + 20)
        with pytest.raises(OSError, match="already in use"):
            unix.listen_at_port(port, 8)
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        for end in (*ready, *done):
            os.close(end)


def test_a_user_that_stands_for_every_unknown_one_is_refused(monkeypatch):
    monkeypatch.setattr(unix, "_unknown_user", os.geteuid)
    one, other = socket.socketpair()
    with one, other:
        unix.check_user(one)  # all users have a number here
        monkeypatch.setattr(unix, "_knows_every_user", lambda: False)
        with pytest.raises(unix.OtherUser, match="stands for every user it does not know: run as another user"):
            unix.check_user(one)


def test_two_users_may_have_the_same_port(monkeypatch):
    first, port = unix.listen_at_port(0, 1)
    with first:
        with pytest.raises(OSError, match="already in use"):
            unix.listen_at_port(port, 1)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        unix.listen_at_port(port, 1)[0].close()


def test_no_port_is_opened_without_hosts(here):
    def listening() -> set[str]:
        with open("/proc/net/tcp") as file:
            rows = [line.split() for line in file.readlines()[1:]]
        mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)}
        return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}

    assert listening() == set()
    assert here.prefill.ranks[0].node.card.host == "" and here.prefill.where.host == "127.0.0.1"
    control = Target(hosts=("127.0.0.1",))
    assert len(listening()) >= 6
    control.close()


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_half_frames_of_peers_take_little_memory_and_have_a_deadline(here, monkeypatch):
    monkeypatch.setattr(transfer.control.connection, "_FRAME_S", 1.0)
    rank = here.decode.ranks[0]
    fits = encode(introduction(layout=rank.layout, parts=[Shard(0, 4, 0, 4)], endpoints={}))
    memory = resident_nbytes()
    with ExitStack() as stack:
        greeted = []
        for _ in range(60):
            connection = stack.enter_context(dial(here.ports[RANK_PURPOSE]))
            greet(connection, RANK_PURPOSE, Identity())
            connection.sendall(len(fits).to_bytes(4, "little") + fits)
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.sendall(MAX_MESSAGE_NBYTES.to_bytes(4, "little"))
                for _ in range(64):
                    connection.send(bytes(MAX_MESSAGE_NBYTES // 64 - 1))
            greeted.append(connection)
        here.serves()
        assert resident_nbytes() - memory < 160 * MIB
        greeted[0].settimeout(60)
        assert is_closed(greeted[0])


def test_an_introduction_cannot_make_this_side_work_for_long(here, caplog):
    """A layout says of a block what it likes: this one of a quarter of a million tokens, and strides without end."""
    layout, tokens = here.decode.ranks[0].section, 1 << 18
    segment = SegmentLayout(0, ((tokens, 64),), layout.blocks.k.dim)
    large = replace(layout.blocks, num_blocks=1, block_tokens=tokens, k=segment, v=replace(segment, offset=32))
    with pytest.raises(LayoutError, match="axis of 5000 strides: at most 16"):
        replace(layout, blocks=replace(large, k=replace(segment, token=((1, 0),) * 5000)))
    memory = resident_nbytes()
    said = introduction(layout=RankLayout((replace(layout, blocks=large),)), parts=[Shard(0, 4, 0, 4)], endpoints={})
    for frame in (len(encode(said)).to_bytes(4, "little") + encode(said), (1 << 20).to_bytes(4, "little")):
        with dial(here.ports[RANK_PURPOSE]) as connection:
            greet(connection, RANK_PURPOSE, Identity())
            connection.sendall(frame)
            assert is_closed(connection)
    for said in ("block sizes with too little in common", "at most 65536 are read"):
        wait_for(lambda: said in caplog.text)  # noqa: B023 - a connection is closed first
    assert resident_nbytes() - memory < 96 * MIB
    here.serves()


def test_what_a_stranger_says_stays_on_its_line_of_the_log(here, caplog):
    said = msgspec.msgpack.encode({"type": "x\nERROR forged\x1b[31m"})
    with dial(here.ports[PURPOSE]) as connection:
        connection.sendall(len(said).to_bytes(4, "little") + said)
        assert is_closed(connection)
    wait_for(lambda: "forged" in caplog.text)  # a connection is closed first
    shown = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert len(shown) == 1
    assert all(line.isprintable() for line in shown)


def test_places_go_to_the_newest_and_are_taken_from_whoever_has_most():
    places: pending.PendingHandshakes[str] = pending.PendingHandshakes()
    assert [places.enter(f"a{n}", "a") for n in range(pending.MAX_FROM_ONE)] == [None] * pending.MAX_FROM_ONE
    assert places.enter("more", "a") == "a0"
    few = pending.MAX_PENDING - pending.MAX_FROM_ONE
    assert [places.enter(f"b{n}", f"b{n}") for n in range(few)] == [None] * few
    assert places.enter("late", "c") == "a1", "of the address that has the most, not the honest one"
    places.leave("b0")
    assert places.enter("later", "d") is None and len(places) == pending.MAX_PENDING
    assert pending.origin_of("2001:db8::1") == pending.origin_of("2001:db8::2")
    assert pending.origin_of("10.0.0.1") != pending.origin_of("10.0.0.2")
