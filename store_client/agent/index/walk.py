"""How far anybody has a prompt, found by going along it: what comes after that is neither read nor named nor looked up.

An answer counts leading tokens alone. So a part of the prompt is of interest while somebody has the end of the part
before it: an instance a block in memory of its own, or the pool or a tier a page. Who it is does not matter here. The
entries of all instances and media are taken together, so none of them can go further than that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice

import numpy as np

from store_client.agent.index.held import Context, Held, Run
from store_client.agent.index.pages import Bools, Found, Look
from store_client.agent.index.parts import Names, Prompt

_MORE = 4
"""So many times as many parts come next where somebody has all of these: to look costs as much as a part or two."""


class Line(ABC):
    """A prompt's entries of one kind, all of the same length.

    Args:
        most: so many of them count.
    """

    def __init__(self, names: Names[int] | Names[bytes], most: int) -> None:
        self.there = list[int]()
        """What was found out about each, as far as was looked: 0 where nobody has it."""
        self._names, self._step, self._most = names, names.block_tokens, most

    def go(self, to: int) -> None:
        """Look up those that end before part `to` of the prompt."""
        if len(self.there) < self._most:
            self._names.extend(to)
            self._look(len(self.there), self._most)

    @abstractmethod
    def _look(self, start: int, stop: int) -> None:
        """Find out about names from one on, before another; not all of them may be made."""

    def reaches(self, token: int) -> int:
        """How far entries that somebody has go from a token on; that token where nobody has it."""
        at = token // self._step
        if at >= len(self.there) or not self.there[at]:
            return token
        gap = len(self.there) if all(islice(self.there, at, None)) else self.there.index(0, at)
        return gap * self._step

    def is_open(self, token: int) -> bool:
        """Whether somebody may have that token and it was not looked up yet."""
        return len(self.there) < self._most and token // self._step >= len(self.there)


class BlockLine(Line):
    """What instances have in memory of their own, in one context."""

    def __init__(self, held: Held, context: Context, names: Names[int], most: int) -> None:
        super().__init__(names, most)
        self._held, self._context, self._hashes = held, context, names.made

    def _look(self, start: int, stop: int) -> None:
        self.there += self._held.masks(self._context, self._hashes[start:stop])

    def runs(self) -> dict[int, Run]:
        """By owner."""
        return self._held.runs(self.there, self._step)


class PageLine(Line):
    """What the pool and the tiers have."""

    def __init__(self, look: Look, names: Names[bytes], most: int) -> None:
        super().__init__(names, most)
        self._source, self._keys = look, names.made
        self._in_pool, self._in_tiers = list[Bools](), list[tuple[int, dict[str, Bools]]]()
        self._asked = 0

    def _look(self, start: int, stop: int) -> None:
        if keys := self._keys[start:stop]:
            self._in_pool.append(self._source.in_pool(keys))
            self.there += self._in_pool[-1].tolist()

    async def ask_tiers(self) -> None:
        """For the pages that were looked up since they were asked before."""
        start, self._asked = self._asked, len(self.there)
        found = await self._source.in_tiers(self._keys[start : self._asked])
        self._in_tiers.append((start, found))
        for present in found.values():
            for at in np.flatnonzero(present):
                self.there[start + at] = 1

    def found(self) -> Found:
        tiers = dict[str, Bools]()
        for start, found in self._in_tiers:
            for kind, present in found.items():
                every = tiers.setdefault(kind, np.zeros(len(self.there), dtype=bool))
                every[start : start + len(present)] = present
        return Found(np.concatenate([np.zeros(0, dtype=bool), *self._in_pool]), tiers)


class Walk:
    def __init__(self, prompt: Prompt, lines: Sequence[Line]) -> None:
        self._prompt, self._lines = prompt, lines
        self._part, self._reached = 0, 0

    async def go(self) -> None:
        """As far as anybody has the prompt. Tiers are asked once, for what was looked up by then, and where one of them
        goes on beyond everybody else once more, for all that is left."""
        to, more = self._prompt.num_known + 1, _MORE  # what was read before is little work
        while self._is_open():
            self._look_up(min(to, self._prompt.num_parts))
            to, more = to + more, _MORE * more
        await self._ask_tiers()
        if self._is_open():
            self._look_up(self._prompt.num_parts)
            await self._ask_tiers()

    def _look_up(self, to: int) -> None:
        for line in self._lines:
            line.go(to)
        self._part = to

    async def _ask_tiers(self) -> None:
        for line in self._lines:
            if isinstance(line, PageLine):
                await line.ask_tiers()

    def _is_open(self) -> bool:
        further = self._reached
        while (further := max((line.reaches(further) for line in self._lines), default=0)) > self._reached:
            self._reached = further
        return self._part < self._prompt.num_parts and any(line.is_open(self._reached) for line in self._lines)
