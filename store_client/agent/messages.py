"""What travels between an engine's process and the agent: frames, each a length (uint32, little endian) and a
MessagePack map, over a Unix socket in the pool's folder. Sans-I/O.

    engine -> agent     Hello, then Place, Ask, Seek, Which, Cancel, Forget, Query and Stop in any order
    agent  -> engine    Welcome or Refused, then Told, Found, Shards and Report

A Place gives a namespace and shard the number under which Asks name them. Every Ask is answered by one or more Told,
the last of which is `done`, a Seek by Found and a Which by Shards likewise, each in place of the one before. Decoding
is strict and bounded: what is not exactly one of these is Junk.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from mooncake_connector.errors import MooncakeConnectorError
from mooncake_connector.kv.keys import KEY_NBYTES

VERSION = 3
"""Of these messages; engine and agent must have the same. A person's command and an agent need not (`ForPeople`)."""
MAX_KEYS = 16384
"""Of an Ask: a chain of a million tokens of the usual page. The rest of a longer one is not asked for."""
MAX_SOUGHT = 1024
"""Keys of a Seek: each may cost a tier a call."""
MAX_SHARDS = 64
"""In a Shards; of a model that is split in more ways the rest is not told."""
MAX_FRAME_NBYTES = 1 << 20
MAX_HELLO_NBYTES = 1024
_HEAD = struct.Struct("<I")

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 31)]
_Number: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 53)]
_Key: TypeAlias = Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
_Word: TypeAlias = Annotated[str, Meta(max_length=64)]


class Junk(MooncakeConnectorError):
    """Bytes that are no message of this protocol."""


class Hello(Struct, tag=True, frozen=True):
    """First frame of a connection. Its form and that of the answer stay as they are in all versions."""

    version: _Count
    package: _Word
    person: bool = False
    """A command line, which does not count as a user of the agent. It may have another version."""


class Welcome(Struct, tag=True, frozen=True):
    version: _Count
    package: _Word


class Refused(Struct, tag=True, frozen=True):
    """Why the agent hangs up."""

    reason: Annotated[str, Meta(max_length=512)]


class Place(Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Namespace (`Namespace.to_dict`) and shard (layers and heads, half-open) with a number of the sender's choice."""

    number: _Count
    namespace: dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=1 << 18)] | int | None]
    shard: tuple[_Count, _Count, _Count, _Count]


class Ask(Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """`wish.Wish`, its keys one after the other; the number is the sender's choice."""

    number: _Number
    place: _Count
    keys: Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=MAX_KEYS * KEY_NBYTES)]
    parent: _Key | None
    nbytes: Annotated[int, Meta(ge=1, lt=1 << 32)]
    deadline_s: Annotated[float, Meta(gt=0, le=86400)]
    prefill_tokens_s: Annotated[float, Meta(gt=0, le=1e12)] | None


class Seek(Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Which of these pages have the tiers? None of them is fetched for that. The number is the sender's choice."""

    number: _Number
    place: _Count
    keys: Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=MAX_SOUGHT * KEY_NBYTES)]
    nbytes: Annotated[int, Meta(ge=1, lt=1 << 32)]


class Which(Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Of which shards of this place's namespace do the tiers have pages?"""

    place: _Count


class Cancel(Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Nobody waits for this Ask any more; it is not answered further."""

    number: _Number


class Forget(Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """There are new marks in the pool's folder (`forget`)."""


class Query(Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Asks for a Report."""


class Stop(Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """The agent ends in order; the connection ends with it."""


class Told(Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """`wish.Word` of an Ask. It is repeated now and then while it is not `done`: a sign of life."""

    number: _Number
    coming: _Count
    landed: _Count
    done: bool
    cause: _Word = ""
    settled: bool = False


class Found(Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """To a Seek: a byte for each key, 1 where some tier has said by now that it has the page; `done`: that was all."""

    number: _Number
    found: Annotated[bytes, Meta(max_length=MAX_SOUGHT)]
    done: bool


class Shards(Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """To a Which: shards (layers and heads, half-open) as far as they are known by now; `done`: that was all."""

    place: _Count
    shards: Annotated[list[tuple[_Count, _Count, _Count, _Count]], Meta(max_length=MAX_SHARDS)]
    done: bool


class Report(Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """The state of the agent, JSON."""

    text: bytes


ForPeople: TypeAlias = Forget | Query | Stop
"""What a command line may say, of whatever version it is. These and a Report stay as they are in all versions."""
Inbound: TypeAlias = Place | Ask | Seek | Which | Cancel | Forget | Query | Stop
"""What the agent takes after the Hello."""
Outbound: TypeAlias = Told | Found | Shards | Report | Welcome | Refused
Message: TypeAlias = Hello | Inbound | Outbound

_encoder = msgspec.msgpack.Encoder()
_hello = msgspec.msgpack.Decoder(Hello)
_inbound = msgspec.msgpack.Decoder(Inbound)
_outbound = msgspec.msgpack.Decoder(Outbound)


def frame(message: Message) -> bytes:
    """The bytes of a message on the wire."""
    body = _encoder.encode(message)
    return _HEAD.pack(len(body)) + body


class Frames:
    """Cuts what comes from a stream into the bodies of frames. No frame is larger than `limit`, which may change."""

    def __init__(self, limit: int = MAX_FRAME_NBYTES) -> None:
        self.limit = limit
        self._bytes = bytearray()

    @property
    def is_partial(self) -> bool:
        """Whether a frame has begun and not ended."""
        return bool(self._bytes)

    def feed(self, data: bytes | memoryview) -> None:
        self._bytes += data

    def take(self) -> bytes | None:
        """The next whole frame's body. Raises Junk for one that is empty or too large."""
        if len(self._bytes) < _HEAD.size:
            return None
        (nbytes,) = _HEAD.unpack_from(self._bytes)
        if not 1 <= nbytes <= self.limit:
            raise Junk(f"a frame of {nbytes} bytes: expected 1 to {self.limit}")
        end = _HEAD.size + nbytes
        if len(self._bytes) < end:
            return None
        body = bytes(memoryview(self._bytes)[_HEAD.size : end])
        del self._bytes[:end]
        return body


def read_hello(body: bytes) -> Hello:
    return _decode(_hello, body)


def read_inbound(body: bytes) -> Inbound:
    """A message to the agent. Raises Junk."""
    message: Inbound = _decode(_inbound, body)
    if isinstance(message, Ask | Seek) and len(message.keys) % KEY_NBYTES:
        raise Junk(f"keys of {len(message.keys)} bytes: expected a multiple of {KEY_NBYTES}")
    return message


def read_outbound(body: bytes) -> Outbound:
    """A message from the agent. Raises Junk."""
    message: Outbound = _decode(_outbound, body)
    return message


def split_keys(keys: bytes) -> list[bytes]:
    """Of an Ask or a Seek."""
    return [keys[at : at + KEY_NBYTES] for at in range(0, len(keys), KEY_NBYTES)]


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is no UTF-8
        raise Junk(f"not a message of this protocol: {error}") from None
