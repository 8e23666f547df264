"""The handshake as a state machine: who gets in, who does not, and what it does with any bytes."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.control.handshake import (
    MAX_FRAME_NBYTES,
    OLDEST_VERSION,
    VERSION,
    Challenge,
    Client,
    HandshakeError,
    Hello,
    Identity,
    Server,
    Welcome,
    is_here,
    is_loopback,
    require_secret,
)
from transfer.transports.base import TransferError

SECRET = b"sixteen bytes or more"


def frame(message):
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


def pair(client_identity=None, server_identity=None, **options):
    client = Client(client_identity or Identity(SECRET), "test", **options)
    return client, Server(server_identity or Identity(SECRET), "test")


def run(client, server):
    """Both sides until they agree; every byte that went either way."""
    to_server, to_client = client.start(), b""
    sent = [to_server]
    while client.peer is None:
        to_client = server.receive(to_server)
        assert to_client, "nobody has anything to say"
        to_server = client.receive(to_client)
        sent += [to_client, to_server]
    return sent


def test_two_sides_with_one_secret_agree():
    client, server = pair()
    run(client, server)
    assert client.peer == server.identity.instance
    assert server.peer == client.identity.instance


@pytest.mark.parametrize("older", [0, 1], ids=["client", "server"])
def test_both_sides_know_the_version_that_they_speak_which_is_the_older_ones(older):
    sides = pair()
    sides[older].version = OLDEST_VERSION
    run(*sides)
    assert [side.version for side in sides] == [OLDEST_VERSION] * 2 != [VERSION] * 2


@given(st.lists(st.integers(1, 40), min_size=1))
def test_frames_may_arrive_in_any_cut(cuts):
    client, server = pair()
    to_server = client.start()
    while client.peer is None:
        to_client = b"".join(feed(server, to_server, cuts))
        to_server = b"".join(feed(client, to_client, cuts))
    assert server.peer


def feed(side, data, cuts):
    at, turn = 0, 0
    while at < len(data):
        yield side.receive(data[at : at + cuts[turn % len(cuts)]])
        at += cuts[turn % len(cuts)]
        turn += 1


@pytest.mark.parametrize(
    "client, refusal",
    [
        (Client(Identity(b"another sixteen bytes"), "test"), "wrong secret"),
        (Client(Identity(), "test"), "wrong secret"),
        (Client(Identity(SECRET, b"\x01"), "test"), "digest 01 does not match none"),
        (Client(Identity(SECRET), "cma"), "'cma': 'test' is served here"),
        (Client(Identity(SECRET), "test", expected=b"e" * 16), "restarted"),
    ],
    ids=["another secret", "no secret", "another configuration", "another purpose", "another life of the server"],
)
def test_a_client_that_does_not_fit_is_told_what_differs(client, refusal):
    server = Server(Identity(SECRET), "test")
    with pytest.raises(HandshakeError, match=refusal):
        run(client, server)
    assert server.peer is None and client.peer is None


def test_a_server_with_another_secret_is_not_believed():
    client, _ = pair()
    client.receive(frame(Challenge(VERSION, b"n" * 32, b"i" * 16)))
    with pytest.raises(HandshakeError, match="the peer has another secret"):
        client.receive(frame(Welcome(b"m" * 32)))
    assert client.peer is None


def test_a_recorded_handshake_opens_nothing():
    client, first = pair()
    sent = run(client, first)
    server = Server(first.identity, "test")
    server.receive(sent[0])
    with pytest.raises(HandshakeError, match="wrong secret"):
        server.receive(sent[2])


def test_a_proof_sent_back_to_its_maker_is_not_believed():
    client, server = pair()
    proof = client.receive(server.receive(client.start()))
    (mac,) = (msgspec.msgpack.decode(proof[4:])["mac"],)
    with pytest.raises(HandshakeError, match="another secret"):
        client.receive(frame(Welcome(mac)))


@pytest.mark.parametrize("which", range(3))
@given(st.integers(0, 500), st.integers(1, 255))
def test_a_byte_changed_in_any_frame_lets_nobody_in(which, at, change):
    """A nonce, an instance or a proof that was altered on the way."""
    client, server = pair()
    said = bytearray(client.start())
    with suppress(HandshakeError):
        for number, side in enumerate((server, client, server)):
            if number == which:
                said[at % len(said)] ^= change
            said = bytearray(side.receive(bytes(said)))
    assert server.peer is None


def test_versions_without_overlap_are_refused_by_either_side():
    server = Server(Identity(SECRET), "test")
    asked = VERSION + 1, VERSION + 3
    refusal = rf"versions {asked[0]}\.\.{asked[1]} asked for: this side speaks {OLDEST_VERSION}\.\.{VERSION}"
    with pytest.raises(HandshakeError, match=refusal):
        server.receive(frame(Hello(*asked, b"n" * 32, b"i" * 16, b"", "test")))
    client, _ = pair()
    with pytest.raises(HandshakeError, match=f"wants version {VERSION + 1}"):
        client.receive(frame(Challenge(VERSION + 1, b"n" * 32, b"i" * 16)))


def test_a_newer_client_and_this_server_speak_the_older_version():
    server = Server(Identity(SECRET), "test")
    answer = server.receive(frame(Hello(VERSION, VERSION + 1, b"n" * 32, b"i" * 16, b"", "test")))
    assert msgspec.msgpack.decode(answer[4:], type=Challenge).version == VERSION


def test_a_refusal_reaches_the_client():
    client, _ = pair()
    client.start()
    with pytest.raises(HandshakeError, match="the peer refused: 'not today'"):
        client.receive(Server.refusal(HandshakeError("not today")))


def test_an_oversized_frame_is_refused_before_it_is_read():
    server = Server(Identity(SECRET), "test")
    with pytest.raises(HandshakeError, match=f"at most {MAX_FRAME_NBYTES}"):
        server.receive((MAX_FRAME_NBYTES + 1).to_bytes(4, "little"))


def test_a_truncated_frame_gets_nowhere():
    client, server = pair()
    assert server.receive(client.start()[:-1]) == b"" and server.peer is None


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=70) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
names = ("oldest_version", "version", "nonce", "instance", "compatibility", "purpose", "mac", "reason")


@given(
    st.sampled_from(["Hello", "Challenge", "Proof", "Welcome", "Refusal"]),
    st.dictionaries(st.sampled_from(names), values),
)
def test_no_message_of_wrong_types_gets_through(tag, fields):
    data = msgspec.msgpack.encode({"type": tag, **fields})
    for side in (Server(Identity(SECRET), "test"), Client(Identity(SECRET), "test")):
        with suppress(HandshakeError):
            side.receive(len(data).to_bytes(4, "little") + data)
        assert side.peer is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_loopback_needs_one_as_well_where_it_is_said(host):
    """Every user of the host can reach it: only what a caller keeps to itself does without."""
    assert is_loopback(host) and is_here(host)
    with pytest.raises(TransferError, match="is open to every user of this host and no shared secret"):
        require_secret(host, Identity())
    require_secret(host, Identity(SECRET))
    require_secret(host, Identity(), on_loopback=False)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "192.168.1.1", "::ffff:10.0.0.1", "fe80::1%eth0", "8.8.8.8"]
)
def test_any_other_address_needs_one(host):
    with pytest.raises(TransferError, match="is not loopback and no shared secret"):
        require_secret(host, Identity())
    require_secret(host, Identity(SECRET))


@pytest.mark.parametrize(
    "host", ["localhost", "", "example.org", "127.0.0.1%x.example.org", "::1%x.example.org", "::1%lo"]
)
def test_names_are_no_addresses(host):
    with pytest.raises(TransferError, match="literal IP address"):
        require_secret(host, Identity(SECRET))


def test_a_short_secret_is_refused_and_none_is_printed():
    with pytest.raises(ValueError, match="secret of 5 bytes: expected at least 16"):
        Identity(b"short")
    assert SECRET.decode() not in repr(Identity(SECRET))
