"""The `tcp` transport over TLS does what every transport must, and lets nobody in without a certificate."""

import os
import socket
import ssl
import threading
from contextlib import ExitStack, suppress

import msgspec
import pytest
from certificates import CAN_MAKE, make_certificate, tls_process

from transfer.control.handshake import Identity
from transfer.testing.conformance import TransportConformance
from transfer.testing.memory import Buffer, int64
from transfer.testing.waiting import outcome_of
from transfer.transports import receiver
from transfer.transports.base import TransferError, Unavailable
from transfer.transports.incoming import Connection
from transfer.transports.memory import Memory
from transfer.transports.network import decode_endpoint
from transfer.transports.tcp import TcpTransport
from transfer.transports.tls import Tls

pytestmark = pytest.mark.skipif(not CAN_MAKE, reason="makes its certificates with `openssl`")


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    """Files of two authorities that know nothing of each other."""
    made = [make_certificate(tmp_path_factory.mktemp(name)) for name in ("ours", "others")]
    with tls_process(made[0]):
        yield made


@pytest.mark.slow
class TestTcpWithTls(TransportConformance):
    transport = TcpTransport

    @pytest.fixture
    def options(self, authorities):
        return {"tls": authorities[0], "lost_after_s": 60.0}  # a busy machine may leave a thread waiting for seconds


def connect(listener_tls, tls):
    memory, there = Memory(), Memory()
    listener = TcpTransport(there, Identity(), tls=listener_tls)
    with listener, TcpTransport(memory, Identity(), tls=tls) as sender:
        return sender.connect(listener.listen(), deadline_s=30).transport


def test_a_peer_of_another_authority_is_turned_away_by_both_sides(authorities):
    ours, others = (Tls(**files) for files in authorities)
    assert connect(ours, ours) == "tcp"
    with pytest.raises(Unavailable):
        connect(ours, others)
    believes_anybody = Tls(ours.certificate, ours.key, others.authority)
    with pytest.raises(Unavailable, match="certificate verify failed"):
        connect(ours, believes_anybody)
    with pytest.raises(Unavailable):
        connect(believes_anybody, ours)


def test_a_plain_peer_and_a_tls_peer_do_not_meet(authorities):
    ours = Tls(**authorities[0])
    with pytest.raises(Unavailable):
        connect(ours, None)
    with pytest.raises(Unavailable):
        connect(None, ours)


@pytest.mark.slow
def test_unknown_peers_at_a_tls_listener_lose_their_own_connection_only(authorities, monkeypatch):
    """Those that say anything at once, those that say nothing after a time; and proper peers are served beside them."""
    monkeypatch.setattr(receiver, "HANDSHAKE_S", 4.0)
    memory, there, tls = Memory(), Memory(), Tls(**authorities[0])
    with TcpTransport(there, tls=tls) as listener, TcpTransport(memory, tls=tls) as sender, ExitStack() as stack:
        endpoint = listener.listen()
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(70000), b"\xff" * 64):
            stranger = socket.create_connection(decode_endpoint(endpoint).addresses[0], timeout=30)
            stack.enter_context(stranger)
            with suppress(ConnectionError):
                stranger.sendall(said)
                assert sender.connect(endpoint, deadline_s=30).alive
                while stranger.recv(4096):
                    pass


@pytest.mark.parametrize("of, step", [(TcpTransport, "_admit"), (Connection, "_shake")])
def test_a_peer_that_is_dropped_during_either_handshake_tries_again(authorities, monkeypatch, of, step):
    go_on, dropped, ours = getattr(of, step), [], Tls(**authorities[0])

    def crowded(self, *accepted):
        if len(dropped) == 4:
            return go_on(self, *accepted)
        dropped.append(self)
        if len(dropped) % 2:  # what was not read makes the end a reset
            os.read(accepted[0].fileno(), 4096) if accepted else self.channel.recv(1)
        raise TransferError("too many others")

    monkeypatch.setattr(of, step, crowded)
    assert connect(ours, ours) == "tcp"
    assert len(dropped) == 4


def test_a_client_without_a_certificate_is_turned_away(authorities):
    ours = Tls(**authorities[0])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with TcpTransport(Memory(), Identity(), tls=ours) as listener:
        address = decode_endpoint(listener.listen()).addresses[0]
        with (
            socket.create_connection(address, timeout=10) as plain,
            pytest.raises(ssl.SSLError, match=r"(?i)certificate"),
        ):
            context.wrap_socket(plain).recv(1)


def test_no_bytes_of_a_transfer_are_seen_on_the_way(authorities):
    """Negative control: without TLS they are."""
    for tls, seen in ((None, True), (Tls(**authorities[0]), False)):
        memory, there, text = Memory(), Memory(), b"canary of the KV cache" * 100
        source, target = Buffer(len(text)), Buffer(len(text))
        source.bytes[:] = list(text)
        with TcpTransport(there, tls=tls) as listener, socket.create_server(("127.0.0.1", 0)) as between:
            endpoint = listener.listen()
            wire = relay(between, decode_endpoint(endpoint).addresses[0])
            with TcpTransport(memory, tls=tls, streams=1) as sender:
                peer = sender.connect(moved(endpoint, between), deadline_s=30)
                memory.register(source.address, source.nbytes)
                there.register(target.address, target.nbytes)
                grant = there.grant(int64(target.address), int64(target.nbytes))
                whole = int64(source.address), grant.addresses, grant.nbytes
                done = outcome_of(peer.write(grant, *whole, deadline_s=30))
                assert done.ok and bytes(target.bytes) == text
        assert (b"canary" in bytes(wire)) == seen


def moved(endpoint, between):
    """The same endpoint, but at the address of the relay."""
    return msgspec.msgpack.encode(msgspec.structs.replace(decode_endpoint(endpoint), addresses=[between.getsockname()]))


def relay(between, address):
    """Pass one connection's bytes on, both ways; what went towards `address` is kept."""
    wire = bytearray()

    def run():
        here, _ = between.accept()
        there = socket.create_connection(address)

        def back():
            while data := there.recv(65536):
                here.sendall(data)

        threading.Thread(target=back, daemon=True).start()
        while data := here.recv(65536):
            wire.extend(data)
            there.sendall(data)
        there.shutdown(socket.SHUT_WR)

    threading.Thread(target=run, daemon=True).start()
    return wire


def test_files_that_are_no_certificates_are_refused_by_name(tmp_path):
    (tmp_path / "no.pem").write_text("nothing")
    tls = Tls(*[str(tmp_path / "no.pem")] * 3)
    with pytest.raises(TransferError, match=r"no\.pem"):
        TcpTransport(Memory(), tls=tls)
