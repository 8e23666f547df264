"""The other process of the store benchmark: fills a pool with pages and keeps it open until its input ends.

Run as ``python -m mooncake_connector.cli.bench.pool_writer FOLDER CAPACITY NUM_PAGES PAGE_NBYTES OUTCOME``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from mooncake_connector.cli.bench.limits import Bytes, page_keys
from mooncake_connector.kv.namespace import Namespace
from store_client import EmbeddedStore, Put, Shard, Space, Store

NAMESPACE = Namespace(
    model_name="bench", model_digest="bench", kv_dtype="bfloat16", num_layers=32, num_kv_heads=8, head_dim=128,
    page_tokens=64,
)  # fmt: skip
DEADLINE_S = 30.0


def bench_space(store: Store) -> Space:
    """The space that both processes of the benchmark use."""
    return store.space(NAMESPACE, Shard(0, 32, 0, 8))


def content(nbytes: int) -> Bytes:
    """Random bytes, the same in every process."""
    return np.frombuffer(np.random.default_rng(0).bytes(nbytes), dtype=np.uint8)


def chain(keys: list[bytes]) -> list[bytes | None]:
    """The parents of pages that follow one another."""
    return [None, *keys[:-1]]


def main(folder: str, capacity: int, num_pages: int, page_nbytes: int, outcome: str) -> None:
    """Fill the pool with pages labelled "get", say so in the file ``outcome``, and wait."""
    data = content(num_pages * page_nbytes)
    keys = page_keys(num_pages, "get")
    with EmbeddedStore(folder, capacity) as store:
        sources = [data[start : start + page_nbytes] for start in range(0, len(data), page_nbytes)]
        done = bench_space(store).put(keys, sources, parents=chain(keys), deadline_s=DEADLINE_S)
        if any(put is Put.FAILED for put in done):
            raise SystemExit(f"{done.count(Put.FAILED)} of {num_pages} pages were not stored in {folder}")
        Path(outcome).write_text('{"ready": true}')
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
