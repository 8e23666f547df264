"""No bytes make a parser of this package do more than refuse them.

One short round for each parser; with MOONCAKE_CONNECTOR_STRESS_S=600 they go on for so many seconds together.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated.fuzz import STRESS_S, damaged, fuzz
from simulated.ranks import SMALL
from simulated.sides import (
    SMALL_RANK,
    announce,
    close,
    granted,
    introduction,
    landed,
    make_consumer,
    open_producer,
    report,
    status,
)

from transfer.control.directory import InstanceCard, RankCard, decode_card
from transfer.control.handshake import Client, HandshakeError, Identity, Server
from transfer.plan.pairing import Pairing, pair_sections, routes
from transfer.protocol.messages import Granted, Introduction, MessageError, decode, encode
from transfer.protocol.orders import Send, Verify
from transfer.testing.memory import int64
from transfer.testing.waiting import outcome_of
from transfer.transports import local, network, tcp
from transfer.transports.base import Cause, Grant, TransferError, Unavailable
from transfer.transports.memory import Memory
from transfer.transports.wire import (
    ANSWER_NBYTES,
    BLOCK_NBYTES,
    HEADER_NBYTES,
    CopyOrder,
    CopyStatus,
    WireError,
    decode_answer,
    decode_columns,
    decode_order,
    encode_answer,
)

SECRET = b"sixteen bytes or more"


def handshake() -> tuple[bytes, bytes, bytes, bytes]:
    """What both sides said in one that succeeded."""
    client, server = Client(Identity(SECRET), "test"), Server(Identity(SECRET), "test")
    hello = client.start()
    challenge = server.receive(hello)
    proof = client.receive(challenge)
    welcome = server.receive(proof)
    client.receive(welcome)
    assert client.peer and server.peer
    return hello, challenge, proof, welcome


HELLO, CHALLENGE, PROOF, WELCOME = handshake()
REFUSAL = Server.refusal(HandshakeError("not today"))
TO_PRODUCER = [announce(), granted(), report(again=[0]), close(), introduction()]
TO_CONSUMER = [landed(), status()]
MESSAGES = [encode(message) for message in TO_PRODUCER + TO_CONSUMER]
CARD = RankCard("127.0.0.1", 4242, b"i" * 16, SMALL_RANK)


def a_server(data: bytes) -> None:
    server = Server(Identity(SECRET), "test")
    with suppress(HandshakeError):
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            assert len(server.receive(part)) < 2048
    assert server.peer is None


def a_client(data: bytes) -> None:
    client = Client(Identity(SECRET), "test")
    client.start()
    with suppress(HandshakeError):
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            assert len(client.receive(part)) < 2048
    assert client.peer is None


def messages(data: bytes) -> bool:
    """Those that pass are no trouble to either side, in mid-transfer."""
    try:
        message = decode(data)
    except MessageError:
        return False
    assert decode(encode(message)) == message
    producer, consumer = open_producer("D0"), make_consumer()
    producer.computed("t", 0, 8, 0.0)
    consumer.receive("P0", landed(stop_token=4), 0.0)
    for side, peer in ((producer, "D0"), (consumer, "P0")):
        side.receive(peer, message, 1.0)
        side.tick(2.0)
        for order in side.take():
            if isinstance(order, Send):
                decode(encode(order.message))
            elif isinstance(order, Verify):
                consumer.verified(order.peer, order.transfer.name, order.landed, False, 2.0)
    return True


def plans(data: bytes) -> bool:
    """An introduction and a grant that pass are mapped, or refused for what they say."""
    try:
        message = decode(data)
    except MessageError:
        return False
    with suppress(TransferError):
        if isinstance(message, Introduction):
            for _, pairing in pair_sections(SMALL_RANK, message.layout, message.parts).values():
                pairing.copies(pairing.layers, 0, 4, [1], [0])
        elif isinstance(message, Granted):
            pairing = Pairing(SMALL, SMALL, SMALL.shard)
            SMALL_RANK.check_tables(message.tables)
            (wanted,) = message.tables
            table = range(-(-wanted.stop_token // 4)) if wanted.stop_token < 1 << 16 else [0]
            copies = pairing.copies(range(2), wanted.first_token, wanted.stop_token, table, wanted.block_ids)
            assert (copies.destination < SMALL.blocks.layer_addresses[1] + 4 * SMALL.blocks.block_stride).all()
        return True
    return False


def orders(data: bytes) -> bool:
    with suppress(WireError):
        if len(data) < BLOCK_NBYTES:
            return False
        order = decode_order(data, 1 << 20)
        nbytes = HEADER_NBYTES + order.pieces * 2 * 8
        if len(data) == max(nbytes, BLOCK_NBYTES):
            columns = decode_columns(order, data, 2)
            assert min(columns[0]) >= 0 and min(columns[1]) >= 1 and sum(columns[1]) == order.nbytes <= 1 << 20
            mark = b"m" * order.is_marked
            assert order.encode(*columns, mark=mark).tobytes()[:nbytes] == data[:nbytes]
            return True
    return False


def answers(data: bytes) -> bool:
    passed = 0
    for at in range(0, len(data) - ANSWER_NBYTES + 1, ANSWER_NBYTES):
        with suppress(WireError):
            answer = data[at : at + ANSWER_NBYTES]
            assert encode_answer(*decode_answer(answer)) == answer
            passed += 1
    return passed * ANSWER_NBYTES == len(data)


def endpoints(data: bytes) -> bool:
    for module in (network, local):
        with suppress(Unavailable):
            endpoint = module.decode_endpoint(data)
            assert module.decode_endpoint(msgspec.msgpack.encode(endpoint)) == endpoint
            return True
    return False


def cards(data: bytes) -> bool:
    with suppress(TransferError):
        card = decode_card(data)
        routes([rank.layout for rank in card.ranks], [SMALL_RANK])
        return True
    return False


TARGETS = {
    a_server: [HELLO, HELLO + PROOF, PROOF, REFUSAL],
    a_client: [CHALLENGE, CHALLENGE + WELCOME, WELCOME, REFUSAL],
    messages: MESSAGES,
    plans: [encode(granted(block_ids=[3, 1])), encode(introduction())],
    orders: [
        CopyOrder(1, b"k" * 16, 1, 100).encode(int64(4096), int64(100)).tobytes(),
        CopyOrder(2, b"k" * 16, 3, 100).encode([0, 10, 20], [1, 2, 97]).tobytes(),
        CopyOrder(3, b"k" * 16, 20, 20).encode(np.arange(20), np.ones(20, dtype=np.int64)).tobytes(),
    ],
    answers: [encode_answer(1, CopyStatus.OK) + encode_answer(2**64 - 1, CopyStatus.FORBIDDEN)],
    endpoints: [
        msgspec.msgpack.encode(network.NetworkEndpoint([("127.0.0.1", 9), ("::1", 65535)], b"i" * 16)),
        msgspec.msgpack.encode(local.LocalEndpoint("boot", "0" * 32, b"i" * 16)),
    ],
    cards: [msgspec.msgpack.encode(InstanceCard("engine", [CARD, CARD]))],
}


@pytest.mark.slow
@pytest.mark.parametrize("survives", TARGETS, ids=lambda target: target.__name__)
def test_no_bytes_do_more_than_be_refused(survives):
    fuzz(survives, TARGETS[survives], STRESS_S / len(TARGETS))


@pytest.mark.parametrize("passes", [target for target in TARGETS if target not in (a_server, a_client)])
def test_the_proper_bytes_that_damaged_ones_are_made_of_pass(passes):
    assert all(passes(data) for data in TARGETS[passes])


class Rogue:
    """A receiver that passes the handshake, and then says anything."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.says = b""
        self.endpoint = msgspec.msgpack.encode(network.NetworkEndpoint([self.listener.getsockname()], b"i" * 16))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                with connection, suppress(OSError):
                    server = Server(Identity(SECRET, instance=b"i" * 16), "tcp")
                    while server.peer is None:
                        connection.sendall(server.receive(connection.recv(1024)))
                    connection.recv(64)
                    connection.sendall(self.says)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass


