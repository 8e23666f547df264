"""The embedded store, beside this machine's limits: pages out of a pool that another process filled, and lookups."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.limits import Bytes, RawLmdb, memcpy_task, page_keys
from mooncake_connector.cli.bench.measure import BenchError, Scale, Task, best_seconds
from mooncake_connector.cli.bench.pool_writer import DEADLINE_S, bench_space, chain, content
from store_client import EmbeddedStore, Put, Space, Verify

GET, GET_ONCE, GET_SCATTERED, PUT, MEMCPY = "get", "get once", "get scattered", "put", "memcpy"
LOOKUP, PREFIX, LMDB_LOOKUP, LMDB_PREFIX = "lookup", "prefix lookup", "lmdb lookup", "lmdb prefix lookup"

_FILL_DEADLINE_S = 120.0
SINGLE_LOOKUPS = 256
"""One lookup is timed as so many calls of one key each."""


@contextlib.contextmanager
def pool_of_another_process(folder: Path, scale: Scale) -> Iterator[Space]:
    """The space of a pool that another process has filled with the pages labelled "get", and still has open."""
    capacity = 2 * scale.data_nbytes + (64 << 20)
    outcome = folder / "filled"
    module = "mooncake_connector.cli.bench.pool_writer"
    numbers = [str(number) for number in (capacity, scale.num_pages, scale.page_nbytes)]
    command = [sys.executable, "-m", module, str(folder / "pool"), *numbers, str(outcome)]
    with tempfile.TemporaryFile() as log, processes.running(command, log) as process:
        try:
            processes.wait_until(outcome.exists, process, _FILL_DEADLINE_S, "the process that fills the pool")
        except BenchError as error:
            raise BenchError(f"{error}: {processes.last_lines(log)}") from None
        with EmbeddedStore(folder / "pool") as store:
            yield bench_space(store)


def measure_data(space: Space, scale: Scale) -> dict[str, float]:
    """Best seconds to move all pages once: each kind of get, put, and memcpy. Raises BenchError for wrong bytes."""
    source = content(scale.data_nbytes)
    target: Bytes = np.zeros(scale.data_nbytes, dtype=np.uint8)
    tasks = {
        MEMCPY: memcpy_task(scale, source, target),
        GET: _get_task(space, scale, _whole(target, scale), Verify.ALWAYS),
        GET_ONCE: _get_task(space, scale, _whole(target, scale), Verify.ONCE),
        GET_SCATTERED: _get_task(space, scale, _scattered(target, scale), Verify.ALWAYS),
        PUT: _put_task(space, scale, source),
    }
    _check_bytes(tasks[GET], target, source)
    _check_bytes(tasks[GET_ONCE], target, source)
    return best_seconds(tasks, scale.rounds)


def _whole(target: Bytes, scale: Scale) -> list[Bytes]:
    return [target[start : start + scale.page_nbytes] for start in range(0, len(target), scale.page_nbytes)]


def _scattered(target: Bytes, scale: Scale) -> list[list[Bytes]]:
    """For each page the pieces it goes to, drawn from all over ``target``."""
    size = scale.piece_nbytes
    starts = np.random.default_rng(1).permutation(len(target) // size) * size
    per_page = scale.page_nbytes // size
    return [[target[at : at + size] for at in page] for page in starts.reshape(-1, per_page).tolist()]


def _get_task(space: Space, scale: Scale, targets: list[Bytes] | list[list[Bytes]], verify: Verify) -> Task:
    keys = page_keys(scale.num_pages, "get")

    def get() -> None:
        if not all(space.get(keys, targets, nbytes=scale.page_nbytes, verify=verify)):
            raise BenchError("the pool lost pages while they were read: is something else evicting there?")

    return Task(get)


def _put_task(space: Space, scale: Scale, source: Bytes) -> Task:
    """Puts absent pages into space that was used before, as in a pool that is in use."""
    keys = page_keys(scale.num_pages, "put")
    sources = _whole(source, scale)

    def put() -> None:
        done = space.put(keys, sources, parents=chain(keys), deadline_s=DEADLINE_S)
        if any(outcome is not Put.STORED for outcome in done):
            raise BenchError(f"{len(keys) - done.count(Put.STORED)} of {len(keys)} pages were not stored")

    return Task(put, prepare=lambda: space.remove(keys))


def _check_bytes(task: Task, target: Bytes, source: Bytes) -> None:
    target[:] = 0
    task.run()
    if not np.array_equal(target, source):
        raise BenchError("the store returned other bytes than were put: its figures mean nothing")


def measure_lookups(space: Space, folder: Path, scale: Scale) -> dict[str, float]:
    """Best seconds of one lookup and of a prefix lookup, all keys present; the same keys in a bare LMDB."""
    keys = page_keys(scale.prefix_keys, "lookup")
    small = np.zeros(64, dtype=np.uint8)
    space.put(keys, [small] * len(keys), parents=chain(keys), deadline_s=DEADLINE_S)
    single = [[key] for key in keys[:SINGLE_LOOKUPS]]
    (folder / "lmdb").mkdir()
    bare = RawLmdb(folder / "lmdb", keys)
    try:
        found = best_seconds(
            {
                LOOKUP: Task(lambda: _expect(sum(space.prefix(key) for key in single), len(single))),
                LMDB_LOOKUP: Task(lambda: _expect(sum(bare.lookup(key) for key in single), len(single))),
                PREFIX: Task(lambda: _expect(space.prefix(keys), len(keys))),
                LMDB_PREFIX: Task(lambda: _expect(bare.lookup(keys), len(keys))),
            },
            3 * scale.rounds,
        )
    finally:
        bare.close()
    return {**found, LOOKUP: found[LOOKUP] / len(single), LMDB_LOOKUP: found[LMDB_LOOKUP] / len(single)}


def _expect(found: int, expected: int) -> None:
    if found != expected:
        raise BenchError(f"a lookup found {found} of {expected} keys that are there")
