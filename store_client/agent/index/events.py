"""KV events as engines and stores publish them, read into one form.

vLLM 0.32 and SGLang 0.5.23 send three frames: topic, sequence number as 8 bytes big endian, and MessagePack of a list:
seconds since the epoch, events, data-parallel rank. An event is a map that says in `type` what it is. Mooncake's
masters send the same frames with the maps of RFC #1527, which have `event_type`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

MEDIA = {
    "GPU": "GPU", "CPU": "CPU", "CPU_PINNED": "CPU", "DISK": "DISK", "STORAGE": "DISK", "EXTERNAL": "DISK",
}  # fmt: skip
MAX_BATCH_NBYTES = 16 << 20
_ATTENDS_TO_ALL = (None, "full_attention", "mla_attention", "sink_full_attention", "unknown")

Hash = int | bytes
_Group = Annotated[int, Meta(ge=0, le=255)]
_Rolling = Annotated[int, Meta(ge=0)]


class Junk(Exception):
    """Nothing that an engine sends."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks. `hashes` are the publisher's own; where `tokens` is None they are rolling ones (`hashes`)."""

    medium: str
    group: int
    hashes: list[Hash]
    parent: Hash | None
    tokens: list[int] | None
    block_tokens: int | None
    lora: str
    salt: str


@dataclass(frozen=True, slots=True)
class Removed:
    medium: str
    group: int
    hashes: list[Hash]


@dataclass(frozen=True, slots=True)
class Cleared:
    medium: str | None
    """None: all of them."""


Event = Stored | Removed | Cleared


class _Stored(Struct, tag="BlockStored"):
    block_hashes: list[Hash]
    token_ids: list[int]
    block_size: int
    parent_block_hash: Hash | None = None
    medium: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: _Group | None = None
    kv_cache_spec_kind: str | None = None


class _Removed(Struct, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: _Group | None = None


class _Cleared(Struct, tag="AllBlocksCleared"):
    pass


class _Standard(Struct):
    """Of RFC #1527."""

    event_type: str
    seq_hashes: list[_Rolling] = []
    parent_hash: int | None = None
    medium: str | None = None
    block_size: int | None = None
    lora_name: str | None = None
    additional_salt: str | None = None


class _Kind(Struct):
    type: str = ""
    event_type: str = ""


class Batch(Struct, array_like=True):
    time_s: float
    events: list[Raw]
    dp_rank: int | None = None


_batch = msgspec.msgpack.Decoder(Batch)
_kind = msgspec.msgpack.Decoder(_Kind)
_engines = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_standard = msgspec.msgpack.Decoder(_Standard)


def read_batch(payload: bytes) -> Batch:
    """Raises Junk."""
    if len(payload) > MAX_BATCH_NBYTES:
        raise Junk(f"a batch has {len(payload)} bytes: expected at most {MAX_BATCH_NBYTES}")
    try:
        return _batch.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Junk(f"a batch: {error}") from None


def read_event(raw: Raw) -> Event | None:
    """None for what is of no interest here: blocks that attend to a window, media that nobody asks for, other kinds of
    events. Raises Junk."""
    try:
        kind = _kind.decode(raw)
        if kind.event_type:
            return _from_standard(_standard.decode(raw))
        if kind.type not in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
            return None
        return _from_engine(_engines.decode(raw))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Junk(f"an event: {error}") from None


def _from_engine(event: _Stored | _Removed | _Cleared) -> Event | None:
    if isinstance(event, _Cleared):
        return Cleared(None)
    medium = MEDIA.get((event.medium or "GPU").upper())
    if medium is None:
        return None
    group = event.group_idx or 0
    if isinstance(event, _Removed):
        return Removed(medium, group, event.block_hashes)
    if event.kv_cache_spec_kind not in _ATTENDS_TO_ALL:
        return None
    lora, salt, count = event.lora_name or "", event.cache_salt or "", len(event.block_hashes)
    for at, keys in enumerate(event.extra_keys or []):
        texts = [key for key in keys or [] if isinstance(key, str) and key != lora]
        if len(texts) + bool(lora and lora in (keys or [])) < len(keys or []):
            count = at  # images and embeddings: what tokens stand for does not show in them
            break
        if at == 0 and texts:
            salt = texts[0]  # vLLM names it in the first block of a prompt
    tokens = event.token_ids[: count * event.block_size]
    return Stored(
        medium, group, event.block_hashes[:count], event.parent_block_hash, tokens, event.block_size, lora, salt
    )


def _from_standard(event: _Standard) -> Event | None:
    medium = MEDIA.get((event.medium or "GPU").upper())
    if event.event_type == "cleared":
        return Cleared(medium if event.medium else None)
    if medium is None:
        return None
    hashes: list[Hash] = list(event.seq_hashes)
    if event.event_type == "removed":
        return Removed(medium, 0, hashes)
    if event.event_type != "stored":
        return None
    lora, salt = event.lora_name or "", event.additional_salt or ""
    return Stored(medium, 0, hashes, event.parent_hash, None, event.block_size, lora, salt)


def events_of(batch: Batch) -> Iterator[Event | Junk | None]:
    """In order; a Junk in the place of one that cannot be read."""
    for raw in batch.events:
        try:
            yield read_event(raw)
        except Junk as error:
            yield error