@pytest.fixture(scope="module")
def rogue():
    rogue = Rogue()
    yield rogue
    rogue.listener.close()


ANSWERS = [encode_answer(number, status) for number in (1, 2) for status in CopyStatus]


@settings(max_examples=60)
@given(
    answers=damaged(ANSWERS) | st.binary(max_size=100) | st.lists(st.sampled_from(ANSWERS), max_size=3).map(b"".join)
)
def test_a_receiver_that_answers_anything_ends_a_batch_and_breaks_nothing(rogue, answers):
    rogue.says = answers
    source = np.zeros(100, dtype=np.uint8)
    memory, place = Memory(), int64(source.ctypes.data)
    memory.register(source.ctypes.data, source.nbytes)
    with tcp.TcpTransport(memory, Identity(SECRET)) as transport:
        peer = transport.connect(rogue.endpoint, deadline_s=30)
        grant = Grant(b"k" * 16, int64(4096), int64(100))
        outcome = outcome_of(peer.write(grant, place, int64(4096), int64(100), deadline_s=30))
        assert outcome.cause is not Cause.DEADLINE and "Error:" not in outcome.detail  # a defect's name
        assert outcome.ok is (answers[:ANSWER_NBYTES] == encode_answer(1, CopyStatus.OK))
        peer.close()
