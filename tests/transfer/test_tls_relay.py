"""What the process that does TLS does with one connection, between an engine's socket and a network's."""

import errno
import json
import resource
import select
import socket
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from certificates import CAN_MAKE, make_certificate
from simulated.waiting import wait_for

from transfer.transports import tls_relay
from transfer.transports.tls_relay import CHUNK_NBYTES, MAX_WAITING, Backlog, Relayed, make_context

pytestmark = pytest.mark.skipif(not CAN_MAKE, reason="makes its certificates with `openssl`")

MIB = 1 << 20
MUCH = b"0123456789abcdef" * (MIB // 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("ours"))


class Ends:
    """A relayed connection; `engine` and `network` are its sockets, `outcome` has what `run` raised."""

    def __init__(self, files, server=True, backlog=None):
        self.engine, plain = socket.socketpair()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.network = socket.create_connection(listener.getsockname())
            wire, _ = listener.accept()
        for end in (self.engine, self.network):
            end.settimeout(60)
        context = make_context(**files, server=server)
        self.relayed = Relayed(plain, wire, context, backlog or Backlog(), server=server)
        self.outcome = []
        self.turns = 0
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        ready = self.relayed._ready

        def counted():
            self.turns += 1
            return ready()

        self.relayed._ready = counted
        try:
            self.relayed.run()
            self.outcome.append(None)
        except OSError as error:
            self.outcome.append(error)
        self.relayed.close()

    def peer(self, files, server=False, **options):
        """The network's end, as Python's own TLS has it."""
        context = make_context(**files, server=server)
        self.network = context.wrap_socket(self.network, server_side=server, suppress_ragged_eofs=False, **options)
        wait_for(lambda: self.relayed._room)
        return self.network

    def ended(self):
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.outcome[0]

    def rests(self):
        """Whether its thread waits, however often it is looked."""
        before = self.turns
        time.sleep(0.2)
        return self.turns - before < 5


@contextmanager
def relayed(files, **options):
    ends = Ends(files, **options)
    try:
        yield ends
    finally:
        ends.engine.close()
        ends.network.close()
        ends.thread.join(60)


def fill(end, ends):
    """Say something until nobody takes any more of it; how much was taken."""
    end.settimeout(0.2)
    taken, before = 0, -1
    while taken > before or not ends.rests():
        before = taken
        with suppress(TimeoutError, ssl.SSLWantWriteError):
            while True:
                taken += end.send(MUCH[:CHUNK_NBYTES])
    end.settimeout(60)
    return taken


def read(end, nbytes):
    """As many bytes, or those up to the end."""
    data = bytearray()
    while len(data) < nbytes and (more := end.recv(min(MIB, nbytes - len(data)))):
        data += more
    return bytes(data)


def says(end, data):
    """Until nobody is there any more."""
    with suppress(OSError):
        end.sendall(data)


def pump(peer):
    """Say back what was said, all in one thread, as an object of `ssl` has to be used."""
    with suppress(OSError):
        for _ in range(len(MUCH) // CHUNK_NBYTES):
            peer.sendall(read(peer, CHUNK_NBYTES))


@pytest.mark.parametrize("server", [True, False])
def test_both_ways_go_on_at_the_same_time(files, server):
    with relayed(files, server=server) as ends:
        peer = ends.peer(files, server=not server)
        sending = [threading.Thread(target=says, args=(ends.engine, MUCH)), threading.Thread(target=pump, args=(peer,))]
        for thread in sending:
            thread.start()
        assert read(ends.engine, len(MUCH)) == MUCH
        for thread in sending:
            thread.join(60)
            assert not thread.is_alive()


def test_who_reads_nothing_holds_up_the_other_way_for_nobody_and_costs_little(files):
    """The engine first, then the peer; each writes until nothing more is taken, while nobody reads."""
    with relayed(files) as ends:
        peer = ends.peer(files)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for end in (ends.engine, peer):
            fill(end, ends)
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 16 * MIB
        assert len(ends.relayed._cipher) < 2 * CHUNK_NBYTES and len(ends.relayed._clear) <= MAX_WAITING
        assert read(peer, MIB) and read(ends.engine, CHUNK_NBYTES)


def test_what_was_said_before_the_engine_closed_arrives_and_the_end_is_one(files):
    with relayed(files) as ends:
        peer = ends.peer(files)
        sending = threading.Thread(target=lambda: (says(ends.engine, MUCH), ends.engine.close()))
        sending.start()
        assert read(peer, len(MUCH) + 1) == MUCH
        with suppress(ssl.SSLZeroReturnError):
            assert peer.recv(1) == b"", "close_notify came: anything else raises"
        peer.close()
        sending.join()
        assert ends.ended() is None


def test_what_is_left_when_the_engine_has_closed_is_sent_for_a_time_only(files, monkeypatch):
    monkeypatch.setattr(tls_relay, "FAREWELL_S", 0.5)
    with relayed(files) as ends:
        ends.relayed._wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # it takes next to nothing more
        ends.peer(files)
        fill(ends.engine, ends)
        ends.engine.close()
        assert ends.ended() is None


def test_waiting_for_a_peer_when_the_engine_has_closed_costs_no_processor_time(files):
    with relayed(files) as ends:
        ends.relayed._wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # it takes next to nothing more
        ends.peer(files)
        fill(ends.engine, ends)
        ends.engine.close()
        wait_for(lambda: ends.relayed._plain in ends.relayed._gone)
        wait_for(ends.rests)


def test_a_peer_that_does_not_close_is_waited_for_for_a_time_only(files, monkeypatch):
    monkeypatch.setattr(tls_relay, "FAREWELL_S", 0.5)
    with relayed(files) as ends:
        ends.peer(files)
        ends.engine.close()
        assert ends.ended() is None


def test_peers_that_never_close_keep_no_newcomer_out(files, monkeypatch):
    """Who has a certificate, and no more, is dropped by the engine; what waits for such peers to close is bounded."""
    monkeypatch.setattr(tls_relay, "FAREWELL_S", 3600.0)
    monkeypatch.setattr(tls_relay, "MAX_CONNECTIONS", 6)
    monkeypatch.setattr(tls_relay, "MAX_LEAVING", 2)
    ours, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    relay = tls_relay.Relay(control)
    thread = threading.Thread(target=relay.run)
    thread.start()
    peers = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ours, control:
        for number in range(20):
            engine, plain = socket.socketpair()
            network = socket.create_connection(listener.getsockname(), timeout=60)
            wire, _ = listener.accept()
            with engine, plain, wire:
                order = json.dumps([number, True, list(files.values())]).encode()
                socket.send_fds(ours, [order], [plain.fileno(), wire.fileno()])
                peers.append(make_context(**files, server=False).wrap_socket(network))
                peers[-1].sendall(b"first words")
                engine.settimeout(60)
                assert read(engine, 11) == b"first words"
            wait_for(lambda: all(one.leaves_by < float("inf") for one in list(relay._threads.values())))
            wait_for(lambda: len(relay._threads) <= 3)
        for peer in peers:
            peer.close()
        wait_for(lambda: not relay._threads)
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    assert not thread.is_alive()


def test_an_engine_that_has_not_read_all_it_was_told_may_let_go(files):
    ours, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    relay, ends = tls_relay.Relay(control), []
    thread = threading.Thread(target=lambda: ends.append(relay.run()))
    thread.start()
    with ours, control, socket.socket() as plain, socket.socket() as wire:
        order = json.dumps([1, True, ["/nonexistent"] * 3]).encode()
        socket.send_fds(ours, [order], [plain.fileno(), wire.fileno()])
        wait_for(lambda: select.select([ours], [], [], 0)[0])  # it says that there are no such files
        ours.close()
        thread.join(60)
    assert ends == [None], "not by an error"


def test_an_end_of_the_peer_is_an_end_and_the_engine_may_still_speak(files):
    with relayed(files) as ends:
        peer = ends.peer(files)
        peer.sendall(b"last words")
        with suppress(ssl.SSLError, OSError):
            peer.setblocking(False)
            peer.unwrap()
        assert read(ends.engine, 100) == b"last words"
        ends.engine.sendall(b"answer")
        ends.engine.close()
        assert ends.ended() is None


def test_a_connection_that_is_cut_off_is_an_error_after_what_came_before(files):
    """TLS did not say that it ends. Negative control: the test above."""
    with relayed(files) as ends:
        peer = ends.peer(files)
        peer.sendall(b"last words")
        raw = socket.socket(fileno=peer.detach())
        raw.shutdown(socket.SHUT_WR)
        assert read(ends.engine, 100) == b"last words"
        error = ends.ended()
        raw.close()
        assert isinstance(error, ConnectionResetError) and "cut off" in error.strerror


def test_what_the_peer_says_is_decrypted_while_the_engine_is_busy(files):
    with relayed(files) as ends:
        speaker = threading.Thread(target=says, args=(ends.peer(files), MUCH))
        speaker.start()
        wait_for(lambda: len(ends.relayed._clear) == MAX_WAITING and ends.rests())
        assert read(ends.engine, len(MUCH)) == MUCH
        speaker.join(60)


def test_all_connections_together_have_only_so_many_readings_waiting(files, monkeypatch):
    monkeypatch.setattr(tls_relay, "MAX_WAITING_OF_ALL", 6)
    backlog = Backlog()
    with relayed(files, backlog=backlog) as one, relayed(files, backlog=backlog) as other:
        speakers = []
        for ends in (one, other):
            speakers.append(threading.Thread(target=says, args=(ends.peer(files), MUCH)))
            speakers[-1].start()
            wait_for(lambda: ends.relayed._clear and ends.rests())  # noqa: B023
        assert len(one.relayed._clear) == 6 and len(other.relayed._clear) == 1 and backlog.count == 7
        assert read(other.engine, len(MUCH)) == MUCH == read(one.engine, len(MUCH))
        for speaker in speakers:
            speaker.join(60)
        wait_for(lambda: not backlog.count)
        speakers = [threading.Thread(target=says, args=(one.network, MUCH))]
        speakers[0].start()
        wait_for(lambda: backlog.count == 6)
        one.engine.close()
        speakers[0].join(60)
        one.network.close()
        one.ended()
        assert not backlog.count, "what it had waiting went with it"


def test_a_forged_record_is_an_error_after_what_came_before(files):
    """Also where the engine does not take that at once."""
    with relayed(files) as ends:
        ends.relayed._plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least there is
        peer, data = ends.peer(files), MUCH[: CHUNK_NBYTES // 2]
        peer.sendall(data)
        wait_for(lambda: ends.relayed._clear and ends.rests())
        peer.sendall(data)  # so that this and the forged one are read at once, and not given at once
        raw = socket.socket(fileno=peer.detach())
        raw.sendall(b"\x17\x03\x03\x00\x40" + bytes(64))
        assert read(ends.engine, MIB) == data * 2
        error = ends.ended()
        assert isinstance(error, ssl.SSLError) and "bad record mac" in error.strerror.replace("_", " ").lower()
        raw.close()


def test_the_engine_may_read_late_and_gets_all_of_what_came_before_a_reset(files):
    """And the thread sleeps meanwhile, though the network's end is gone."""
    with relayed(files) as ends:
        peer = ends.peer(files)
        sent = fill(peer, ends)
        raw = socket.socket(fileno=peer.detach())
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raw.close()
        wait_for(lambda: ends.relayed._wire in ends.relayed._gone)
        wait_for(ends.rests)
        got = read(ends.engine, 100 * MIB)
        assert MUCH.startswith(got[:CHUNK_NBYTES]) and CHUNK_NBYTES <= len(got) <= sent
        assert isinstance(ends.ended(), ConnectionError)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" + bytes(511), b"\xff" * 4096])
def test_what_is_no_tls_ends_with_a_reason(files, said):
    with relayed(files) as ends:
        ends.network.sendall(said)
        assert isinstance(ends.ended(), ssl.SSLError)
        assert ends.engine.recv(1) == b""


def test_an_engine_that_gives_up_in_mid_handshake_ends_it_at_once(files):
    with relayed(files) as ends:
        ends.network.sendall(b"\x16\x03\x01")
        ends.engine.close()
        assert ends.ended().errno == errno.ECONNABORTED
        with suppress(ConnectionResetError):  # what was said may not have been read
            assert ends.network.recv(1) == b""


def test_bytes_that_trickle_in_are_put_together(files):
    with relayed(files) as ends, socket.create_server(("127.0.0.1", 0)) as between:
        outer = socket.create_connection(between.getsockname())
        inner, _ = between.accept()
        network, ends.network = ends.network, outer

        def trickle(source, target, step):
            with suppress(OSError):
                while data := source.recv(65536):
                    for at in range(0, len(data), step):
                        target.sendall(data[at : at + step])

        for pair in ((inner, network, 97), (network, inner, 65536)):
            threading.Thread(target=trickle, args=pair, daemon=True).start()
        network.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = ends.peer(files)
        data = MUCH[: 3 * CHUNK_NBYTES + 5]
        peer.sendall(data)
        assert read(ends.engine, len(data)) == data
        ends.engine.sendall(b"thanks")
        assert read(peer, 6) == b"thanks"
        network.close()


def test_keys_may_change_in_the_middle(files, tmp_path):
    """`openssl s_client` asks for that: the answer is a message of TLS's own, which the engine does not see."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        command = ["openssl", "s_client", "-connect", address, "-cert", files["certificate"], "-key", files["key"]]
        with subprocess.Popen([*command, "-quiet", "-no_ign_eof"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL) as client:
            wire, _ = listener.accept()
            engine, plain = socket.socketpair()
            connection = Relayed(plain, wire, make_context(**files, server=True), Backlog(), server=True)
            thread = threading.Thread(target=connection.run)
            thread.start()
            engine.settimeout(60)
            for line in (b"one\n", b"K\n", b"two\n"):
                client.stdin.write(line)
                client.stdin.flush()
                time.sleep(0.1)
            assert read(engine, 8) == b"one\ntwo\n"
            engine.sendall(b"three\n")
            assert client.stdout.readline() == b"three\n"
            client.stdin.close()
            engine.close()
            thread.join(60)


def test_polling_sees_an_engine_that_closes_while_it_is_written_to(files):
    """The bytes that it does not want any more are dropped, and the peer is not held up."""
    with relayed(files) as ends:
        peer = ends.peer(files)
        sending = threading.Thread(target=says, args=(peer, MUCH))
        sending.start()
        assert read(ends.engine, 1000)
        ends.engine.close()
        wait_for(lambda: ends.relayed._is_left)
        sending.join(60)
        assert not sending.is_alive()
        peer.close()
        ends.ended()
