"""A pool's traffic as a trace: when which chain of pages was used. No text, no tokens, and no names of pages.

Names are hashed with a number that is drawn for each recording and kept nowhere, so nobody who has a prompt can look
for it in a recording. What an engine finds in its own memory, and what is never stored, does not reach the pool, nor
this.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash

from store_client.embedded.table import USES_APART_NS
from store_client.embedded.watching import UsedChain
from store_client.simulation.traces import KIND

_SETTLED_NS = 60 * 10**9
"""A request that stored nothing for so long is over."""


@dataclass(slots=True)
class _Open:
    """A request that may go on: engines store its pages as they are computed."""

    begun_ns: int
    last_ns: int
    pages: tuple[int, ...]
    uses: int
    """Of its last page."""


class Recording:
    """Writes requests to the file `path` (0600, which must not be there) until there are `most` of them.

    Raises OSError.
    """

    def __init__(self, path: Path, page_tokens: int, most: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file: IO[str] = os.fdopen(fd, "w", encoding="ascii")
        self._page_tokens, self._most = page_tokens, most
        self._secret = os.urandom(16)
        self._open: OrderedDict[int, _Open] = OrderedDict()
        """By the last page."""
        self._first_ns: int | None = None
        self.requests = 0
        """Written so far."""
        self._write({"kind": KIND, "version": 1, "page_tokens": page_tokens})

    @property
    def is_full(self) -> bool:
        return self.requests >= self._most

    def add(self, chains: list[UsedChain], now_ns: int) -> None:
        """Take note of uses, in their order, and write down what is over at `now_ns`."""
        for chain in chains:
            former = self._continued(chain)
            begun_ns = former.begun_ns if former is not None else chain.used_ns
            self._open[chain.pages[-1]] = _Open(begun_ns, chain.used_ns, chain.pages, chain.uses[-1])
            self._open.move_to_end(chain.pages[-1])
        for last in [last for last, each in self._open.items() if now_ns - each.last_ns > _SETTLED_NS]:
            self._settle(self._open.pop(last))

    def _continued(self, chain: UsedChain) -> _Open | None:
        """The request that this chain goes on with: one whose last page is in it and was not used for itself since.

        The same chain again, more than a second after that began, is another request, whatever its uses: they are not
        counted without end, nor where one comes within a second of the other for as long as that goes on.
        """
        for at in range(len(chain.pages) - 1, -1, -1):
            former = self._open.get(chain.pages[at])
            if former is None:
                continue
            del self._open[chain.pages[at]]
            if at == len(chain.pages) - 1:
                is_another = chain.used_ns - former.begun_ns > USES_APART_NS
            else:
                is_another = chain.uses[at] != former.uses
            if not is_another:
                return former
            self._settle(former)
            return None
        return None

    def _settle(self, request: _Open) -> None:
        if self.is_full:
            return
        self._first_ns = request.begun_ns if self._first_ns is None else self._first_ns
        self._write({
            "timestamp": (request.begun_ns - self._first_ns) // 10**6,
            "input_length": len(request.pages) * self._page_tokens,
            "output_length": 0,
            "hash_ids": [self._alias(page) for page in request.pages],
        })  # fmt: skip
        self.requests += 1

    def _alias(self, page: int) -> int:
        """48 bits, which every reader of JSON can hold."""
        return xxhash.xxh3_64_intdigest(self._secret + page.to_bytes(8, "little")) >> 16

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Write down what is still open, too. Raises OSError where that fails; the file is closed all the same."""
        try:
            for request in sorted(self._open.values(), key=lambda each: each.begun_ns):
                self._settle(request)
        finally:
            self._open.clear()
            self._file.close()
