"""Prompts that are read and named no further than somebody wants to know, and what was made of their parts before.

Most prompts begin as one before them did. What is made of a part is kept under all of the text up to its end, told
apart by 128 bits of a keyless hash with a seed of this process: an answer is a hint for a router.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import xxhash

from mooncake_connector.kv.keys import page_keys
from store_client.agent.index.hashes import Tokens32, seq_hashes
from store_client.agent.index.text import num_tokens, read_tokens

_PART_NBYTES = 16 << 10
"""Of text; the end of a prompt, which is shorter, is not kept."""
_PARTS_AT_ONCE = 4
"""Arrays of their tokens are small enough for a core's own cache, and large beside what a call of numpy takes."""
_CHECKED_AT_ONCE = 2 * _PARTS_AT_ONCE
"""All parts that are read together were checked together: another one may have other spaces."""
_PART_TOKENS = 4096
"""Of a prompt that is given as tokens."""
_NAME_NBYTES, _ENTRY_NBYTES = 80, 512

K = TypeVar("K", bytes, int)


class Parts:
    """What is kept. One thread at a time.

    Args:
        most_nbytes: the oldest goes beyond that. A prompt of 32,768 tokens takes 0.3 MB with blocks of 16.
    """

    def __init__(self, most_nbytes: int = 64 << 20) -> None:
        self._most_nbytes, self.nbytes = most_nbytes, 0
        self.seed = secrets.randbits(64)
        self._kept: dict[Hashable, Any] = {}
        """The one that was not wanted for longest comes first."""

    def take(self, name: Hashable) -> Any:
        """None where it is not kept."""
        if (known := self._kept.pop(name, None)) is not None:
            self._kept[name] = known
        return known

    def keep(self, name: Hashable, made: Tokens32 | list[Any]) -> None:
        if (before := self._kept.pop(name, None)) is not None:
            self.nbytes -= _nbytes_of(before)
        self._kept[name] = made
        self.nbytes += _nbytes_of(made)
        while self.nbytes > self._most_nbytes:
            self.nbytes -= _nbytes_of(self._kept.pop(next(iter(self._kept))))


def _nbytes_of(made: Tokens32 | list[Any]) -> int:
    return _ENTRY_NBYTES + (made.nbytes if isinstance(made, np.ndarray) else _NAME_NBYTES * len(made))


class Unreadable(Exception):
    """A list that is not written as `text` has it."""


class Prompt:
    """The tokens of a question, in parts. Nothing that is made of these is kept."""

    num_known = 0
    """So many parts, from the first on, were read before."""

    def __init__(self, tokens: Tokens32) -> None:
        self._tokens, self.num_tokens = tokens, len(tokens)
        self.ends = [min(start + _PART_TOKENS, len(tokens)) for start in range(0, len(tokens), _PART_TOKENS)]
        """The token behind each part, as far as tokens were asked for."""
        self.num_parts = len(self.ends)

    def tokens(self, start: int, to: int) -> Tokens32:
        """From token `start` on, those that are before part `to`."""
        return self._tokens[start : self.ends[to - 1] if to else 0]

    def names(self, to: int) -> Sequence[Hashable]:
        """Of parts before `to`, from the first on: each names all that is written up to its end. Of a part without a
        name nothing is kept."""
        return ()


