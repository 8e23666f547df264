"""What may be asked of the index, as Mooncake's Conductor documents it; checked where it comes in, and nowhere else."""

from __future__ import annotations

import contextlib
import re
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Raw, Struct

from mooncake_connector.config.values import shown
from mooncake_connector.log import printable
from store_client.agent.index.hashes import Tokens32
from store_client.agent.index.parts import Parts, Prompt, Unreadable, Written

MAX_TOKENS = 1 << 20
MAX_HASHES = 1 << 17
_MAX_TOKEN = (1 << 32) - 1
_IN_A_LIST = b"0123456789-, \t\r\n"
_TOKENS = re.compile(rb'"token_ids"\s*:\s*\[')
"""No other place of a JSON text has these bytes: within a text quotes are escaped."""

Name = Annotated[str, Meta(min_length=1, max_length=256)]
BlockSize = Annotated[int, Meta(ge=1, le=1 << 16)]
Rank = Annotated[int, Meta(ge=0, le=1 << 16)]
Endpoint = Annotated[str, Meta(max_length=256, pattern=r"^((tcp|ipc)://\S+)?$")]
S = TypeVar("S", bound=Struct)


class Refused(Exception):
    """A request that cannot be answered: the HTTP status, what is wrong with what, and one word for it."""

    def __init__(self, message: str, status: int = 400, reason: str = "invalid") -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class Registration(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /register`: an instance that requests may be sent to, and where its KV events are published.

    Args:
        endpoint: of its KV events, as one connects to it; "" for an instance that publishes none.
        namespace: the pages that it reads, as the first 8 or more hexadecimal digits of the digest that
            `store namespaces` shows; "" to go by `modelname`.
        pool: whether it reads this host's pool; None: if `endpoint` is on this host.
        hash_profile, cache_group: for Mooncake's own indexer; not used here, since hashes are made from tokens.
    """

    instance_id: Name
    modelname: Name
    block_size: BlockSize
    type: str
    dp_rank: Rank = 0
    endpoint: Endpoint = ""
    replay_endpoint: Endpoint = ""
    tenant_id: Annotated[str, Meta(max_length=256)] = "default"
    lora_name: Annotated[str, Meta(max_length=256)] | None = ""
    additionalsalt: Annotated[str, Meta(max_length=1024)] | None = ""
    topic: Annotated[str, Meta(max_length=256)] = ""
    namespace: Annotated[str, Meta(pattern=r"^([0-9a-f]{8,64})?$")] = ""
    pool: bool | None = None
    hash_profile: Any = None
    cache_group: Any = None

    @property
    def tenant(self) -> str:
        return self.tenant_id or "default"

    @property
    def lora(self) -> str:
        return self.lora_name or ""

    @property
    def salt(self) -> str:
        return self.additionalsalt or ""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.instance_id, self.tenant, self.dp_rank

    @property
    def name(self) -> str:
        return f"{self.instance_id}|{self.tenant}|{self.dp_rank}"


class Unregistration(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /unregister`; what else was registered may be repeated, and is not looked at."""

    instance_id: Name
    dp_rank: Rank = 0
    tenant_id: str = "default"
    type: Any = None
    modelname: Any = None
    lora_name: Any = None
    block_size: Any = None
    endpoint: Any = None
    additionalsalt: Any = None


class Asked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `/query` and `/query_by_hash` have in common."""

    model: Name
    block_size: BlockSize
    tenant_id: str = "default"
    instance_id: str | None = None
    lora_name: str | None = ""
    lora_id: Any = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None

    @property
    def tenant(self) -> str:
        return self.tenant_id or "default"

    @property
    def lora(self) -> str:
        return self.lora_name or ""


class Query(Asked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    token_ids: Raw


class QueryByHash(Asked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`page_keys`: the keys of the prompt's pages in the pool, in hexadecimal, where the caller computes them."""

    seq_hashes: list[int] | None = None
    block_hash: list[int] | None = None
    page_keys: list[str] | None = None


def decode(body: bytes, kind: type[S]) -> S:
    """Raises Refused."""
    try:
        found = msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refused(f"the body is not what {kind.__name__.lower()} takes: {printable(str(error), 300)}") from None
    if isinstance(found, Asked) and found.lora_id is not None:
        raise Refused(f"lora_id is {shown(found.lora_id)}: it names no adapter; give lora_name instead")
    return found


def decode_query(body: bytes, parts: Parts) -> tuple[Query, Prompt]:
    """Raises Refused. Tokens are most of a question, so where they are plain they are read when somebody wants to know
    them, and all around them as if there were none."""
    found = _TOKENS.search(body)
    stop = body.find(b"]", found.end()) if found else -1
    if found and stop >= 0 and not _TOKENS.search(body, stop):
        with contextlib.suppress(Unreadable):
            prompt = Written(body, found.end(), stop, parts)
            if prompt.num_tokens <= MAX_TOKENS:
                return decode(body[: found.end()] + body[stop:], Query), prompt
    query = decode(body, Query)
    text = bytes(query.token_ids).strip()
    if not text.startswith(b"[") or text[1:-1].translate(None, _IN_A_LIST):
        raise Refused("token_ids: expected a list of integers")
    return query, Prompt(_tokens(text[1:-1].strip()))


def _numbers(text: bytes) -> npt.NDArray[np.int64] | None:
    """None where there are spaces and commas where none belong, of which numpy says so."""
    try:
        return np.fromstring(text, dtype=np.int64, sep=",")
    except ValueError:
        return None


def _tokens(text: bytes) -> Tokens32:
    tokens = _numbers(text) if text else np.empty(0, dtype=np.int64)
    if tokens is None:
        raise Refused("token_ids: expected a list of integers")
    if len(tokens) > MAX_TOKENS:
        raise Refused(f"token_ids has {len(tokens)} entries: expected at most {MAX_TOKENS}")
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) <= _MAX_TOKEN:
        wrong = np.flatnonzero((tokens < 0) | (tokens > _MAX_TOKEN))
        raise Refused(f"token_ids[{wrong[0]}] is {tokens[wrong[0]]}: expected an integer from 0 to {_MAX_TOKEN}")
    return tokens.astype(np.uint32)


def read_hashes(query: QueryByHash) -> list[int]:
    """Raises Refused."""
    given = [name for name in ("seq_hashes", "block_hash") if getattr(query, name) is not None]
    if len(given) != 1:
        raise Refused(f"the body has {' and '.join(given) or 'no hashes'}: expected seq_hashes")
    hashes: list[int] = getattr(query, given[0])
    if len(hashes) > MAX_HASHES:
        raise Refused(f"{given[0]} has {len(hashes)} entries: expected at most {MAX_HASHES}")
    for at, one in enumerate(hashes):
        if not 0 <= one < 1 << 64:
            raise Refused(f"{given[0]}[{at}] is {shown(one)}: expected an integer from 0 to 2^64-1")
    return hashes


def read_page_keys(query: QueryByHash) -> list[bytes] | None:
    """Raises Refused."""
    if query.page_keys is None:
        return None
    if len(query.page_keys) > MAX_HASHES:
        raise Refused(f"page_keys has {len(query.page_keys)} entries: expected at most {MAX_HASHES}")
    keys = []
    for at, text in enumerate(query.page_keys):
        try:
            keys.append(bytes.fromhex(text))
        except ValueError:
            keys.append(b"")
        if len(keys[-1]) != 32 or len(text) != 64:
            raise Refused(f"page_keys[{at}] is {shown(text)}: expected 64 hexadecimal digits")
    return keys
