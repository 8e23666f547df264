"""`bench store`: pages moved as engines move them, out of a pool that another process filled and into it; lookups.

The limits are memcpy of the same pages, and a bare LMDB with the same keys.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.machine import check_room, describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import (
    BenchError,
    Progress,
    Task,
    best_seconds,
    gigabytes_per_second,
    size_text,
)
from mooncake_connector.cli.bench.report import Report, Row
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client import EmbeddedStore, Put, Space, Store
from store_client.base import Bytes, Consume

GET, GET_SCATTERED, PUT, MEMCPY = "get", "get scattered", "put", "memcpy"
LOOKUP, PREFIX, LMDB_LOOKUP, LMDB_PREFIX = "lookup", "prefix lookup", "lmdb lookup", "lmdb prefix lookup"
SINGLE_LOOKUPS = 256
"""One lookup is timed as so many calls of one key each."""

_DEADLINE_S = 30.0
_FILL_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Scale:
    """How much a run does; the defaults are what docs/benchmarks.md shows."""

    num_pages: int = 256
    page_nbytes: int = 1 << 20
    piece_nbytes: int = 32 << 10
    prefix_keys: int = 2048
    rounds: int = 7

    @property
    def data_nbytes(self) -> int:
        """Bytes of KV that one round moves."""
        return self.num_pages * self.page_nbytes


QUICK = Scale(num_pages=16, prefix_keys=256, rounds=2)


def run(folder: Path, scale: Scale, progress: Progress) -> Report:
    """Measure in temporary pools in `folder`. Raises BenchError where that is not possible."""
    check_room(folder, 3 * scale.data_nbytes + (256 << 20))
    machine, versions = describe_machine(folder), describe_versions()
    seconds = measure(folder, scale, progress)
    return Report(machine, versions, rows(seconds, scale))


def measure(folder: Path, scale: Scale, progress: Progress) -> dict[str, float]:
    """Best seconds by figure, of the store and of the limits."""
    with tempfile.TemporaryDirectory(prefix="mooncake-connector-bench-", dir=folder) as name:
        progress("the embedded store and memcpy")
        with pool_of_another_process(Path(name), scale) as store:
            data = measure_data(store, scale)
            progress("lookups, and a bare LMDB")
            return {**data, **measure_lookups(store, Path(name), scale)}


def rows(seconds: dict[str, float], scale: Scale) -> list[Row]:
    """The figures of a run."""
    page, piece = size_text(scale.page_nbytes), size_text(scale.piece_nbytes)
    other = "from another process's pool, every read verified"
    moved = (GET, PUT, GET_SCATTERED, MEMCPY)
    speeds = {name: gigabytes_per_second(scale.data_nbytes, seconds[name]) for name in moved}
    return [
        Row(f"get, {page} pages, {other}", speeds[GET], "GB/s", speeds[MEMCPY]),
        Row(f"put, {page} pages, with checksum", speeds[PUT], "GB/s", speeds[MEMCPY]),
        Row(f"get into {piece} scattered pieces, {other}", speeds[GET_SCATTERED], "GB/s", speeds[MEMCPY]),
        Row("one lookup", seconds[LOOKUP] * 1e6, "us", seconds[LMDB_LOOKUP] * 1e6),
        Row(f"prefix lookup of {scale.prefix_keys:,} keys", seconds[PREFIX] * 1e3, "ms", seconds[LMDB_PREFIX] * 1e3),
    ]


@contextlib.contextmanager
def pool_of_another_process(folder: Path, scale: Scale) -> Iterator[Store]:
    """A pool that another process has filled with the pages labelled "get", and still has open."""
    capacity = 2 * scale.data_nbytes + (64 << 20)
    filled = folder / "filled"
    numbers = [str(number) for number in (capacity, scale.num_pages, scale.page_nbytes)]
    command = [sys.executable, "-m", __name__, str(folder / "pool"), *numbers, str(filled)]
    with tempfile.TemporaryFile() as log, processes.running(command, log) as process:
        processes.wait_until(filled.exists, process, log, _FILL_DEADLINE_S, "the process that fills the pool")
        with EmbeddedStore(folder / "pool") as store:
            yield store


def measure_data(store: Store, scale: Scale) -> dict[str, float]:
    """Best seconds to move all pages once: both kinds of get, put, and memcpy. Raises BenchError for wrong bytes."""
    space, source = bench_space(store), content(scale.data_nbytes)
    target: Bytes = np.zeros(scale.data_nbytes, dtype=np.uint8)
    gets = {GET: _get_task(space, scale, target), GET_SCATTERED: _get_scattered_task(space, scale, target)}
    target[:] = 0
    gets[GET].run()
    if not np.array_equal(target, source):
        raise BenchError("the store returned other bytes than were put: its figures mean nothing")
    put = _put_task(bench_space(store, "put"), scale, source)
    memcpy = memcpy_task(source, target, scale.page_nbytes)
    return best_seconds({MEMCPY: memcpy, **gets, PUT: put}, scale.rounds)


def _get_task(space: Space, scale: Scale, target: Bytes) -> Task:
    pages = target.reshape(scale.num_pages, scale.page_nbytes)

    def consume(index: int, page: Bytes) -> None:
        pages[index] = page

    return _read_task(space, scale, consume)


def _get_scattered_task(space: Space, scale: Scale, target: Bytes) -> Task:
    """Each page goes to pieces drawn from all over `target`, as it does into an engine's blocks."""
    pieces = target.reshape(-1, scale.piece_nbytes)
    places = np.random.default_rng(1).permutation(len(pieces)).reshape(scale.num_pages, -1)

    def consume(index: int, page: Bytes) -> None:
        pieces[places[index]] = page.reshape(-1, scale.piece_nbytes)

    return _read_task(space, scale, consume)


