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


def _staged_checksums(runs: PageRuns, staging: Staging) -> list[int]:
    """A part from the device may hold many pages, and a page may come in many parts."""
    ends = np.concatenate(([0], runs.nbytes.cumsum()))[runs.bounds[1:]].tolist()
    digests = [xxhash.xxh3_64() for _ in ends]
    page = done = 0
    for part in staging.read(runs.addresses, runs.nbytes):
        view = memoryview(part)
        while len(view):
            taken = min(len(view), ends[page] - done)
            digests[page].update(view[:taken])
            done, view = done + taken, view[taken:]
            page += done == ends[page]
    return [digest.intdigest() for digest in digests]
