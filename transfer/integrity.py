"""Checksums of pages, taken in the memory of either side: XXH3-64 over the bytes that a transfer moves.

Reads raw memory; the caller holds the blocks.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise

import numpy as np
import xxhash

from transfer.plan.pairing import PageRuns
from transfer.transports.cuda.copier import Staging


def page_checksums(runs: PageRuns, staging: Staging | None = None) -> list[int]:
    """One checksum for each page; of memory on a device through `staging`. Raises CudaError."""
    if staging is not None:
        return _staged_checksums(runs, staging)
    addresses, sizes, bounds = runs.addresses.tolist(), runs.nbytes.tolist(), runs.bounds.tolist()
    found = []
    for start, stop in pairwise(bounds):
        digest = xxhash.xxh3_64()
        for address, nbytes in zip(addresses[start:stop], sizes[start:stop], strict=True):
            digest.update((ctypes.c_char * nbytes).from_address(address))
        found.append(digest.intdigest())
    return found


class PassingPages:
    """The same for pages whose bytes come by one after the other: in parts that may hold many, or a bit of one."""

    def __init__(self, runs: PageRuns) -> None:
        self._ends: list[int] = np.concatenate(([0], runs.nbytes.cumsum()))[runs.bounds[1:]].tolist()
        self._digests = [xxhash.xxh3_64() for _ in self._ends]
        self._page = self._done = 0

    def update(self, part: memoryview) -> None:
        """The next bytes."""
        while len(part):
            taken = min(len(part), self._ends[self._page] - self._done)
            self._digests[self._page].update(part[:taken])
            self._done, part = self._done + taken, part[taken:]
            self._page += self._done == self._ends[self._page]

    def checksums(self) -> list[int]:
        """Of what has come by."""
        return [digest.intdigest() for digest in self._digests]


def _staged_checksums(runs: PageRuns, staging: Staging) -> list[int]:
    pages = PassingPages(runs)
    for part in staging.read(runs.addresses, runs.nbytes):
        pages.update(memoryview(part))
    return pages.checksums()
