"""Taking a snapshot: the pages of a pool, as they are when it begins, to a folder that is there as a whole or not.

Engines go on: nothing is locked, no page counts as used, and what changes meanwhile is left out.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mooncake_connector import __version__
from mooncake_connector.errors import SnapshotError
from mooncake_connector.sizes import human_nbytes
from store_client.base import Pieces, Progress
from store_client.embedded import EmbeddedStore
from store_client.embedded.survey import Pages, Survey
from store_client.snapshot import folders, form
from store_client.snapshot.files import PagesWriter, Piece
from store_client.snapshot.form import ENTRY, NO_PARENT, Entries, Manifest, SpaceEntry
from store_client.snapshot.order import returning_order

_BATCH_NBYTES = 32 << 20
_BATCH_PAGES = 1024
_AT_ONCE = 2
"""One batch is compared with its checksums while another one is written."""
_INDEX_AT_ONCE = 1 << 16
_SPARE_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """What became of a snapshot."""

    path: str
    pages: int
    nbytes: int
    """Of the pages."""
    spaces: int
    """Namespaces and shards."""
    changed_pages: int
    """Left out since they were evicted or removed meanwhile."""
    corrupt_pages: int
    """Left out since they did not match their checksum."""
    unnamed_pages: int
    """Left out since the pool does not know any more what they are."""
    replaced: bool
    """A former snapshot was there."""
    remains: bool
    """Remains of a snapshot that was not finished were there, and are gone."""


def take_snapshot(
    store: EmbeddedStore, path: Path, namespace_digest: bytes | None = None, progress: Progress | None = None
) -> SnapshotReport:
    """Copy the pages of one namespace, or all, to the folder `path`, in the place of a snapshot that is there.

    The former snapshot stays until the new one is whole and on the disk; a process killed at any moment leaves one of
    the two. Where there is nothing to save the former one stays as it is (`pages` 0). `progress` is called with bytes
    done and in all. Raises SnapshotError where the folder cannot be used, PoolError where the pool gives no answer.
    """
    target = Path(os.path.abspath(path))
    if target.is_relative_to(store.path):
        raise SnapshotError(f"{target} lies in the pool that it is to save: name another folder")
    try:
        folders.check_target(target)
        survey, taken = store.survey(namespace_digest), time.time()
        pages = _in_order(survey.pages)
        with folders.drafted(target) as draft:
            _check_room(draft.folder, target, pages)
            entries, sizes, left_out = _copy_all(store, draft.folder, pages, progress)
            spaces = _count(entries, survey)
            replaced = False
            if len(entries):
                digest = _write_index(draft.folder, entries)
                manifest = Manifest(
                    package=__version__, taken=taken, capacity_nbytes=store.stats().capacity_nbytes, spaces=spaces,
                    pages=len(entries), files=sizes, index_sha256=digest,
                )  # fmt: skip
                _write_file(draft.folder, form.MANIFEST, [form.encode_manifest(manifest)])
                replaced = folders.publish(draft)
                folders.clear_former(target)
    except OSError as error:
        raise SnapshotError(
            f"snapshot {target} cannot be written ({error.strerror or error}); a former one there stays as it was"
        ) from None
    return SnapshotReport(
        str(target), len(entries), sum(space.nbytes for space in spaces), len(spaces),
        left_out.changed, left_out.corrupt, survey.unnamed, replaced, draft.remains,
    )  # fmt: skip


def _in_order(pages: Pages) -> Pages:
    """In the order in which they come back, with the places of parents in that order."""
    order = returning_order(pages)
    place_of = np.full(len(order) + 1, -1, dtype=np.int64)
    place_of[order] = np.arange(len(order))
    pages = pages[order]
    parents = place_of[pages["parent"]]  # -1 stays what it is
    pages["parent"] = np.where(parents < np.arange(len(pages)), parents, -1)
    return pages


def _check_room(folder: int, target: Path, pages: Pages) -> None:
    """A disk that is too small is better told at once than filled to the brim first."""
    wanted = int(pages["nbytes"].sum(dtype=np.int64)) + len(pages) * ENTRY.itemsize + _SPARE_NBYTES
    info = os.fstatvfs(folder)
    free = info.f_bavail * info.f_frsize
    if wanted > free:
        raise SnapshotError(
            f"snapshot {target} takes {human_nbytes(wanted)}, and its file system has {human_nbytes(free)} free: free "
            "some, or name a folder elsewhere; a former snapshot there stays as it was"
        )


@dataclass(slots=True)
class _LeftOut:
    changed: int = 0
    corrupt: int = 0


def _copy_all(
    store: EmbeddedStore, folder: int, pages: Pages, progress: Progress | None
) -> tuple[Entries, list[int], _LeftOut]:
    """Write the files of pages; returns the index, the sizes of the files, and what was left out."""
    entries = np.zeros(len(pages), dtype=ENTRY)
    for name in ("key", "checksum", "idle_ns", "nbytes", "space"):
        entries[name] = pages[name]
    kept = np.zeros(len(pages), dtype=np.bool_)
    left_out = _LeftOut()
    done, total = 0, int(pages["nbytes"].sum(dtype=np.int64))
    files = PagesWriter(folder)
    threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="mooncake-connector-snapshot")
    try:
        batches = list(_batches(pages))
        copied = [threads.submit(_copy, store, files, pages[batch]) for batch in batches]
        for batch, result in zip(batches, copied, strict=True):
            seen, places = result.result()
            for i, (file, offset) in places.items():
                entries["file"][batch.start + i], entries["offset"][batch.start + i] = file, offset
            kept[batch] = [right is True for right in seen]
            left_out.changed += seen.count(None)
            left_out.corrupt += seen.count(False)
            done += int(pages["nbytes"][batch].sum(dtype=np.int64))
            if progress is not None:
                progress(done, total)
        files.finish()
    finally:
        threads.shutdown(cancel_futures=True)
        files.close()
    place_of = np.cumsum(kept, dtype=np.int64) - 1
    parents = pages["parent"]
    entries["parent"] = np.where((parents >= 0) & kept[parents], place_of[parents], NO_PARENT)
    return entries[kept], files.sizes, left_out


def _batches(pages: Pages) -> Iterator[slice]:
    start = nbytes = 0
    for i, size in enumerate(pages["nbytes"].tolist()):
        if i > start and (nbytes + size > _BATCH_NBYTES or i - start == _BATCH_PAGES):
            yield slice(start, i)
            start, nbytes = i, 0
        nbytes += size
    if start < len(pages):
        yield slice(start, len(pages))


def _copy(store: EmbeddedStore, files: PagesWriter, pages: Pages) -> tuple[list[bool | None], dict[int, Piece]]:
    """What became of each page, and where those that were written are."""
    places: dict[int, Piece] = {}

    def view(shown: Sequence[tuple[int, Pieces]]) -> None:
        written = files.append([pieces for _, pieces in shown])
        places.update(zip((i for i, _ in shown), written, strict=True))

    return store.peek(pages, view), places


def _write_index(folder: int, entries: Entries) -> str:
    """Returns its SHA-256."""
    digest = hashlib.sha256()
    parts = [entries[at : at + _INDEX_AT_ONCE].tobytes() for at in range(0, len(entries), _INDEX_AT_ONCE)]
    for part in parts:
        digest.update(part)
    _write_file(folder, form.INDEX, parts)
    return digest.hexdigest()


def _count(entries: Entries, survey: Survey) -> list[SpaceEntry]:
    """What of each namespace and shard is there; gives those that are left their final numbers."""
    numbers, places = np.unique(entries["space"], return_inverse=True)
    entries["space"] = places.reshape(-1)
    nbytes = np.bincount(entries["space"], entries["nbytes"]) if len(entries) else np.zeros(0)
    pages = np.bincount(entries["space"])
    return [
        form.entry_of(survey.spaces[number], count, size)
        for number, count, size in zip(numbers.tolist(), pages.tolist(), map(int, nbytes), strict=True)
    ]


def _write_file(folder: int, name: str, parts: Sequence[bytes]) -> None:
    fd = folders.open_inside(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(fd, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(fd)
