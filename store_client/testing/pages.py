"""Pages for tests of a store: names, bytes that show every mistake, and short ways to store and read them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client.base import Bytes, Put, Space

PAGE_NBYTES = 65536
SHARD = Shard(0, 4, 0, 2)
DEADLINE_S = 60.0


def namespace(model: str = "m", **changes: Any) -> Namespace:
    """A small namespace; `model` decides its digest."""
    fields: dict[str, Any] = {
        "model_name": model, "model_digest": model, "kv_dtype": "bfloat16", "num_layers": 4, "num_kv_heads": 2,
        "head_dim": 64, "page_tokens": 64,
    }  # fmt: skip
    return Namespace(**{**fields, **changes})


def chain(name: str, count: int) -> list[bytes]:
    """Keys of a chain of pages, as different as real ones."""
    return [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(count)]


def parents_of(keys: Sequence[bytes]) -> list[bytes | None]:
    return [None, *keys[:-1]]


def page_bytes(key: bytes, nbytes: int = PAGE_NBYTES) -> Bytes:
    """The only right content of the page `key`: any wrong byte shows."""
    seed = int.from_bytes(hashlib.sha256(key + nbytes.to_bytes(8, "little")).digest()[:8], "little")
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    words ^= words >> np.uint64(29)
    return words.view(np.uint8)[:nbytes].copy()


def put_pages(
    space: Space, keys: Sequence[bytes], pages: Sequence[Any], *, parents: Sequence[bytes | None], deadline_s: float
) -> list[Put]:
    """Store copies of pages that lie in memory, all of one size."""

    def fill(i: int, view: Bytes) -> None:
        view[:] = np.frombuffer(pages[i], dtype=np.uint8)

    nbytes = len(pages[0]) if pages else 0
    return space.write(keys, fill, nbytes=nbytes, parents=parents, deadline_s=deadline_s)


def get_pages(space: Space, keys: Sequence[bytes], targets: Sequence[Any], *, nbytes: int) -> list[bool]:
    """Copy each page to `targets[i]`; False at i where the page is a miss, and the target may hold anything."""

    def consume(i: int, view: Bytes) -> None:
        np.frombuffer(targets[i], dtype=np.uint8)[:] = view

    return space.read(keys, consume, nbytes=nbytes)


def put_chain(space: Space, keys: Sequence[bytes], nbytes: int = PAGE_NBYTES) -> list[Put]:
    pages = [page_bytes(key, nbytes) for key in keys]
    return put_pages(space, keys, pages, parents=parents_of(keys), deadline_s=DEADLINE_S)


def get_page(space: Space, key: bytes, nbytes: int = PAGE_NBYTES) -> Bytes | None:
    out = np.zeros(nbytes, dtype=np.uint8)
    return out if get_pages(space, [key], [out], nbytes=nbytes)[0] else None
