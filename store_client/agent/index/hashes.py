"""Rolling block hashes, by which routers and events name what is in an engine's own memory.

    local[i] = XXH3-64(tokens of block i, each uint32 little endian, seed 1337)
    seq[0] = local[0];  seq[i] = XXH3-64(seq[i-1] || local[i], each uint64 little endian, seed 1337)

Source: Mooncake RFC #1527 and its Conductor's documentation. 64 bits suffice here: an answer is a hint for a router,
and pages are named by their own keys.
"""

from __future__ import annotations

import struct
from itertools import repeat

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
    whole = np.ascontiguousarray(tokens[: len(tokens) // block_tokens * block_tokens], dtype="<u4")
    blocks: list[bytes] = whole.view(f"V{4 * block_tokens}").tolist()
    local = map(_hash, blocks, repeat(SEED))
    names = [next(local) if parent is None else _hash(_PAIR(parent, next(local)), SEED)]
    add, pair, name, seed = names.append, _PAIR, names[0], SEED  # most of the time goes in this loop
    for one in local:
        name = _hash(pair(name, one), seed)
        add(name)
    return names
