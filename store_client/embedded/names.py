"""What pages are called: namespaces and shards as 64 bits each, the hash of a page's name, and a table of such hashes.

A pool also keeps a list of the namespaces and shards that it has met, so that people and other shards can be told. What
a page means is not decided by that: each row of the page table holds the identity of its namespace and shard.
"""

import errno
import hashlib
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake_connector.errors import NamespaceError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import KEY_NBYTES
from mooncake_connector.kv.namespace import Namespace
from store_client.embedded.locks import open_file, read_file

Bools = npt.NDArray[np.bool_]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int64]
"""Places in the page table, or cells of its hash table."""

SpaceName = tuple[bytes, Shard]
"""Namespace digest and shard."""


def identify(name: SpaceName) -> int:
    """64 bits that stand for a namespace and a shard: the first 8 bytes of SHA256(digest || four bounds)."""
    digest, shard = name
    bounds = (shard.layer_start, shard.layer_stop, shard.head_start, shard.head_stop)
    text = digest + b"".join(bound.to_bytes(8, "little") for bound in bounds)
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def join_keys(keys: Sequence[bytes]) -> U8:
    """The keys as rows of a (n, 32) array. Raises ValueError for a key of another length."""
    joined = b"".join(keys)
    if len(joined) != KEY_NBYTES * len(keys) or (set(map(len, keys)) - {KEY_NBYTES}):
        wrong = next(key for key in keys if len(key) != KEY_NBYTES)
        raise ValueError(f"page key {wrong.hex()!r} has {len(wrong)} bytes: expected {KEY_NBYTES}")
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(keys), KEY_NBYTES)


_WORDS = struct.Struct("<4Q")
_MIX_INTS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_FINISH_INT = 0xFF51AFD7ED558CCD
_MASK = 0xFFFFFFFFFFFFFFFF
_MIX = np.array(_MIX_INTS, dtype=np.uint64)
_FINISH = np.uint64(_FINISH_INT)
_SHIFT = np.uint64(32)


def hash_keys(keys: U8, space: npt.NDArray[np.uint64] | int) -> U64:
    """64-bit hashes of (space, key); `keys` is (n, 32), `space` one identity or n of them."""
    words = np.ascontiguousarray(keys).view("<u8")
    mixed: U64 = words @ _MIX
    mixed += np.asarray(space, dtype=np.uint64) * _FINISH
    mixed ^= mixed >> _SHIFT
    mixed *= _FINISH
    mixed ^= mixed >> _SHIFT
    return mixed


def hash_key(key: bytes, space: int) -> int:
    """`hash_keys` for one key, without the fixed cost of arrays."""
    a, b, c, d = _WORDS.unpack(key)
    p, q, r, s = _MIX_INTS
    mixed = (a * p + b * q + c * r + d * s + space * _FINISH_INT) & _MASK
    mixed = ((mixed ^ mixed >> 32) * _FINISH_INT) & _MASK
    return mixed ^ mixed >> 32


CELLS = 8
CELL_NBYTES = 8
_LOW = np.uint64(0xFFFFFFFF)
_SECOND_INT = 0x9E3779B97F4A7C15
_SECOND = np.uint64(_SECOND_INT)
_ONE = np.uint64(1)


