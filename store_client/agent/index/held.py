"""What instances hold in memory of their own, as far as their events say: one bit for each owner of a block.

An owner is an instance's rank and a medium. Blocks are named by rolling hashes (`hashes`), in a *context*: block size,
adapter and salt. One thread writes; others may read at any time, since a block's owners are replaced as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import compress, count, repeat
from operator import ne
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
_NONE: Bools = np.empty(0, dtype=np.bool_)


class Context(NamedTuple):
    """What must match besides the tokens; the model and the tenant are the owner's."""

    block_tokens: int
    lora: str
    salt: str


class Run(ABC):
    """Which entries of a prompt are there, each of `step` tokens.

    Args:
        leading: how many are there before the first that is not.
    """

    __slots__ = ("leading", "step", "tokens")

    def __init__(self, step: int, leading: int) -> None:
        self.step, self.leading = step, leading
        self.tokens = leading * step
        """Leading ones."""

    @abstractmethod
    def present(self, at: int) -> Bools:
        """Whether each entry from one on is there; empty where that one is not."""

    def reaches(self, token: int) -> int:
        """How far it goes from a token on, without a gap; that token where it does not have it."""
        at = token // self.step
        if at < self.leading:
            return self.tokens
        rest = self.present(at)
        if not len(rest):
            return token
        run = int(rest.argmin())
        return (at + (len(rest) if rest[run] else run)) * self.step


class Entries(Run):
    """A run of what is given as an array."""

    __slots__ = ("_present",)

    def __init__(self, present: Bools, step: int) -> None:
        leading = int(present.argmin()) if len(present) else 0
        super().__init__(step, len(present) if len(present) and present[leading] else leading)
        self._present = present

    def present(self, at: int) -> Bools:
        rest = self._present[at:]
        return rest if len(rest) and rest[0] else rest[:0]


class _Owned(Run):
    """The blocks of one owner."""

    __slots__ = ("_masks", "_owner")

    def __init__(self, masks: _Masks, owner: int, step: int, leading: int) -> None:
        self._masks, self._owner, self.step, self.leading, self.tokens = masks, owner, step, leading, leading * step

    def present(self, at: int) -> Bools:
        masks = self._masks.masks
        if at >= len(masks) or not masks[at] >> self._owner & 1:
            return _NONE
        return self._masks.bits[self._owner, at:]


class _Masks:
    """The owners of each block of a prompt."""

    def __init__(self, masks: Sequence[int], width: int) -> None:
        self.masks, self._width = masks, width

    @cached_property
    def bits(self) -> Bools:
        """By owner and block; rarely wanted."""
        joined = b"".join([mask.to_bytes(self._width, "little") for mask in self.masks])
        packed = np.frombuffer(joined, dtype=np.uint8).reshape(len(self.masks), self._width)
        return np.unpackbits(packed, axis=1, bitorder="little").T.astype(bool)


def union(runs: Sequence[Run]) -> int:
    """Leading tokens that one or another of them has."""
    if len(runs) == 1:
        return runs[0].tokens
    reached, further = 0, max([run.tokens for run in runs], default=0)
    while further > reached:
        reached = further
        further = max([run.reaches(reached) for run in runs if run.tokens != reached], default=0)
    return reached


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
        blocks, others = self._blocks.get(context), ~(1 << owner)
        if blocks is None:
            return
        for name in hashes:
            if left := blocks.get(name, 0) & others:
                blocks[name] = left
            else:
                blocks.pop(name, None)
        if not blocks:  # salts come and go
            del self._blocks[context]

    @property
    def num_blocks(self) -> int:
        """Of any owner."""
        return sum(len(blocks) for blocks in list(self._blocks.values()))

    def __contains__(self, context: object) -> bool:
        """Whether anybody has any block of it."""
        return context in self._blocks

    def masks(self, context: Context, hashes: Sequence[int]) -> list[int]:
        """The owners of each block, as bits; 0 where nobody has it."""
        return list(map(self._blocks.get(context, {}).get, hashes, repeat(0)))

    def runs(self, masks: Sequence[int], block_tokens: int) -> dict[int, Run]:
        """For each owner of any of a prompt's blocks, which of them it has: of their `masks`, in order."""
        if not masks:
            return {}
        found, leading, those = masks[0], dict[int, int](), masks[0]
        # Mostly few: owners leave a prompt one after the other.
        for at in compress(count(1), map(ne, masks[1:], masks)):
            mask = masks[at]
            found |= mask
            if ended := those & ~mask:
                for owner in _bits_of(ended):
                    leading[owner] = at
                those &= mask
        leading |= dict.fromkeys(_bits_of(those), len(masks))
        shared = _Masks(masks, -(-self._used // 8))  # read after the masks: an owner may be new
        return {owner: _Owned(shared, owner, block_tokens, leading.get(owner, 0)) for owner in _bits_of(found)}

    def present(self, context: Context, hashes: Sequence[int]) -> dict[int, Run]:
        """The same of blocks by their names."""
        return self.runs(self.masks(context, hashes), context.block_tokens) if context in self else {}


def _bits_of(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
