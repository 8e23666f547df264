"""Registered regions with the keys by which a card may touch them, as the sender attaches them to its orders."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transfer.transports.base import MAX_PIECE_NBYTES, Int64, Numbers, Region, first_outside
from transfer.transports.wire import WireError

MAX_REGIONS = 4096
"""Of one order."""
_ROW = np.dtype([("address", "<u8"), ("nbytes", "<u8"), ("key", "<u8")])
_FIELDS = struct.Struct("<QQQ")
MAX_NBYTES = MAX_REGIONS * _ROW.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """Regions, ascending, which do not overlap; `keys[i]` is the card's for region i, of 32 bits."""

    starts: Int64
    sizes: Int64
    keys: Int64

    @classmethod
    def of(cls, keyed: Iterable[tuple[Region, int]]) -> Keys:
        rows = sorted((region.address, region.nbytes, key) for region, key in keyed)
        starts, sizes, keys = np.array(rows, dtype=np.int64).reshape(-1, 3).T.copy()
        return cls(starts, sizes, keys)

    def covers(self, addresses: Numbers, nbytes: Numbers) -> bool:
        """Whether each piece lies inside one region."""
        return first_outside(addresses, nbytes, self.starts, self.sizes) is None

    def key_of(self, address: int, nbytes: int) -> int | None:
        """Of the region that the piece lies in."""
        index = bisect_right(self.starts, address) - 1
        is_inside = index >= 0 and address + nbytes <= self.starts.item(index) + self.sizes.item(index)
        return self.keys.item(index) if is_inside else None

    def spans(self, addresses: Numbers, nbytes: Numbers, most: int) -> list[tuple[int, int, int]]:
        """Of each region that pieces begin in, by its index: where the first one begins, and the size from there to the
        end of the last, or to its own; in several parts where that is more than `most`, which no piece is."""
        if not len(self.starts):
            return []
        starts, sizes = (np.asarray(column, dtype=np.int64) for column in (addresses, nbytes))
        regions = self.index(starts)
        begins = np.full(len(self.starts), np.iinfo(np.int64).max)
        ends = np.zeros(len(self.starts), dtype=np.int64)
        is_known = regions >= 0
        np.minimum.at(begins, regions[is_known], starts[is_known])
        np.maximum.at(ends, regions[is_known], (starts + sizes)[is_known])
        np.minimum(ends, self.starts + self.sizes, out=ends)
        used = np.flatnonzero(begins < ends)
        spans = list(zip(used.tolist(), begins[used].tolist(), (ends - begins)[used].tolist(), strict=True))
        if all(size <= most for *_, size in spans):
            return spans
        found: list[tuple[int, int, int]] = []
        for index, begin, size in spans:
            its = (regions == index) & (starts < begin + size)
            until = np.minimum((starts + sizes)[its], begin + size)
            found += [(index, *part) for part in _parts(starts[its], until, most)]
        return found

    def index(self, addresses: Int64) -> npt.NDArray[np.intp]:
        """Of the region that begins at or before each address, which must not be before all."""
        return self.starts.searchsorted(addresses, side="right") - 1

    def encode(self, addresses: Numbers) -> bytes:
        """Those that these addresses lie in, `MAX_REGIONS` at most; to whom one is not told, it cannot be read."""
        if isinstance(addresses, list):
            used = sorted({bisect_right(self.starts, address) - 1 for address in addresses} - {-1})
            columns = self.starts, self.sizes, self.keys
            return b"".join(_FIELDS.pack(*(column.item(index) for column in columns)) for index in used)
        rows = np.empty(len(self.starts), _ROW)
        rows["address"], rows["nbytes"], rows["key"] = self.starts, self.sizes, self.keys
        regions = np.unique(self.index(np.asarray(addresses, dtype=np.int64)))
        return rows[regions[regions >= 0]][:MAX_REGIONS].tobytes()


def _parts(starts: Int64, ends: Int64, most: int) -> list[tuple[int, int]]:
    """Address and size of as few ranges as hold these, which may overlap; the ranges do not. Those that overlap one
    another are less than `most` together."""
    order = np.argsort(starts, kind="stable")
    begins, reach = starts[order], np.maximum.accumulate(ends[order])
    is_apart = begins[1:] >= reach[:-1]
    begins, reach = begins[np.append(True, is_apart)], reach[np.append(is_apart, True)]
    found, at = [], 0
    while at < len(begins):
        stop = max(at + 1, int(reach.searchsorted(begins[at] + most, side="right")))
        found.append((int(begins[at]), int(reach[stop - 1] - begins[at])))
        at = stop
    return found


def decode_keys(data: bytes) -> Keys:
    """Raises WireError for what no sender sends."""
    if len(data) % _ROW.itemsize:
        raise WireError(f"keys of {len(data)} bytes")
    rows = np.frombuffer(data, _ROW)
    numbers = np.stack((rows["address"], rows["nbytes"], rows["key"]))
    if numbers.size and not (numbers[:2].min() > 0 and numbers[:2].max() <= MAX_PIECE_NBYTES):
        raise WireError("a region whose address or size is none")
    if numbers.size and numbers[2].max() >= 1 << 32:
        raise WireError("a key of more than 32 bits")
    starts, sizes, keys = numbers.astype(np.int64)
    if (starts[1:] < starts[:-1] + sizes[:-1]).any():
        raise WireError("regions that overlap or do not ascend")
    return Keys(starts, sizes, keys)
