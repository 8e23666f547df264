"""What the two sides of a transfer say to each other, and its form on the wire: MessagePack, decoded strictly.

Messages travel over a connection that the handshake has made trustworthy; even so nothing in them is taken on trust:
types, ranges and sizes are checked on arrival. Any message may be lost, doubled, late or out of order
(docs/transfer.md).
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from mooncake_connector.kv.geometry import Shard
from transfer.plan.granularity import Batch
from transfer.plan.layout import MAX_SECTIONS, RankLayout, Table
from transfer.transports.base import GRANT_KEY_NBYTES, TransferError

MAX_MESSAGE_NBYTES = 4 << 20
_MAX_PAGES = 1 << 17
_MAX_ENDPOINTS = 8
MAX_NAME_LENGTH = 256
"""Characters of a transfer's name."""
MIN_PROMPT_NBYTES, MAX_PROMPT_NBYTES = 16, 32
"""Of a digest of a prompt."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 40)]
TransferId: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]
Text: TypeAlias = Annotated[str, Meta(max_length=512)]


class MessageError(TransferError):
    """Bytes that are no message, or a message that may not be."""


class State(enum.Enum):
    """How the producer stands to one destination rank."""

    OPEN = "open"
    """The request or its KV is awaited, or batches are on their way."""
    FAILED = "failed"
    """It will send no more; `cause` says why."""
    CLOSED = "closed"
    """It knows that the consumer is through with it."""


class Message(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What all messages about a transfer have.

    `number` is what the consumer counts its transfers by, from 1, so of two of one name the greater is the later.
    """

    transfer: TransferId
    number: Annotated[int, Meta(ge=1, le=1 << 40)]


class FromConsumer(Message, frozen=True, kw_only=True):
    """What all messages of a consumer have.

    `prompt` is a digest of the tokens whose KV is wanted; empty where the engine does not say, or their name does.
    """

    prompt: Annotated[bytes, Meta(max_length=MAX_PROMPT_NBYTES)] = b""


class Announce(FromConsumer, frozen=True, kw_only=True):
    """Consumer: a request of mine will want this transfer; hold its blocks. Repeated, it renews the lease.

    `destinations` is the number of ranks here that this source rank serves. With `computed` the producer must know the
    transfer already, since the request went there first.
    """

    destinations: Count
    computed: bool


class Granted(FromConsumer, frozen=True, kw_only=True):
    """Consumer: write the tokens of each table, one of every section of mine, into its blocks.

    `key` is that of the transport's grant, which covers all of them.
    """

    destinations: Count
    computed: bool
    tables: Annotated[list[Table], Meta(max_length=MAX_SECTIONS)]
    key: Annotated[bytes, Meta(min_length=GRANT_KEY_NBYTES, max_length=GRANT_KEY_NBYTES)]


class Report(FromConsumer, frozen=True, kw_only=True):
    """Consumer: all batches before number `verified` are right; send those in `again` once more. Renews the lease."""

    verified: Count
    again: Annotated[list[Count], Meta(max_length=_MAX_PAGES)]


class Close(FromConsumer, frozen=True, kw_only=True):
    """Consumer: I want nothing more, since all is right (`done`) or for that cause; release the blocks."""

    destinations: Count
    done: bool
    cause: Text


class Landed(Message, frozen=True, kw_only=True):
    """Producer: batch number `batch` is in your memory, as the `attempt`-th try (0 or 1).

    It is a part of your section number `section`. `checksums` has one XXH3-64 for each page of the batch, in the order
    of tokens; none where the bytes were marked (see `Introduction`).
    """

    batch: Count
    attempt: Annotated[int, Meta(ge=0, le=1)]
    first_layer: Count
    num_layers: Count
    first_token: Count
    stop_token: Count
    checksums: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=_MAX_PAGES)]
    section: Annotated[int, Meta(ge=0, lt=MAX_SECTIONS)] = 0

    @property
    def part(self) -> Batch:
        """What the batch has."""
        return Batch(self.first_layer, self.num_layers, self.first_token, self.stop_token, self.section)


class Status(Message, frozen=True, kw_only=True):
    """Producer: how I stand, and whether I know what was granted. Repeated, it says that I am alive.

    With `computes` its engine has the request, and prefill is not over: it is computed, or queues.
    """

    state: State
    has_grant: bool
    cause: Text
    computes: bool = False


class Introduction(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Consumer: what you must know of my rank to write to it. Once for each control connection, before anything else.

    `parts` has what you send me of each section of my layout, if anything. `endpoints` says for each transport by name
    where it listens. With `marks`, which no peer before version 8 understands, what comes from stages is wanted with
    checksums beside the bytes (`transfer.transports.passing`), at the first attempt.
    """

    layout: RankLayout
    parts: Annotated[list[Shard | None], Meta(max_length=MAX_SECTIONS)]
    endpoints: Annotated[
        dict[Annotated[str, Meta(max_length=16)], Annotated[bytes, Meta(max_length=4096)]],
        Meta(max_length=_MAX_ENDPOINTS),
    ]
    marks: bool = False


class Refused(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Producer: no transport of mine reaches your rank, so none of your transfers will have anything of it."""

    cause: Text


TransferMessage: TypeAlias = Announce | Granted | Report | Close | Landed | Status
AnyMessage: TypeAlias = TransferMessage | Introduction | Refused

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Raises MessageError where the message is too large to be accepted anywhere."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_NBYTES:
        raise MessageError(f"{type(message).__name__} of {len(data)} bytes: at most {MAX_MESSAGE_NBYTES} are accepted")
    return data


def decode(data: bytes | bytearray | memoryview) -> AnyMessage:
    """The message that `data` is. Raises MessageError and nothing else, whatever the bytes."""
    if len(data) > MAX_MESSAGE_NBYTES:
        raise MessageError(f"a message of {len(data)} bytes: at most {MAX_MESSAGE_NBYTES} are accepted")
    try:
        message = _decoder.decode(data)
    except Exception as error:  # also those of a layout's checks, and bare UnicodeDecodeError for text that is no UTF-8
        raise MessageError(f"not a message: {str(error)[:500]}") from None
    if isinstance(message, Landed) and message.stop_token < message.first_token:
        raise MessageError(f"tokens {message.first_token}..{message.stop_token - 1}")
    if isinstance(message, FromConsumer) and 0 < len(message.prompt) < MIN_PROMPT_NBYTES:
        raise MessageError(f"a digest of a prompt has at least {MIN_PROMPT_NBYTES} bytes, not {len(message.prompt)}")
    return message
