"""Page keys: the place of a page in its prefix chain, named as SGLang 0.5 names it.

    D_i = SHA256(D_{i-1} || tokens of page i, each uint32 little endian)
    D_{-1} = nothing, or SHA256("sglang-cache-namespace-v1" || enc(extra_key) || enc(cache_salt))
    enc(None) = 0x00, enc(s) = 0x01 || len(utf8(s)) as uint64 little endian || utf8(s)

A page that holds a token above 2^32-1 is hashed as SHA256(D_{i-1} || 0xFF || tokens, each uint64 little endian).
Source: `get_hash_str` and the namespace key of sglang/srt/mem_cache. Which model the tokens belong to is not in a key;
that is the namespace's work (`mooncake_connector.kv.namespace`).
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

KEY_NBYTES = 32
MAX_TOKEN_32 = 2**32 - 1

_ROOT_TAG = b"sglang-cache-namespace-v1"
_ADAPTER_TAG = b"mooncake-connector-adapter-v1"
_WIDE_PAGE = b"\xff"

Tokens = Sequence[int] | npt.NDArray[Any]


def root_digest(extra_key: str | None, cache_salt: str | None) -> bytes:
    """What a chain starts from: b"" without extra key and salt, else 32 bytes that nobody reaches without both.

    Both are the client's to choose, as in SGLang.
    """
    if extra_key is None and cache_salt is None:
        return b""
    return hashlib.sha256(_ROOT_TAG + _encode(extra_key) + _encode(cache_salt)).digest()


def adapter_root_digest(adapter: str, cache_salt: str | None) -> bytes:
    """What a chain starts from under a LoRA adapter, named by the digest of its files.

    A root of its own kind: with an extra key that spells the adapter, a client could store the base model's pages where
    the adapter's are looked for.
    """
    return hashlib.sha256(_ADAPTER_TAG + _encode(adapter) + _encode(cache_salt)).digest()


def page_keys(
    tokens: Tokens,
    page_tokens: int,
    *,
    root: bytes = b"",
    parent: bytes | None = None,
) -> list[bytes]:
    """The keys (32 raw bytes each) of the full pages of `tokens`, in order; a partial last page has none.

    `root` comes from `root_digest`. With `parent`, the key of the page before `tokens[0]`, the chain is continued and
    `root` is not used, since it is already inside `parent`. Fastest from a uint32 array.

    Raises ValueError for a negative or fractional token, one above 2^64-1, or a parent or root of a wrong length.
    """
    previous = _chain_start(root, parent)
    if page_tokens < 1:
        raise ValueError(f"page_tokens is {page_tokens}: expected at least 1")
    if isinstance(tokens, np.ndarray):
        _check_integers(tokens)
    num_pages = len(tokens) // page_tokens
    if num_pages == 0:
        return []
    packed = _as_uint32(tokens, num_pages * page_tokens)
    if packed is None:
        return _mixed_width_keys(_as_uint64(tokens, num_pages * page_tokens), page_tokens, previous)

    sha256 = hashlib.sha256
    keys = []
    for page in np.frombuffer(packed, dtype=f"V{4 * page_tokens}").tolist():
        digest = sha256(previous)
        digest.update(page)
        previous = digest.digest()
        keys.append(previous)
    return keys


def content_tokens(identity: str, count: int, *, start: int = 0) -> npt.NDArray[np.uint64]:
    """Stand-ins for the `count` placeholder tokens of a multimodal item, from its `start`-th placeholder on.

    An engine gives every image the same placeholder token; in a chain each placeholder is replaced by a value above
    2^32-1 drawn from the item's content hash `identity` and its position in the item, so that equal text around
    different images gets different keys. Returns uint64 of shape (count,). Not SGLang's pad values: pages with
    multimodal content are shared between instances of one engine only.
    """
    if count < 1:
        return np.empty(0, dtype=np.uint64)
    shake = hashlib.shake_256(b"mooncake-connector-content-v1" + _encode(identity))
    values = np.frombuffer(shake.digest(8 * (start + count)), dtype="<u8")[start:].astype(np.uint64)
    values |= np.uint64(1 << 63)
    return values


def _encode(text: str | None) -> bytes:
    if text is None:
        return b"\x00"
    raw = text.encode("utf-8")
    return b"\x01" + len(raw).to_bytes(8, "little") + raw


def _chain_start(root: bytes, parent: bytes | None) -> bytes:
    if parent is not None:
        if len(parent) != KEY_NBYTES:
            raise ValueError(f"parent key has {len(parent)} bytes: expected {KEY_NBYTES}")
        return parent
    if len(root) not in (0, KEY_NBYTES):
        raise ValueError(f"root has {len(root)} bytes: expected 0 or {KEY_NBYTES}, from root_digest()")
    return root


def _as_uint32(tokens: Tokens, count: int) -> memoryview | None:
    """The first `count` tokens as little-endian uint32 bytes, or None where one of them needs more bits."""
    if isinstance(tokens, np.ndarray):
        head = tokens[:count]
        if head.dtype != np.uint32 and (int(head.max()) > MAX_TOKEN_32 or int(head.min()) < 0):
            return None
        return np.ascontiguousarray(head, dtype="<u4").data.cast("B")
    try:
        return np.asarray(array("I", tokens[:count])).astype("<u4", copy=False).data.cast("B")
    except (OverflowError, TypeError):
        return None


def _as_uint64(tokens: Tokens, count: int) -> npt.NDArray[np.uint64]:
    if isinstance(tokens, np.ndarray):
        tokens = tokens[:count].tolist()
    try:
        return np.asarray(array("Q", tokens[:count])).astype("<u8", copy=False)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2^64-1: {error}") from None


def _check_integers(tokens: npt.NDArray[Any]) -> None:
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        raise ValueError(f"tokens have dtype {tokens.dtype}, shape {tokens.shape}: expected one axis of integers")


def _mixed_width_keys(tokens: npt.NDArray[np.uint64], page_tokens: int, previous: bytes) -> list[bytes]:
    keys = []
    for page in tokens.reshape(-1, page_tokens):
        digest = hashlib.sha256(previous)
        if int(page.max()) > MAX_TOKEN_32:
            digest.update(_WIDE_PAGE + page.tobytes())
        else:
            digest.update(page.astype("<u4").tobytes())
        previous = digest.digest()
        keys.append(previous)
    return keys
