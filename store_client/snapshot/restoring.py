"""Giving the pages of a snapshot back to a pool: what the pool has stays, and nothing unproven is shown."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from mooncake_connector.log import get_logger, log_once
from store_client.base import Pieces, Progress
from store_client.embedded import EmbeddedStore
from store_client.embedded.put import PutPages
from store_client.embedded.table import now_ns
from store_client.snapshot.form import NO_PARENT, Entries
from store_client.snapshot.order import times_of_use
from store_client.snapshot.reading import Snapshot

logger = get_logger(__name__)

_BATCH_NBYTES = 64 << 20
_BATCH_PAGES = 1024
_AT_ONCE = 4
_AT_ONCE_NBYTES = 1 << 20
"""A thread's turn, so that small pages are not a turn each."""
_NO_ROOM = frozenset({"full", "no_space"})


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What became of the pages of a snapshot."""

    pages: int
    """Given back to the pool."""
    nbytes: int
    present_pages: int
    """Left as they were, since the pool had them."""
    damaged_pages: int
    """Left out since they did not match their checksum, or could not be read."""
    no_room_pages: int
    """Left out since the pool is full: those that were not used for the longest time."""
    unknown_pages: int
    """Left out since this version does not know their namespace."""
    failed_pages: int
    """Left out since the pool did not take them (`store stats` has the causes)."""


def restore(
    snapshot: Snapshot,
    store: EmbeddedStore,
    namespace_digest: bytes | None = None,
    progress: Progress | None = None,
    *,
    deadline_s: float = 60.0,
) -> RestoreReport:
    """Give the pages of one namespace, or all, back to a pool.

    Nothing that the pool has is evicted; what was used last comes first. A process killed at any moment leaves a sound
    pool with some of the pages. `progress` is called with bytes done and in all; `deadline_s` bounds each wait for the
    pool's lock. Raises PoolError where the pool gives no answer.
    """
    wanted = np.array(
        [space is not None and namespace_digest in (None, space[0].digest) for space in snapshot.spaces], dtype=np.bool_
    )
    entries = snapshot.entries
    numbers = np.flatnonzero(wanted[entries["space"]]) if len(entries) else np.zeros(0, dtype=np.int64)
    unknown = sum(
        said.pages for said, name in zip(snapshot.manifest.spaces, snapshot.spaces, strict=True) if name is None
    )
    elapsed_ns = max(0, int((time.time() - snapshot.manifest.taken) * 1e9))
    used_ns = times_of_use(entries["idle_ns"][numbers], elapsed_ns, now_ns())
    outcome: Counter[str] = Counter(unknown=unknown)
    done, total = 0, int(entries["nbytes"][numbers].sum(dtype=np.int64))
    nbytes = 0
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="mooncake-connector-restore") as threads:
        batches = list(_batches(entries[numbers]))
        for batch, following in zip(batches, [*batches[1:], None], strict=True):
            if following is not None:
                _announce(snapshot, numbers[following])
            results = _put_back(snapshot, store, threads, numbers[batch], used_ns[batch], deadline_s)
            outcome.update(results)
            size = int(entries["nbytes"][numbers[batch.start]])
            nbytes += size * results.count("stored")
            done += size * len(results)
            if progress is not None:
                progress(done, total)
            if not _NO_ROOM.isdisjoint(results):
                outcome["full"] += len(numbers) - batch.stop
                break
    no_room = sum(outcome.pop(cause, 0) for cause in _NO_ROOM)
    known = {name: outcome.pop(name, 0) for name in ("stored", "present", "damaged", "unknown")}
    return RestoreReport(
        known["stored"], nbytes, known["present"], known["damaged"], no_room, known["unknown"], outcome.total()
    )


def _batches(entries: Entries) -> Iterator[slice]:
    """Pages of one size, namespace and shard that stand together."""
    alike = (entries["space"][1:] == entries["space"][:-1]) & (entries["nbytes"][1:] == entries["nbytes"][:-1])
    borders = [0, *(np.flatnonzero(~alike) + 1).tolist(), len(entries)]
    for start, stop in pairwise(borders):
        if start < stop:
            step = max(1, min(_BATCH_PAGES, _BATCH_NBYTES // int(entries["nbytes"][start])))
            for at in range(start, stop, step):
                yield slice(at, min(at + step, stop))


def _put_back(
    snapshot: Snapshot,
    store: EmbeddedStore,
    threads: ThreadPoolExecutor,
    numbers: npt.NDArray[np.int64],
    used_ns: npt.NDArray[np.uint64],
    deadline_s: float,
) -> list[str]:
    """What became of each page, as `EmbeddedStore.put_back` says it, or "damaged"."""
    entries = snapshot.entries
    name = snapshot.spaces[int(entries["space"][numbers[0]])]
    assert name is not None, "pages of unknown namespaces are left out before"
    keys = [bytes(key) for key in entries["key"][numbers]]
    places = entries["parent"][numbers].tolist()
    above = [None if place == NO_PARENT else bytes(entries["key"][place]) for place in places]
    parents = [None if parent == key else parent for key, parent in zip(keys, above, strict=True)]  # another group's
    pages = PutPages(*name, keys, parents, int(entries["nbytes"][numbers[0]]), used_ns=used_ns.tolist())
    damaged: set[int] = set()

    def bring_some(places: Sequence[tuple[int, Pieces]]) -> list[int | None]:
        return [_bring_one(snapshot, int(numbers[i]), pieces) for i, pieces in places]

    def bring(places: Sequence[tuple[int, Pieces]]) -> list[int | None]:
        step = max(1, _AT_ONCE_NBYTES // pages.nbytes)
        parts = [places[at : at + step] for at in range(0, len(places), step)]
        checksums = [checksum for part in threads.map(bring_some, parts) for checksum in part]
        damaged.update(i for (i, _), checksum in zip(places, checksums, strict=True) if checksum is None)
        return checksums

    results = store.put_back(pages, bring, deadline_s=deadline_s)
    _forget(snapshot, numbers)
    return ["damaged" if i in damaged else result for i, result in enumerate(results)]


def _bring_one(snapshot: Snapshot, number: int, pieces: Pieces) -> int | None:
    """Fill the pieces with a page; its checksum, or None where it is not what was saved."""
    entry = snapshot.entries[number]
    try:
        snapshot.files.read(int(entry["file"]), int(entry["offset"]), pieces)
    except OSError as error:
        log_once("snapshot.read", "snapshot %s: pages cannot be read: %s", snapshot.path, error, logger=logger)
        return None
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece.data)
    if digest.intdigest() == int(entry["checksum"]):
        return digest.intdigest()
    log_once(
        "snapshot.damaged", "snapshot %s: page %s does not match its checksum and is left out; its disk may be failing",
        snapshot.path, bytes(entry["key"]).hex(), logger=logger,
    )  # fmt: skip
    return None


def _announce(snapshot: Snapshot, numbers: npt.NDArray[np.int64]) -> None:
    for file, start, stop in _stretches(snapshot.entries[numbers]):
        snapshot.files.advise(file, start, stop, wanted=True)


def _forget(snapshot: Snapshot, numbers: npt.NDArray[np.int64]) -> None:
    for file, start, stop in _stretches(snapshot.entries[numbers]):
        snapshot.files.advise(file, start, stop, wanted=False)


def _stretches(entries: Entries) -> Iterator[tuple[int, int, int]]:
    """(file, first byte, last byte + 1) of these pages in each of their files."""
    for file in np.unique(entries["file"]).tolist():
        mine = entries[entries["file"] == file]
        yield file, int(mine["offset"].min()), int((mine["offset"] + mine["nbytes"]).max())
