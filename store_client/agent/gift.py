"""One batch of pages on its way from the pool into a tier, straight from the arena; and how large a batch may be.

A page that was evicted or cleared while the tier read it is removed from the tier again, also where the call failed: it
may have been stored all the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from store_client.agent.source import Source
from store_client.base import Pieces, Put
from store_client.embedded import EmbeddedSpace
from store_client.tiers.base import Sealed, SpaceName
from store_client.tiers.seal import seal

_MOST_PAGES = 512
"""In one call of the tier."""
_CALM_BATCHES = 16
"""After so many that came in time, batches that were made smaller grow again."""
_TRIES = 3
"""Of a batch that the tier refuses without saying why, and of a page that alone takes too long. While a tier is full
or not there, nothing is given up but what the pool evicts."""


class BatchSize:
    """How much a tier is given in one call: what it asks for, or less where that took too long."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._bound: int | None = None
        self._calm = 0

    def pages(self, nbytes: int) -> int:
        """How many pages of `nbytes`."""
        with self._lock:
            most = self._source.batch_nbytes if self._bound is None else min(self._bound, self._source.batch_nbytes)
        return max(1, min(_MOST_PAGES, most // nbytes))

    def took_too_long(self, nbytes: int) -> None:
        with self._lock:
            self._bound, self._calm = nbytes // 2, 0

    def came(self) -> None:
        with self._lock:
            self._calm += 1
            if self._bound is not None and self._calm >= _CALM_BATCHES:
                bound, self._calm = 2 * self._bound, 0
                self._bound = bound if bound < self._source.batch_nbytes else None


class Gift:
    """Args: `counted`: pages that the pool has lost meanwhile were overtaken."""

    def __init__(self, source: Source, name: SpaceName, keys: Sequence[bytes], nbytes: int, counted: bool) -> None:
        self._source, self._name, self._keys, self._nbytes = source, name, keys, nbytes
        self._counted = counted
        self._puts: dict[int, Put] = {}
        self._shown: set[int] = set()
        self._cause = ""
        """Why the last try failed."""
        self._called = False
        """Whether it got as far as the tier."""
        self._unsure: set[int] = set()

    @property
    def unsure(self) -> list[bytes]:
        """Pages of which the tier did not say that it has them, at one try at least: it may still store them."""
        return [self._keys[i] for i in sorted(self._unsure)]

    def give(self, space: EmbeddedSpace, wait: Callable[[int], bool]) -> bool:
        """False where it took too long: fewer pages at a time may not. `wait`: until so many bytes may be written;
        False where it is to end."""
        tally = self._source.tally
        errors = 0
        while errors < _TRIES:
            if not wait(len(self._keys) * self._nbytes):
                return True
            self._shown.clear()
            self._cause, self._called = "", False
            stayed = space.show(self._keys, self._write, nbytes=self._nbytes)
            moved = {i for i in self._shown if not stayed[i]} if self._called else set()
            self._take_back([self._keys[i] for i in sorted(moved) if self._puts.get(i) is not Put.PRESENT], wait)
            if not self._cause:
                break
            if not self._called:
                continue
            if self._cause in ("timeout", "hanging") and len(self._shown) > 1:
                return False
            errors += self._cause in ("error", "timeout")  # the pages' fault, maybe; whatever else it is passes
        stored = {i for i, put in self._puts.items() if put is Put.STORED}
        right = len(stored - moved)
        if self._counted:
            tally.add(overtaken_pages=len(self._keys) - len(self._shown) + len(stored & moved))
        tally.add(
            written_pages=right, written_nbytes=right * self._nbytes,
            present_pages=sum(put is Put.PRESENT for put in self._puts.values()),
        )  # fmt: skip
        for put in self._puts.values():
            if put is Put.FAILED:
                tally.failed("refused")
        return True

    def _write(self, pages: Iterable[tuple[int, Pieces, int]]) -> None:
        source, name, secret = self._source, self._name, self._source.secret
        numbers, sealed = [], []
        for i, pieces, checksum in pages:
            numbers.append(i)
            sealed.append(Sealed(self._keys[i], pieces, seal(name, self._keys[i], pieces, checksum, secret)))
        self._shown.update(numbers)

        def write(deadline_s: float) -> list[Put]:
            self._called = True
            return source.tier.write(name, sealed, nbytes=self._nbytes, deadline_s=deadline_s)

        puts, cause, seconds = source.call(source.gifts, source.writes, write)
        source.tally.took("write_s", seconds)
        if puts is None or len(puts) != len(numbers):
            self._cause = cause or "error"
            self._unsure.update(numbers if self._called else ())
        else:
            self._puts.update(zip(numbers, puts, strict=True))
            self._unsure.update(i for i, put in zip(numbers, puts, strict=True) if put is Put.FAILED)

    def _take_back(self, keys: Sequence[bytes], wait: Callable[[int], bool]) -> None:
        """The pool gave their place to others while the tier read it, so what it has is not them, or may not be."""
        source, tries = self._source, 0

        def remove(deadline_s: float) -> int:
            nonlocal tries
            tries += 1
            return source.tier.remove(self._name, keys, deadline_s=deadline_s)

        while keys and tries < _TRIES:
            _, cause, _ = source.call(source.gifts, source.writes, remove)
            if not cause or not wait(0):
                return
