"""Rolling block hashes, by which routers and events name what is in an engine's own memory.

    local[i] = XXH3-64(tokens of block i, each uint32 little endian, seed 1337)
    seq[0] = local[0];  seq[i] = XXH3-64(seq[i-1] || local[i], each uint64 little endian, seed 1337)

Source: Mooncake RFC #1527 and its Conductor's documentation. 64 bits suffice here: an answer is a hint for a router,
and pages are named by their own keys.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import xxhash

SEED = 1337

Tokens32 = npt.NDArray[np.uint32]

_PAIR = struct.Struct("<QQ").pack
_hash = xxhash.xxh3_64_intdigest


def seq_hashes(tokens: Tokens32, block_tokens: int, parent: int | None = None) -> list[int]:
    """Of the full blocks of `tokens`, in order; `parent` is that of the block before the first one."""
    raw = np.ascontiguousarray(tokens, dtype="<u4").data.cast("B")
    step = 4 * block_tokens
    stop = len(tokens) // block_tokens * step
    names = [_hash(raw[start : start + step], SEED) for start in range(0, stop, step)]
    for at, local in enumerate(names):
        if parent is not None:
            names[at] = local = _hash(_PAIR(parent, local), SEED)
        parent = local
    return names
