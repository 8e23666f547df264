"""A row of the page table: what one page is, where it lies, and a checksum over that.

Written by the holder of the write lock and read without one, so a row proves itself: whatever is half written or
damaged decodes to nothing.
"""

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from mooncake_connector.kv.keys import KEY_NBYTES

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


class Row(NamedTuple):
    """A row as read. `generation` is unique in the pool, so a row that reads the same twice did not change between."""

    key: bytes
    generation: int
    checksum: int
    """xxh3_64 of the page's bytes."""
    space: int
    """Identity of namespace and shard (`names.identify`): the row itself proves what its bytes mean."""
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

    @staticmethod
    def decode(raw: bytes) -> "Row | None":
        """The row in `raw`, or None if it is empty, half written or damaged."""
        fields: Any = _ROW.unpack(raw)
        if not fields[1] or xxhash.xxh3_64_intdigest(raw[:_CHECKED]) != fields[20]:
            return None
        words = fields[10:20]
        used = fields[9] if fields[9] <= INLINE_EXTENTS else 1
        extents = tuple((words[2 * i], words[2 * i + 1]) for i in range(used))
        head: tuple[bytes, int, int, int, int, int, int, int, int, int] = fields[:10]
        return Row(*head, extents)


def sealed(rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint8]:
    """Rows of ROW_DTYPE as bytes, (n, ROW_NBYTES), each with its check."""
    blob = rows.tobytes()
    checks = [xxhash.xxh3_64_intdigest(blob[at : at + _CHECKED]) for at in range(0, len(blob), ROW_NBYTES)]
    rows["check"] = np.array(checks, dtype=np.uint64)
    return rows.view(np.uint8).reshape(-1, ROW_NBYTES)