def _read_task(space: Space, scale: Scale, consume: Consume) -> Task:
    keys = page_keys(scale.num_pages, "get")

    def read() -> None:
        if not all(space.read(keys, consume, nbytes=scale.page_nbytes)):
            raise BenchError("the pool lost pages while they were read: is something else evicting there?")

    return Task(read)


def _put_task(space: Space, scale: Scale, source: Bytes) -> Task:
    """Puts absent pages into memory that was used before, as in a pool that is in use."""
    keys = page_keys(scale.num_pages, "put")
    return Task(lambda: put_all(space, keys, source.reshape(scale.num_pages, -1)), prepare=space.clear)


def put_all(space: Space, keys: list[bytes], pages: Any) -> None:
    """Store row i of `pages` under `keys[i]`, each after the one before it. Raises BenchError where one is not."""

    def fill(index: int, page: Bytes) -> None:
        page[:] = pages[index]

    done = space.write(keys, fill, nbytes=pages.shape[1], parents=[None, *keys[:-1]], deadline_s=_DEADLINE_S)
    if any(outcome is not Put.STORED for outcome in done):
        raise BenchError(f"{len(keys) - done.count(Put.STORED)} of {len(keys)} pages were not stored")


def measure_lookups(store: Store, folder: Path, scale: Scale) -> dict[str, float]:
    """Best seconds of one lookup and of a prefix lookup, all keys present; the same keys in a bare LMDB."""
    space, keys = bench_space(store), page_keys(scale.prefix_keys, "lookup")
    put_all(space, keys, np.zeros((len(keys), 64), dtype=np.uint8))
    single = [[key] for key in keys[:SINGLE_LOOKUPS]]
    (folder / "lmdb").mkdir()
    with contextlib.closing(RawLmdb(folder / "lmdb", keys)) as bare:
        found = best_seconds(
            {
                LOOKUP: Task(lambda: _expect(sum(space.lookup(key).pages for key in single), len(single))),
                LMDB_LOOKUP: Task(lambda: _expect(sum(bare.lookup(key) for key in single), len(single))),
                PREFIX: Task(lambda: _expect(space.lookup(keys).pages, len(keys))),
                LMDB_PREFIX: Task(lambda: _expect(bare.lookup(keys), len(keys))),
            },
            3 * scale.rounds,
        )
    return {**found, LOOKUP: found[LOOKUP] / len(single), LMDB_LOOKUP: found[LMDB_LOOKUP] / len(single)}


def _expect(found: int, expected: int) -> None:
    if found != expected:
        raise BenchError(f"a lookup found {found} of {expected} keys that are there")


def memcpy_task(source: Bytes, destination: Bytes, piece_nbytes: int) -> Task:
    """Copy all of `source` piece by piece with the C library's ``memmove``."""
    pairs = [
        (destination.ctypes.data + offset, source.ctypes.data + offset)
        for offset in range(0, source.nbytes, piece_nbytes)
    ]

    def copy() -> None:
        for target, origin in pairs:
            ctypes.memmove(target, origin, piece_nbytes)

    return Task(copy)


class RawLmdb:
    """A bare LMDB with ``keys`` in it: no checks, no decoding, one read transaction per call."""

    def __init__(self, folder: Path, keys: list[bytes]) -> None:
        size = max(16 << 20, 512 * len(keys))
        self._env: Any = lmdb.open(str(folder), map_size=size, writemap=True, sync=False, metasync=False)
        value = bytes(48)  # about the size of an index entry of the store
        with self._env.begin(write=True) as transaction:
            transaction.cursor().putmulti([(key, value) for key in keys])

    def lookup(self, keys: list[bytes]) -> int:
        """How many of ``keys`` are there."""
        with self._env.begin(buffers=True) as transaction:
            get = transaction.get
            return sum(get(key) is not None for key in keys)

    def close(self) -> None:
        self._env.close()


def bench_space(store: Store, model_name: str = "bench") -> Space:
    """The space that both processes use; another model's is empty."""
    return store.space(bench_namespace(model_name), Shard(0, 32, 0, 8))


def bench_namespace(model_name: str = "bench") -> Namespace:
    return Namespace(
        model_name=model_name, model_digest=model_name, kv_dtype="bfloat16", num_layers=32, num_kv_heads=8,
        head_dim=128, page_tokens=64,
    )  # fmt: skip


def page_keys(count: int, label: str) -> list[bytes]:
    """``count`` keys of 32 bytes, spread as digests are; another label gives other keys."""
    return [hashlib.sha256(f"{label}/{number}".encode()).digest() for number in range(count)]


def content(nbytes: int) -> Bytes:
    """Random bytes, the same in every process."""
    return np.frombuffer(np.random.default_rng(0).bytes(nbytes), dtype=np.uint8)


def _fill(folder: str, capacity: int, num_pages: int, page_nbytes: int, filled: str) -> None:
    """The other process: fill the pool with pages labelled "get", say so by the file `filled`, and wait."""
    with EmbeddedStore(folder, capacity) as store:
        pages = content(num_pages * page_nbytes).reshape(num_pages, page_nbytes)
        put_all(bench_space(store), page_keys(num_pages, "get"), pages)
        Path(filled).touch()
        sys.stdin.read()


if __name__ == "__main__":
    _fill(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
