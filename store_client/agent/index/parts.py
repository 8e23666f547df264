"""What was made of the parts of prompts that were asked for lately: most prompts begin as one before them did.

Parts are told apart by 128 bits of a keyless hash with a seed of this process: an answer is a hint for a router.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import xxhash

from mooncake_connector.kv.keys import page_keys
from store_client.agent.index.hashes import Tokens32, seq_hashes

_PART_NBYTES = 16 << 10
"""Of text; shorter ones, as the end of a prompt is, are not kept."""
_PART_BLOCKS = 64

P = ParamSpec("P")
T = TypeVar("T")
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

    def tokens(self, text: bytes, read: Callable[[bytes], Tokens32 | None]) -> Tokens32 | None:
        """What `read` makes of a list's text, part by part between commas; None where it makes nothing of one."""
        found, start = [], 0
        while (stop := text.find(b",", start + _PART_NBYTES)) >= 0:
            part = text[start:stop]
            if (of := self._get(("tokens", self._digest(part)), read, part)) is None:
                return None
            found.append(of)
            start = stop + 1
        if (of := read(text[start:])) is None:
            return None
        return np.concatenate([*found, of])

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
        names: list[K] = []
        parent, step = None, _PART_BLOCKS * block_tokens
        whole = len(tokens) // step * step
        for start in range(0, whole, step):
            part = tokens[start : start + step]
            found = self._get((kind, parent, self._digest(part.data)), make, part, parent)
            names += found
            parent = found[-1]
        return names + make(tokens[whole:], parent)

    def _digest(self, part: bytes | memoryview) -> bytes:
        return xxhash.xxh3_128_digest(part, self._seed)

    def _get(self, asked: Hashable, make: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        found: T | None = self._kept.pop(asked, None)
        if found is None:
            found = make(*given, **named)
        if found is not None:
            self._kept[asked] = found
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        return found
