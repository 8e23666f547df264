"""Messages on the wire: what is sent arrives, and nothing but a message is taken for one."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from simulated.ranks import SMALL

from mooncake_connector.kv.geometry import Shard
from transfer.plan.layout import RankLayout, Table
from transfer.protocol.messages import (
    MAX_MESSAGE_NBYTES,
    Announce,
    AnyMessage,
    Close,
    Granted,
    Introduction,
    Landed,
    MessageError,
    Refused,
    Report,
    State,
    Status,
    decode,
    encode,
)

HEAD = {"transfer": "request-1", "number": 5}
RANK = RankLayout((SMALL, replace(SMALL, name="sliding")))
MESSAGES: list[AnyMessage] = [
    Announce(**HEAD, destinations=2, computed=True),
    Granted(**HEAD, destinations=2, computed=False, tables=[Table(64, 100, [4, 1])], key=b"k" * 16),
    Report(**HEAD, verified=3, again=[4], prompt=b"p" * 16),
    Close(**HEAD, destinations=2, done=False, cause="cancelled"),
    Landed(
        **HEAD, batch=3, attempt=1, first_layer=0, num_layers=2, first_token=0, stop_token=64, checksums=[(1 << 64) - 1]
    ),
    Status(**HEAD, state=State.OPEN, has_grant=False, cause=""),
    Introduction(
        layout=RANK,
        parts=[Shard(0, 2, 1, 2), None],
        endpoints={"cma": b"\x00name", "tcp": b"127.0.0.1:1"},
    ),
    Refused(cause="no transport reaches the peer"),
]


def test_an_introduction_that_asks_for_no_marks_is_one_that_older_peers_understand():
    """They refuse fields that they do not know."""
    said = msgspec.msgpack.decode(encode(INTRODUCTION))
    assert said.keys() == {"type", "layout", "parts", "endpoints"}
    assert msgspec.msgpack.decode(encode(msgspec.structs.replace(INTRODUCTION, marks=True)))["marks"] is True


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message):
    arrived = decode(encode(message))
    assert arrived == message and type(arrived) is type(message)


def table(**fields: object) -> dict[str, object]:
    return {"first_token": 64, "stop_token": 100, "block_ids": [4, 1], **fields}


def altered(message: AnyMessage, **fields: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(encode(message)), **fields})


_, GRANTED, REPORT, _, LANDED, STATUS, INTRODUCTION, _ = MESSAGES


@pytest.mark.parametrize(
    "message, fields",
    [
        (STATUS, {"type": "Unknown"}),
        (STATUS, {"number": 0}),
        (STATUS, {"number": 1 << 41}),
        (STATUS, {"number": "7"}),
        (STATUS, {"number": 7.0}),
        (STATUS, {"number": None}),
        (STATUS, {"transfer": "x" * 257}),
        (STATUS, {"transfer": b"bytes"}),
        (STATUS, {"surplus": 1}),
        (GRANTED, {"tables": [table(block_ids=[-1])]}),
        (GRANTED, {"tables": [table(block_ids=[1 << 33])]}),
        (GRANTED, {"tables": [table(block_ids=[0] * ((1 << 18) + 1))]}),
        (GRANTED, {"key": b"k" * 15}),
        (GRANTED, {"key": b"k" * 17}),
        (GRANTED, {"tables": [table(first_token=101)]}),
        (GRANTED, {"tables": [table(stop_token=1 << 41)]}),
        (GRANTED, {"tables": [table()] * 65}),
        (LANDED, {"attempt": 2}),
        (LANDED, {"first_token": 65}),
        (LANDED, {"checksums": [-1]}),
        (REPORT, {"again": [1.5]}),
        (REPORT, {"prompt": b"p" * 15}),
        (REPORT, {"prompt": b"p" * 33}),
        (REPORT, {"prompt": None}),
        (INTRODUCTION, {"endpoints": {f"t{number}": b"" for number in range(9)}}),
        (INTRODUCTION, {"endpoints": {"x" * 17: b""}}),
        (INTRODUCTION, {"endpoints": {"tcp": b"x" * 4097}}),
        (INTRODUCTION, {"endpoints": {"tcp": "text"}}),
        (INTRODUCTION, {"endpoints": {7: b""}}),
        (INTRODUCTION, {"parts": [{**msgspec.to_builtins(SMALL.shard), "head_start": -1}]}),
        (INTRODUCTION, {"layout": None}),
    ],
)
def test_what_may_not_be_is_refused(message, fields):
    assert decode(altered(message)) == message
    with pytest.raises(MessageError):
        decode(altered(message, **fields))


def test_a_field_that_is_missing_is_refused():
    fields = msgspec.msgpack.decode(encode(REPORT))
    del fields["verified"]
    with pytest.raises(MessageError, match="verified"):
        decode(msgspec.msgpack.encode(fields))


def test_an_impossible_layout_is_refused_on_arrival():
    rank = {"sections": [{**msgspec.to_builtins(SMALL), "model_heads": 1}]}
    with pytest.raises(MessageError, match="KV heads"):
        decode(altered(INTRODUCTION, layout=rank))


@pytest.mark.parametrize("field", [b"request-1", b"cancelled", b"transfer", b"Close"])
def test_text_that_is_not_utf_8_is_refused_wherever_it_is(field):
    data = encode(MESSAGES[3])
    with pytest.raises(MessageError):
        decode(data.replace(field, b"\xff" * len(field)))


def test_what_a_message_says_wrong_is_said_in_few_words():
    rank = msgspec.to_builtins(RANK)
    rank["sections"][0]["blocks"]["layer_addresses"] = [1 << 60] * 10_000
    with pytest.raises(MessageError) as caught:
        decode(altered(INTRODUCTION, layout=rank))
    assert len(str(caught.value)) < 600


def test_a_message_too_large_is_neither_sent_nor_read():
    block_ids = [(1 << 32) - 1] * (MAX_MESSAGE_NBYTES // 5)
    message = Granted(**HEAD, destinations=1, computed=True, tables=[Table(0, 1, block_ids)], key=b"k" * 16)
    with pytest.raises(MessageError, match="at most"):
        encode(message)
    with pytest.raises(MessageError, match="at most"):
        decode(b"\x00" * (MAX_MESSAGE_NBYTES + 1))


@pytest.mark.parametrize("data", [b"", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"], ids=["none", "deep", "long"])
def test_bytes_that_promise_more_than_they_are_are_refused(data):
    with pytest.raises(MessageError):
        decode(data)