def num_buckets(max_pages: int) -> int:
    """Buckets for half load at `max_pages`."""
    return max(8, -(-max_pages * 2 // CELLS))


class Cells:
    """A hash table from names to slots, in shared memory: two candidate buckets of eight cells for each name.

    A cell is one aligned 64-bit word, `fingerprint << 32 | slot + 1`, or 0. Readers look without a lock: they find a
    cell before or after a change, never half of it. A name lies in the emptier of its two buckets and is never moved,
    so a name may find no room, and its page is then not stored: none of 5 million did at half load, what `num_buckets`
    gives. `words` is a uint64 array of `num_buckets * CELLS` zeros to begin with.
    """

    def __init__(self, words: U64) -> None:
        self._flat, self._halves = words.data, words.view("<u4").data
        self._buckets = words.reshape(-1, CELLS)
        self._count = np.uint64(len(self._buckets))

    def _bucket_pairs(self, hashes: U64) -> U64:
        """(n, 2): the two buckets of each hash."""
        pairs = np.empty((len(hashes), 2), dtype=np.uint64)
        pairs[:, 0] = ((hashes & _LOW) * self._count) >> _SHIFT
        pairs[:, 1] = (((hashes * _SECOND) >> _SHIFT) * self._count) >> _SHIFT
        return pairs

    def _candidates(self, hashes: U64) -> tuple[U64, U64]:
        """The 16 cells of each hash, and the fingerprint that its own cell would have."""
        found = np.take(self._buckets, self._bucket_pairs(hashes).view(np.int64), axis=0)
        return found.reshape(len(hashes), 2 * CELLS), (hashes >> _SHIFT) | _ONE

    def present(self, hashes: U64) -> Bools:
        """Whether a cell with the fingerprint exists: wrong for an absent name once in 2^27, which is only a miss."""
        cells, prints = self._candidates(hashes)
        same = ((cells >> _SHIFT) == prints[:, None]).view(np.uint64)  # `any` of so short rows takes as long as this
        found: Bools = (same[:, 0] | same[:, 1]) != 0
        return found

    def leading(self, keys: Sequence[bytes], space: int) -> int:
        """How many leading keys are `present`, one after the other. For some dozens that is quicker than arrays, and
        three times as quick where the processor did something else in between and has to fetch NumPy's code again."""
        halves, count, (p, q, r, s) = self._halves, len(self._buckets), _MIX_INTS
        for i, key in enumerate(keys):
            a, b, c, d = _WORDS.unpack(key)
            mixed = (a * p + b * q + c * r + d * s + space * _FINISH_INT) & _MASK
            mixed = ((mixed ^ mixed >> 32) * _FINISH_INT) & _MASK
            mixed ^= mixed >> 32
            wanted = mixed >> 32 | 1
            at = ((mixed & 0xFFFFFFFF) * count >> 32) * 2 * CELLS
            if wanted in halves[at + 1 : at + 2 * CELLS : 2].tolist():
                continue
            at = (((mixed * _SECOND_INT & _MASK) >> 32) * count >> 32) * 2 * CELLS
            if wanted not in halves[at + 1 : at + 2 * CELLS : 2].tolist():
                return i
        return len(keys)

    def matches_one(self, hashed: int) -> list[int]:
        """The slots of `matches` for one hash, without the fixed cost of arrays."""
        count, wanted = len(self._buckets), hashed >> 32 | 1
        first = ((hashed & 0xFFFFFFFF) * count >> 32) * CELLS
        second = (((hashed * _SECOND_INT & _MASK) >> 32) * count >> 32) * CELLS
        cells = self._flat[first : first + CELLS].tolist() + self._flat[second : second + CELLS].tolist()
        return [(cell & 0xFFFFFFFF) - 1 for cell in cells if cell >> 32 == wanted]

    def matches(self, hashes: U64) -> tuple[U32, U64]:
        """Which hash (index) may be at which slot: one entry per cell with the right fingerprint."""
        cells, prints = self._candidates(hashes)
        which, where = np.nonzero((cells >> _SHIFT) == prints[:, None])
        return which.astype(np.uint32), (cells[which, where] & _LOW) - _ONE

    def cell_of(self, hashes: U64, slots: U32) -> U64:
        """Index of the cell that holds exactly (hash, slot), for each that has one."""
        pairs = self._bucket_pairs(hashes)
        words = np.take(self._buckets, pairs.view(np.int64), axis=0).reshape(len(hashes), 2 * CELLS)
        which, where = np.nonzero(words == self.values(hashes, slots)[:, None])
        bucket = pairs[which, where // CELLS]
        return bucket * np.uint64(CELLS) + (where % CELLS).astype(np.uint64)

    @staticmethod
    def values(hashes: U64, slots: U32) -> U64:
        """The words that name `slots` under `hashes`."""
        return (((hashes >> _SHIFT) | _ONE) << _SHIFT) | (slots.astype(np.uint64) + _ONE)

    def plan(self, hashes: U64) -> Slots:
        """A free cell for each new name, all different; -1 where both buckets are full. Changes nothing."""
        pairs = self._bucket_pairs(hashes).astype(np.int64)
        buckets, local, uses = np.unique(pairs, return_inverse=True, return_counts=True)
        local = local.reshape(pairs.shape)
        free = self._buckets[buckets] == 0
        room = free.sum(axis=1)
        each = np.arange(len(hashes))
        chosen = local[each, (room[local[:, 0]] < room[local[:, 1]]).astype(np.int64)]
        planned = np.where(room[chosen] > 0, buckets[chosen] * CELLS + free[chosen].argmax(axis=1), -1)
        # Names that share a bucket take from it one after the other.
        choices: Any = local.tolist()
        for i in np.flatnonzero((uses[local] > 1).any(axis=1)).tolist():
            first, second = choices[i]
            taken = first if room[first] >= room[second] else second
            planned[i] = -1
            if room[taken]:
                position = int(free[taken].argmax())
                free[taken, position] = False
                room[taken] -= 1
                planned[i] = buckets[taken] * CELLS + position
        return planned


class Spaces:
    """The file only grows and is read without a lock. A line torn by a killed writer or a full disk is skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[int, tuple[Namespace, Shard]] = {}
        self._seen = (-1, -1, -1)
        self._read_to = 0

    def all(self) -> dict[int, tuple[Namespace, Shard]]:
        """By identity."""
        self._refresh()
        return dict(self._known)

    def register(self, namespace: Namespace, shard: Shard) -> int:
        """Make sure that the file names the space; its identity. Under the write lock only. Raises OSError (ENOSPC)."""
        identity = identify((namespace.digest, shard))
        if identity in self._known:
            return identity
        self._refresh()
        if identity not in self._known:
            self._append(namespace, shard)
            self._known[identity] = (namespace, shard)
        return identity

    def beneath(self, namespace: Namespace, shard: Shard) -> list[int]:
        """The spaces whose pages those of this space hang on: of the same model's layers of full attention, the ones
        with the same heads first. None for such layers themselves, and where a model has one kind only."""
        if not namespace.rests_on_others:
            return []
        self._refresh()
        found = [
            (other.heads != shard.heads, identity)
            for identity, (name, other) in self._known.items()
            if name.family == namespace.family and name.group and not name.rests_on_others
        ]
        return [identity for _, identity in sorted(found)]

    def _append(self, namespace: Namespace, shard: Shard) -> None:
        bounds = [shard.layer_start, shard.layer_stop, shard.head_start, shard.head_stop]
        # The newline in front ends a line that a killed writer left unfinished.
        line = f"\n{json.dumps({'shard': bounds, 'namespace': namespace.to_dict()})}\n".encode()
        fd = open_file(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            size = os.fstat(fd).st_size
            if os.write(fd, line) != len(line):
                os.ftruncate(fd, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self._path))
        finally:
            os.close(fd)

    def _refresh(self) -> None:
        """Read what was added: whole lines, so that the next look begins where a line does."""
        try:
            status = os.stat(self._path)
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            if seen == self._seen:
                return
            if seen[0] != self._seen[0] or seen[1] < self._read_to:
                self._read_to = 0
            added = read_file(self._path, self._read_to)
        except OSError:
            return
        *lines, unfinished = added.split(b"\n")
        for line in lines:
            if line:
                self._learn(line)
        self._read_to += len(added) - len(unfinished)
        self._seen = seen

    def _learn(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            namespace, shard = Namespace.from_dict(entry["namespace"]), Shard(*entry["shard"])
            self._known[identify((namespace.digest, shard))] = (namespace, shard)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, NamespaceError):
            return
