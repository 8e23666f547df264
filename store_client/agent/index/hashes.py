"""Rolling block hashes, by which routers and events name what is in an engine's own memory.

    local[i] = XXH3-64(tokens of block i, each uint32 little endian, seed 1337)
    seq[0] = local[0];  seq[i] = XXH3-64(seq[i-1] || local[i], each uint64 little endian, seed 1337)

Source: Mooncake RFC #1527 and its Conductor's documentation. 64 bits suffice here: an answer is a hint for a router,
and pages are named by their own keys.
"""

from __future__ import annotations

import struct
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import xxhash

SEED = 1337

Tokens32 = npt.NDArray[np.uint32]

_PAIR = struct.Struct("<QQ").pack
_hash = xxhash.xxh3_64_intdigest


def seq_hashes(tokens: Tokens32, block_tokens: int, parent: int | None = None) -> list[int]:
    """Of the full blocks of `tokens`, in order; `parent` is that of the block before the first one."""
    if len(tokens) < block_tokens:
        return []
    raw = np.ascontiguousarray(tokens[: len(tokens) // block_tokens * block_tokens], dtype="<u4").tobytes()
    names = [_hash(block, SEED) for (block,) in struct.iter_unpack(f"{4 * block_tokens}s", raw)]
    if parent is not None:
        names[0] = _follow(parent, names[0])
    return list(accumulate(names, _follow))


def _follow(parent: int, local: int) -> int:
    return _hash(_PAIR(parent, local), SEED)
