"""What the built-in router has sent where: an estimate of what each instance has in its cache that asks nobody."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence


class History:
    """For each instance the chunks of prompts that were last sent to it, by the hash of all up to a chunk's end.

    Args:
        most_chunks: kept for each instance; the longest unused go first, the ends of prompts before their beginnings.
    """

    def __init__(self, most_chunks: int) -> None:
        self._most = most_chunks
        self._of: dict[str, OrderedDict[int, None]] = {}

    def matched(self, url: str, chunks: Sequence[int]) -> int:
        """How many of a prompt's chunks an instance was sent before, from the first on."""
        known = self._of.get(url)
        if not known:
            return 0
        # Whoever has a chunk has all before it, since those are noted, and forgotten, later.
        return bisect_left(chunks, True, key=lambda chunk: chunk not in known)

    def note(self, url: str, chunks: Sequence[int]) -> None:
        """An instance is sent a prompt."""
        known = self._of.setdefault(url, OrderedDict())
        for chunk in reversed(chunks[: self._most]):
            known[chunk] = None
            known.move_to_end(chunk)
        while len(known) > self._most:
            known.popitem(last=False)
