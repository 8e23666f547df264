"""From pieces to work requests, as arrays: each reads one range there, and scatters it over some ranges here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transfer.transports.base import Int64
from transfer.transports.rdma.keys import Keys
from transfer.transports.rdma.queue_pair import Chain
from transfer.transports.vectors import Pieces


class Read(NamedTuple):
    """One work request; `target` has address, size and key of each range here."""

    address: int
    key: int
    nbytes: int
    target: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Work requests in order. Request i has the ranges from `first[i]` to `first[i + 1]`, and reads as many bytes."""

    address: Int64
    """There."""
    key: Int64
    nbytes: Int64
    first: Int64
    target: Int64
    """Of each range here: address, size and key."""

    def __len__(self) -> int:
        return len(self.address)

    def fill(self, chain: Chain, number: int, start: int, most: int, room_nbytes: int) -> int:
        """Put up to `most` of those from `start` on into an empty chain, numbered from `number` on: one at least, and
        then as many as `room_nbytes` has room for. Returns their bytes."""
        nbytes = self.nbytes[start : start + most].cumsum()
        count = min(len(nbytes), 1 + int(nbytes.searchsorted(room_nbytes)))
        first = self.first[start : start + count + 1]
        stop = start + count
        chain.reads(number, self.address[start:stop], self.key[start:stop], first, self.target[first[0] : first[-1]])
        return int(nbytes[count - 1])


class FewReads(list[Read]):
    """As `Work`, of so few requests that arrays would take longer than these."""

    def fill(self, chain: Chain, number: int, start: int, most: int, room_nbytes: int) -> int:
        nbytes = 0
        for read in self[start : start + most]:
            chain.read(number + chain.count, read)
            nbytes += read.nbytes
            if nbytes >= room_nbytes:
                break
        return nbytes


def plan(pieces: Pieces, there: Keys, here: Keys, max_nbytes: int, max_ranges: int) -> Work | FewReads | None:
    """The requests that fetch `pieces`, in the order of their addresses there; None where one is in no region.

    A request has at most `max_ranges` ranges and twice `max_nbytes`.

    Args:
        there: keys of the memory that is read, `pieces.local`.
        here: keys of the memory that is filled, `pieces.remote`; a piece may lie in several regions that touch.
    """
    if isinstance(pieces.local, list) and (few := _few(pieces, there, here, max_nbytes)) is not None:
        return few
    columns = pieces.local, pieces.remote, pieces.nbytes
    source, target, nbytes = (np.asarray(column, dtype=np.int64) for column in columns)
    if not there.covers(source, nbytes):
        return None
    if not here.covers(target, nbytes):
        source, target, nbytes = _cut(source, target, nbytes, *_to_region_ends(target, nbytes, here))
        if not here.covers(target, nbytes):
            return None
    source, target, nbytes = _joined(source, target, nbytes, there, here)
    if len(nbytes) and nbytes.max() > max_nbytes:
        source, target, nbytes = _cut(source, target, nbytes, *_to_chunks(nbytes, max_nbytes))
    region = there.index(source)
    follows = (source[1:] == source[:-1] + nbytes[:-1]) & (region[1:] == region[:-1])
    begins = _groups(follows, nbytes, max_nbytes, max_ranges)
    ranges = np.stack((target, nbytes, here.keys[here.index(target)]), axis=1)
    first = np.append(begins, len(nbytes))
    return Work(source[begins], there.keys[region[begins]], np.add.reduceat(nbytes, begins), first, ranges)


def _few(pieces: Pieces, there: Keys, here: Keys, max_nbytes: int) -> FewReads | None:
    """A request for each; None where one is too large for that, or does not lie in one region on both sides."""
    requests = FewReads()
    for source, target, nbytes in sorted(zip(pieces.local, pieces.remote, pieces.nbytes, strict=True)):
        read, filled = there.key_of(source, nbytes), here.key_of(target, nbytes)
        if nbytes > max_nbytes or read is None or filled is None:
            return None
        requests.append(Read(source, read, nbytes, [(target, nbytes, filled)]))
    return requests


def _joined(source: Int64, target: Int64, nbytes: Int64, there: Keys, here: Keys) -> tuple[Int64, Int64, Int64]:
    """By their addresses there, and those that follow each other on both sides as one."""
    order = np.argsort(source, kind="stable")
    source, target, nbytes = source[order], target[order], nbytes[order]
    follows = (source[1:] == source[:-1] + nbytes[:-1]) & (target[1:] == target[:-1] + nbytes[:-1])
    for addresses, keys in ((source, there), (target, here)):
        region = keys.index(addresses)
        follows &= region[1:] == region[:-1]
    begins = np.flatnonzero(np.concatenate(([True], ~follows)))
    return source[begins], target[begins], np.add.reduceat(nbytes, begins)


def _groups(follows: npt.NDArray[np.bool_], nbytes: Int64, max_nbytes: int, max_ranges: int) -> npt.NDArray[np.intp]:
    """Where a request begins: at what does not follow there, and within a run whenever one has enough."""
    count = len(nbytes)
    run_begins = np.concatenate(([True], ~follows))
    run_start = np.maximum.accumulate(np.where(run_begins, np.arange(count), 0))
    before = np.cumsum(nbytes) - nbytes
    turn = (np.arange(count) - run_start) // max_ranges
    share = (before - before[run_start]) // max_nbytes
    is_next = np.concatenate(([True], (turn[1:] != turn[:-1]) | (share[1:] != share[:-1])))
    return np.flatnonzero(run_begins | is_next)


def _to_chunks(nbytes: Int64, max_nbytes: int) -> tuple[npt.NDArray[np.intp], Int64]:
    """Cuts of large pieces: of which piece each is, and where in it that begins."""
    counts = -(-nbytes // max_nbytes)
    owner = np.repeat(np.arange(len(nbytes)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, number * max_nbytes


def _to_region_ends(target: Int64, nbytes: Int64, here: Keys) -> tuple[npt.NDArray[np.intp], Int64]:
    """As `_to_chunks`, where a region begins inside of a piece; neighbours are one range to who granted them."""
    owners, offsets = [np.arange(len(nbytes))], [np.zeros(len(nbytes), dtype=np.int64)]
    for start in here.starts.tolist():
        inside = np.flatnonzero((target < start) & (start < target + nbytes))
        owners.append(inside)
        offsets.append(start - target[inside])
    owner, offset = np.concatenate(owners), np.concatenate(offsets)
    order = np.lexsort((offset, owner))
    return owner[order], offset[order]


def _cut(
    source: Int64, target: Int64, nbytes: Int64, owner: npt.NDArray[np.intp], offset: Int64
) -> tuple[Int64, Int64, Int64]:
    is_last = np.append(owner[1:] != owner[:-1], True)
    end = np.where(is_last, nbytes[owner], np.append(offset[1:], 0))
    return source[owner] + offset, target[owner] + offset, end - offset
