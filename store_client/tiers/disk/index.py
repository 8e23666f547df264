"""The index on the disk: which page lies where, with its seal, in an LMDB beside the file of pages.

It is behind the pages by design. What it says was on the disk before it was written down, and space is used again only
once the index on the disk has forgotten what was there. So after a crash or a loss of power it names no page that is
not whole, and none whose space another page was given.

    key    namespace digest (32), shard (4 x uint32), page key (32)
    value  number of its last use, size in bytes, extents; seal (64); extents (first granule, granules), uint32 each
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import lmdb

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import KEY_NBYTES
from store_client.embedded.allocator import Piece
from store_client.tiers.base import SEAL_NBYTES, SpaceName

_HEAD = struct.Struct("<QQI")
_EXTENT = struct.Struct("<II")
_SHARD = struct.Struct(">4I")
_NAME_NBYTES = 80
_META = b"meta"
_META_VALUE = struct.Struct("<16sqQ?")


@dataclass(slots=True, eq=False)
class Page:
    """A page of the tier. What may change is guarded by the lock of `Pages`."""

    nbytes: int
    seal: bytes
    extents: tuple[Piece, ...]
    last_use: int
    readers: int = 0
    gone: bool = False

    @property
    def granules(self) -> int:
        return sum(granules for _, granules in self.extents)


@dataclass(frozen=True, slots=True)
class Meta:
    """What is kept over a restart beside the pages.

    Args:
        file: of which file of pages this is the index.
        day: days since 1970 (UTC).
        written_nbytes: on that day.
        closed: whether nothing has happened since.
    """

    file: bytes
    day: int = 0
    written_nbytes: int = 0
    closed: bool = True


def name_prefix(space: SpaceName) -> bytes:
    """What the names of a space's pages begin with; the page key follows."""
    shard = space.shard
    where = _SHARD.pack(shard.layer_start, shard.layer_stop, shard.head_start, shard.head_stop)
    return space.namespace + where


def space_of(name: bytes) -> bytes:
    """What `name_prefix` gave for the page of that name."""
    return name[:-KEY_NBYTES]


def shard_of(prefix: bytes) -> Shard:
    return Shard(*_SHARD.unpack(prefix[-_SHARD.size :]))


class Index:
    """Raises lmdb.Error, and OSError where there is no room for it. One thread at a time."""

    def __init__(self, folder: Path, capacity_nbytes: int) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._env = lmdb.open(
            os.fspath(folder), map_size=(64 << 20) + capacity_nbytes // 8, lock=False, max_spare_txns=0, mode=0o600,
            readahead=False,
        )  # fmt: skip
        self._check_length(folder / "data.mdb")

    def _check_length(self, file: Path) -> None:
        """A file that was cut off would end the process, when what is missing is looked at through the mapping."""
        needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if (size := file.stat().st_size) < needed:
            self.close()
            raise lmdb.CorruptedError(f"the index has {size} bytes instead of {needed}")

    def meta(self) -> Meta | None:
        with self._env.begin() as txn:
            value = txn.get(_META)
        return Meta(*_META_VALUE.unpack(value)) if value is not None and len(value) == _META_VALUE.size else None

    def pages(self) -> Iterator[tuple[bytes, Page]]:
        """All that are written down, by name."""
        with self._env.begin() as txn:
            for name, value in txn.cursor():
                if len(name) == _NAME_NBYTES:
                    yield bytes(name), _decode(bytes(value))

    def commit(self, changes: Mapping[bytes, Page | None], meta: Meta) -> None:
        """Write down pages, and forget those that are None. All of it is on the disk afterwards, or nothing."""
        with self._env.begin(write=True) as txn:
            for name in sorted(changes):
                page = changes[name]
                if page is None:
                    txn.delete(name)
                else:
                    txn.put(name, _encode(page))
            txn.put(_META, _META_VALUE.pack(meta.file, meta.day, meta.written_nbytes, meta.closed))

    def close(self) -> None:
        self._env.close()


def _encode(page: Page) -> bytes:
    extents = b"".join(_EXTENT.pack(*extent) for extent in page.extents)
    return _HEAD.pack(page.last_use, page.nbytes, len(page.extents)) + page.seal + extents


def _decode(value: bytes) -> Page:
    last_use, nbytes, count = _HEAD.unpack_from(value)
    start = _HEAD.size + SEAL_NBYTES
    if len(value) != start + count * _EXTENT.size:
        raise lmdb.CorruptedError(f"an entry of {len(value)} bytes with {count} extents")
    extents = tuple(_EXTENT.iter_unpack(value[start:]))
    return Page(nbytes, value[_HEAD.size : start], extents, last_use)
