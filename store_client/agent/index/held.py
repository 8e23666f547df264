"""What instances hold in memory of their own, as far as their events say: one bit for each owner of a block.

An owner is an instance's rank and a medium. Blocks are named by rolling hashes (`hashes`), in a *context*: block size,
adapter and salt. One thread writes; others may read at any time, since a block's owners are replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]


class Context(NamedTuple):
    """What must match besides the tokens; the model and the tenant are the owner's."""

    block_tokens: int
    lora: str
    salt: str


class Held:
    def __init__(self) -> None:
        self._blocks: dict[Context, dict[int, int]] = {}
        self._free: list[int] = []
        self._used = 0

    def new_owner(self) -> int:
        """A number for `add`; it is given back with `drop_owner`."""
        if self._free:
            return self._free.pop()
        self._used += 1
        return self._used - 1

    def drop_owner(self, owner: int) -> None:
        """Of which no block is left."""
        self._free.append(owner)

    def add(self, context: Context, owner: int, hashes: Iterable[int]) -> None:
        blocks, bit = self._blocks.setdefault(context, {}), 1 << owner
        for name in hashes:
            blocks[name] = blocks.get(name, 0) | bit

    def remove(self, context: Context, owner: int, hashes: Iterable[int]) -> None:
        blocks, others = self._blocks.get(context, {}), ~(1 << owner)
        for name in hashes:
            if left := blocks.get(name, 0) & others:
                blocks[name] = left
            else:
                blocks.pop(name, None)

    @property
    def num_blocks(self) -> int:
        """Of any owner."""
        return sum(len(blocks) for blocks in list(self._blocks.values()))

    def present(self, context: Context, hashes: Sequence[int]) -> dict[int, Bools]:
        """For each owner of any of these blocks, which of them it has."""
        blocks = self._blocks.get(context)
        if not blocks or not hashes:
            return {}
        masks = [blocks.get(name, 0) for name in hashes]
        width = -(-self._used // 8)  # read after them: an owner may be new
        owners = b"".join([mask.to_bytes(width, "little") for mask in masks])
        packed = np.frombuffer(owners, dtype=np.uint8).reshape(len(hashes), width)
        found = np.unpackbits(np.bitwise_or.reduce(packed, axis=0), bitorder="little")
        owners_of = np.unpackbits(packed, axis=1, bitorder="little")
        bits = np.ascontiguousarray(owners_of.T).view(np.bool_)
        return {owner: bits[owner] for owner in np.flatnonzero(found).tolist()}