class Written(Prompt):
    """Of a list's text, from `start` to `stop` of a body, tokens are read when they are wanted.

    Raises Unreadable: no part of it is left to be found so later.
    """

    def __init__(self, body: bytes, start: int, stop: int, kept: Parts) -> None:
        self._text, self._kept = memoryview(body), kept
        commas = _cuts(body, start, stop)
        self._starts, self._stops = [start, *(comma + 1 for comma in commas)], [*commas, stop]
        self.num_parts = len(self._stops)
        self._names, self._hash = list[bytes](), xxhash.xxh3_128(seed=kept.seed)
        self._known, self.ends, end = list[Tokens32](), list[int](), 0
        while len(self._known) < len(commas):
            if (part := kept.take(self.names(len(self._known) + 1)[-1])) is None:
                break
            self._known.append(part)
            self.ends.append(end := end + len(part))
        self.num_known = self._apart = len(self._known)
        self.num_tokens = end + self._num_unread()
        self._tokens = np.empty(self.num_tokens, dtype=np.uint32)
        """Of parts that were read; known ones before `_apart` are not in it."""

    def tokens(self, start: int, to: int) -> Tokens32:
        while (first := len(self.ends)) < to:
            last = first + _PARTS_AT_ONCE - (first - self.num_known) % _PARTS_AT_ONCE
            begin, stops = self._starts[first], self._stops[first : min(to, last)]
            read, ends = read_tokens(self._text[begin : stops[-1]], [stop - begin for stop in stops[:-1]])
            end = self.ends[-1] if self.ends else 0
            self._tokens[end : end + len(read)] = read
            self.ends += [end + one for one in ends]
            for name, stop in zip(self.names(to)[first:], self.ends[first:], strict=False):
                self._kept.keep(name, self._tokens[end:stop].copy())  # itself it would keep all others
                end = stop
        wanted = bisect_right(self.ends, start)
        for known, end in zip(self._known[wanted : self._apart], self.ends[wanted:], strict=False):
            self._tokens[end - len(known) : end] = known
        self._apart = min(self._apart, wanted)
        return super().tokens(start, to)

    def names(self, to: int) -> Sequence[Hashable]:
        to = min(to, self.num_parts - 1)
        for at in range(len(self._names), to):
            self._hash.update(self._text[self._starts[at] : self._starts[at + 1]])
            self._names.append(self._hash.digest())
        return self._names[:to]

    def _num_unread(self) -> int:
        count = 0
        for first in range(self.num_known, self.num_parts, _CHECKED_AT_ONCE):
            last = min(first + _CHECKED_AT_ONCE, self.num_parts) - 1
            if (more := num_tokens(self._text[self._starts[first] : self._stops[last]])) is None:
                raise Unreadable
            count += more
        return count


class Names(Generic[K]):
    """Those of a prompt's blocks of one kind, in order, as far as they were asked for."""

    def __init__(
        self, prompt: Prompt, kept: Parts, kind: Hashable, block_tokens: int,
        make: Callable[[Tokens32, K | None], list[K]],
    ) -> None:  # fmt: skip
        self.block_tokens = block_tokens
        self.made: list[K] = []
        self._make: Callable[[Tokens32, K | None], list[K]] = make
        self._prompt, self._kept, self._kind = prompt, kept, kind
        self._part = 0

    def extend(self, to: int) -> None:
        """Name the blocks that end before part `to` does."""
        names = self._prompt.names(to)
        while self._part < len(names) and (known := self._kept.take((self._kind, names[self._part]))) is not None:
            self.made += known
            self._part += 1
        if self._part >= to:
            return
        before = len(self.made)
        tokens = self._prompt.tokens(before * self.block_tokens, to)
        self.made += self._make(tokens, self.made[-1] if self.made else None)
        for name, end in zip(names[self._part :], self._prompt.ends[self._part :], strict=False):
            after = end // self.block_tokens
            self._kept.keep((self._kind, name), self.made[before:after])
            before = after
        self._part = to


def names_of_pages(prompt: Prompt, kept: Parts, page_tokens: int, root: bytes) -> Names[bytes]:
    """Keys, as in `kv.keys`."""

    def make(tokens: Tokens32, parent: bytes | None) -> list[bytes]:
        return page_keys(tokens, page_tokens, root=root, parent=parent)

    return Names(prompt, kept, (page_tokens, root), page_tokens, make)


def names_of_blocks(prompt: Prompt, kept: Parts, block_tokens: int) -> Names[int]:
    """Rolling hashes, as in `hashes`."""

    def make(tokens: Tokens32, parent: int | None) -> list[int]:
        return seq_hashes(tokens, block_tokens, parent)

    return Names(prompt, kept, block_tokens, block_tokens, make)


def _cuts(body: bytes, start: int, stop: int) -> list[int]:
    """The commas at which a list's text is cut into parts; the last part, which is shorter, has none at its end."""
    cuts = list[int]()
    while (comma := body.find(b",", start + _PART_NBYTES, stop)) >= 0:
        cuts.append(comma)
        start = comma + 1
    return cuts
