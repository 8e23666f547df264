"""Checksums of pages, taken in the memory of either side: XXH3-64 over the bytes that a transfer moves.

Reads raw memory; the caller holds the blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import xxhash

from transfer.plan import PageRuns


def page_checksums(runs: PageRuns) -> list[int]:
    """One checksum for each page."""
    addresses, sizes, bounds = runs.addresses.tolist(), runs.nbytes.tolist(), runs.bounds.tolist()
    found = []
    for start, stop in pairwise(bounds):
        digest = xxhash.xxh3_64()
        for address, nbytes in zip(addresses[start:stop], sizes[start:stop], strict=True):
            digest.update((ctypes.c_char * nbytes).from_address(address))
        found.append(digest.intdigest())
    return found


def wrong_pages(runs: PageRuns, checksums: Sequence[int]) -> list[int]:
    """Numbers of the pages whose bytes are not those that the other side took these checksums of.

    All are wrong where there is not one checksum for each page; without pages, surplus checksums make number 0 wrong.
    """
    own = page_checksums(runs)
    if len(own) != len(checksums):
        return list(range(len(own))) or [0]
    return [number for number, (one, other) in enumerate(zip(own, checksums, strict=True)) if one != other]
