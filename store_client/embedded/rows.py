"""One page's row in the page table: its name, its checksum and where its bytes lie. Pure encoding, no I/O."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mooncake_connector.kv.keys import KEY_NBYTES

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
U8 = npt.NDArray[np.uint8]

NONE = 0xFFFFFFFF
"""No parent."""

_ROW = struct.Struct("<32sQQQIIIIII10IQ")
ROW_NBYTES = _ROW.size
_CHECKED = ROW_NBYTES - 8
INLINE_EXTENTS = 5

ROW_DTYPE = np.dtype(
    [
        ("key", "u1", KEY_NBYTES),
        ("generation", "<u8"),
        ("checksum", "<u8"),
        ("space", "<u8"),
        ("nbytes", "<u4"),
        ("granules", "<u4"),
        ("parent", "<u4"),
        ("depth", "<u4"),
        ("created", "<u4"),
        ("num_extents", "<u4"),
        ("extents", "<u4", 2 * INLINE_EXTENTS),
        ("check", "<u8"),
    ]
)
assert ROW_DTYPE.itemsize == ROW_NBYTES == 128


@dataclass(frozen=True, slots=True)
class Row:
    """A row as read. `generation` is unique in the pool, so a row that reads the same twice did not change between."""

    key: bytes
    generation: int
    checksum: int
    """xxh3_64 of the page's bytes."""
    space: int
    """Identity of namespace and shard (`spaces.identify`): the row itself proves what its bytes mean."""
    nbytes: int
    granules: int
    """Space taken in the arena, an extent list included."""
    parent: int
    """Slot of the page before it in the chain when it was stored, or NONE."""
    depth: int
    created: int
    """Unix time in seconds."""
    num_extents: int
    """Above INLINE_EXTENTS the row's first extent is one granule that holds the list."""
    extents: tuple[tuple[int, int], ...]
    """(first granule, granules) of the inline extents that are in use."""

    @property
    def is_listed(self) -> bool:
        """Whether its extents are listed elsewhere: in the arena for readers, in the ledger for writers."""
        return self.num_extents > INLINE_EXTENTS

    def encode(self) -> bytes:
        inline = [word for extent in self.extents for word in extent]
        inline += [0] * (2 * INLINE_EXTENTS - len(inline))
        head = _ROW.pack(
            self.key, self.generation, self.checksum, self.space, self.nbytes, self.granules, self.parent, self.depth,
            self.created, self.num_extents, *inline, 0,
        )  # fmt: skip
        return head[:_CHECKED] + struct.pack("<Q", xxhash.xxh3_64_intdigest(head[:_CHECKED]))


def decode(raw: bytes) -> Row | None:
    """The row in `raw`, or None if it is empty, half written or damaged."""
    fields: Any = _ROW.unpack(raw)
    if not fields[1] or xxhash.xxh3_64_intdigest(raw[:_CHECKED]) != fields[20]:
        return None
    words = fields[10:20]
    used = fields[9] if fields[9] <= INLINE_EXTENTS else 1
    extents = tuple((words[2 * i], words[2 * i + 1]) for i in range(used))
    head: tuple[bytes, int, int, int, int, int, int, int, int, int] = fields[:10]
    return Row(*head, extents)


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
    mixed: U64 = (words * _MIX).sum(axis=1, dtype=np.uint64)
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
