"""How lookups and memory grow with the index: pools that name up to millions of pages, without holding their bytes.

Putting millions of pages needs at least 4 KiB of arena for each. So the rows are written straight into the page table
of a pool that has room for exactly so many, with the store's own code; what is timed is the store's public lookup.
"""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.peers.report import Goal, Row, row
from mooncake_connector.cli.bench.measure import BenchError, Progress, Task, best_seconds
from mooncake_connector.cli.bench.store import LOOKUP, PREFIX, SINGLE_LOOKUPS, bench_namespace, bench_space
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import KEY_NBYTES
from store_client import EmbeddedStore, Space
from store_client.embedded import ledger, redo, table
from store_client.embedded.arena import GRANULE
from store_client.embedded.feed import Feed
from store_client.embedded.folder import MIN_CAPACITY_NBYTES, read_description, write_description
from store_client.embedded.names import Spaces, hash_keys
from store_client.embedded.row import NONE, ROW_DTYPE, ROW_NBYTES

_CHUNK = 1 << 16
_SHARD = Shard(0, 32, 0, 8)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Keys in the two pools, and how often they are looked up."""

    small: int = 10_000
    large: int = 5_000_000
    rounds: int = 21


QUICK = Sizes(1_000, 20_000, rounds=6)


def measure(folder: Path, sizes: Sizes, progress: Progress) -> list[Row]:
    """Lookups in the large index over those in the small one (seconds over seconds), and bytes a page of the large."""
    progress(f"filling an index with {sizes.large:,} keys")
    pools = {
        name: filled_pool(folder / name, count) for name, count in (("small", sizes.small), ("large", sizes.large))
    }
    with EmbeddedStore(folder / "small") as small, EmbeddedStore(folder / "large") as large:
        tasks: dict[str, Task] = {}
        for size, store in (("small", small), ("large", large)):
            tasks.update({f"{name} {size}": task for name, task in _tasks(bench_space(store), pools[size]).items()})
        seconds = best_seconds(tasks, sizes.rounds)
    text = f"{sizes.large:,} keys in the index over {sizes.small:,}"
    return [
        *(
            row(f"{title}, {text}", seconds[f"{name} large"] / seconds[f"{name} small"], "times", goal=Goal(at_most=2))
            for title, name in (("one lookup", LOOKUP), ("prefix lookup", PREFIX))
        ),
        row(
            f"index memory at {sizes.large:,} pages", index_nbytes(folder / "large") / sizes.large, "bytes a page",
            goal=Goal(at_most=300),
        ),
    ]  # fmt: skip


def _tasks(space: Space, keys: list[list[bytes]]) -> dict[str, Task]:
    """Every round looks other keys up, so that the memory they lie in is not warm from the round before."""
    rounds = iter(range(10**9))

    def prefix() -> None:
        batch = keys[next(rounds) % len(keys)]
        if space.lookup(batch).pages != len(batch):
            raise BenchError("a lookup missed keys that are in the index")

    def single() -> None:
        for key in keys[next(rounds) % len(keys)][:SINGLE_LOOKUPS]:
            if space.lookup([key]).pages != 1:
                raise BenchError("a lookup missed a key that is in the index")

    return {PREFIX: Task(prefix), LOOKUP: Task(single)}


def filled_pool(pool: Path, count: int, sample: int = 2048) -> list[list[bytes]]:
    """Make a pool whose page table is full with ``count`` random pages; return batches of their keys, spread evenly."""
    with EmbeddedStore(pool, MIN_CAPACITY_NBYTES):
        pass
    data = _widen(pool, count)
    number = Spaces(data / "spaces").register(bench_namespace(), _SHARD)
    _take_all(data, count)
    target = table.Table(data / "table", count)
    generator = np.random.default_rng(2)
    kept = []
    for start in range(0, count, _CHUNK):
        keys = np.frombuffer(generator.bytes(min(_CHUNK, count - start) * KEY_NBYTES), np.uint8).reshape(-1, KEY_NBYTES)
        _insert(target, keys, number, start)
        kept.append(keys[:: max(1, count // (16 * sample))])
    spread = [key.tobytes() for chunk in kept for key in chunk]
    random.Random(3).shuffle(spread)
    return [spread[at : at + sample] for at in range(0, len(spread) - sample + 1, sample)] or [spread]


def _widen(pool: Path, count: int) -> Path:
    """Give an empty pool an index for ``count`` pages; returns its data folder."""
    description = read_description(pool)
    if description is None:
        raise BenchError(f"{pool} is not a pool")
    write_description(pool, dataclasses.replace(description, max_pages=count))
    data = description.data(pool)
    for name, nbytes in (("table", table.table_nbytes(count)), ("ledger/data.mdb", ledger.map_nbytes(count))):
        fd = os.open(data / name, os.O_RDWR)
        try:
            os.ftruncate(fd, nbytes)
            os.posix_fallocate(fd, 0, nbytes)
        finally:
            os.close(fd)
    return data


def _take_all(data: Path, count: int) -> None:
    """Let the ledger say that ``count`` pages of one granule each take every slot and all of the arena."""
    os.truncate(data / "arena", count * GRANULE)
    feed = Feed(data / "feed", int(data.name[:16], 16))
    opened = ledger.Ledger(data / "ledger", table.Table(data / "table", count), feed)
    with opened.transaction() as draft:
        draft.slots.take_pieces(draft.slots.total, max_pieces=draft.slots.total)
        draft.high_water = draft.capacity = count
    opened.close()


def _insert(target: table.Table, keys: npt.NDArray[np.uint8], space: int, first_slot: int) -> None:
    """Apply a record that names ``keys`` at the slots from ``first_slot`` on; their rows say one granule each."""
    hashes = hash_keys(keys, space)
    cells = target.cells.plan(hashes)
    fits = cells >= 0
    slots = np.arange(first_slot, first_slot + len(keys), dtype=np.uint32)
    filled: npt.NDArray[Any] = np.zeros(len(keys), dtype=ROW_DTYPE)
    filled["key"], filled["space"] = keys, space
    filled["generation"] = slots.astype(np.uint64) + 1
    filled["granules"], filled["nbytes"], filled["parent"], filled["num_extents"] = 1, 4096, NONE, 1
    record = redo.Record(
        target.applied, target.pages + len(keys), target.used_granules + len(keys),
        set_cells=cells[fits].astype(np.uint64),
        set_words=target.cells.values(hashes[fits], slots[fits]), set_slots=slots,
        set_rows=filled.view(np.uint8).reshape(len(keys), ROW_NBYTES),
    )  # fmt: skip
    target.apply(record, 0)


def index_nbytes(pool: Path) -> int:
    """Memory that everything but the arena takes."""
    files = (Path(at) / name for at, _, names in os.walk(pool) for name in names if name != "arena")
    return sum(file.stat().st_blocks * 512 for file in files)
