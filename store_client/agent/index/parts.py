"""What was made of the parts of prompts that were asked for lately: most prompts begin as one before them did.

Parts are told apart by 128 bits of a keyless hash with a seed of this process: an answer is a hint for a router.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import xxhash

from mooncake_connector.kv.keys import page_keys
from store_client.agent.index.hashes import Tokens32, seq_hashes

_PART_NBYTES = 16 << 10
"""Of text; shorter ones, as the end of a prompt is, are not kept."""
_PARTS_AT_ONCE = 4
"""Arrays of their tokens are small enough for a core's own cache, and large beside what a call of numpy takes."""
COMMA = ord(",")
_PART_BLOCKS = 64

K = TypeVar("K", bytes, int)


class Parts:
    """One thread at a time.

    Args:
        most: parts that are kept; one takes 10 KB, or 33 where its tokens have one digit. A prompt of 32,768 tokens has
            25 parts or more.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._seed = secrets.randbits(64)
        self._kept: dict[Hashable, Any] = {}
        """The one that was not wanted for longest comes first."""

    def tokens(
        self, body: bytes, start: int, end: int, read: Callable[[memoryview], Tokens32 | None]
    ) -> Tokens32 | None:
        """What `read` makes of a list's text, from `start` to `end` of a body, part by part between commas; None where
        it makes nothing of one."""
        cuts, found, text = _cuts(body, start, end), list[Tokens32](), memoryview(body)
        while len(found) < len(cuts):
            stop = cuts[len(found)]
            if (known := self._kept.pop(name := self._name_of(text[start:stop]), None)) is None:
                break
            self._kept[name] = known
            found.append(known)
            start = stop + 1
        for at in range(len(found), len(cuts) + 1, _PARTS_AT_ONCE):
            stops = cuts[at : at + _PARTS_AT_ONCE]
            if (of := read(text[start : stops[-1] if len(stops) == _PARTS_AT_ONCE else end])) is None:
                return None
            found.append(of)
            first = 0
            for stop in stops:
                part = text[start:stop]
                after = first + 1 + np.count_nonzero(np.frombuffer(part, dtype=np.uint8) == COMMA)
                self._keep(self._name_of(part), of[first:after].copy())
                first, start = after, stop + 1
        return np.concatenate(found)

    def page_keys(self, tokens: Tokens32, page_tokens: int, root: bytes) -> list[bytes]:
        """Those of `kv.keys`."""

        def make(part: Tokens32, parent: bytes | None) -> list[bytes]:
            return page_keys(part, page_tokens, root=root, parent=parent)

        return self._chain((page_tokens, root), tokens, page_tokens, make)

    def seq_hashes(self, tokens: Tokens32, block_tokens: int) -> list[int]:
        """Those of `hashes`."""

        def make(part: Tokens32, parent: int | None) -> list[int]:
            return seq_hashes(part, block_tokens, parent)

        return self._chain(block_tokens, tokens, block_tokens, make)

    def _chain(
        self, kind: Hashable, tokens: Tokens32, block_tokens: int, make: Callable[[Tokens32, K | None], list[K]]
    ) -> list[K]:
        names, start, step = list[K](), 0, _PART_BLOCKS * block_tokens
        whole = len(tokens) // step * step

        def name_of(at: int, parent: K | None) -> Hashable:
            return kind, parent, self._digest(tokens[at : at + step].data)

        parent: K | None = None
        while start < whole and (known := self._kept.pop(name := name_of(start, parent), None)) is not None:
            self._kept[name] = known
            names += known
            parent, start = known[-1], start + step
        made = make(tokens[start:], parent)
        for first in range(0, (whole - start) // block_tokens, _PART_BLOCKS):
            part = made[first : first + _PART_BLOCKS]
            self._keep(name_of(start + first * block_tokens, parent), part)
            parent = part[-1]
        return names + made

    def _digest(self, part: memoryview) -> bytes:
        return xxhash.xxh3_128_digest(part, self._seed)

    def _name_of(self, part: memoryview) -> Hashable:
        return "tokens", self._digest(part)

    def _keep(self, name: Hashable, made: Any) -> None:
        self._kept[name] = made
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]


def _cuts(body: bytes, start: int, end: int) -> list[int]:
    """The commas at which a list's text is cut into parts; the last part, which is shorter, has none at its end."""
    cuts = list[int]()
    while (stop := body.find(b",", start + _PART_NBYTES, end)) >= 0:
        cuts.append(stop)
        start = stop + 1
    return cuts
