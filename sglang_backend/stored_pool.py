"""One host pool of SGLang and its pages in the store.

SGLang asks from threads of its own, one for lookups, one for reads and one for writes, and waits without a limit; so
every call ends in time here: pages are moved in a thread that is given up at a deadline, writes wait for the store's
lock at most `_LOCK_WAIT_S`, lookups read mapped memory alone, and after a fault the store is left alone for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.log import get_logger, log_once
from sglang_backend.breaker import PAUSE_S, Breaker
from sglang_backend.errand import Errand
from sglang_backend.host_pages import HostPages
from sglang_backend.metrics import Figures
from store_client.base import Bytes, Put
from store_client.sharded import ShardView

_MOVE_NBYTES, _MOVE_PAGES = 64 << 20, 16
"""So many bytes are moved at a time, but at least so many pages: those are lost when a call is given up, while each
move costs the store a transaction, about 1 ms a write."""
_LOCK_WAIT_S = 0.5
"""Longest wait for the store's lock, which is held for microseconds: longer means that its holder is stopped."""

Load = Callable[[int, Shard, Bytes], None]
"""Takes page i of a call out of the stored page of a part."""
Save = Callable[[int, Bytes], None]
"""Writes page i of a call into the page of this rank's shard."""

T = TypeVar("T")

logger = get_logger(__name__)


class StoredPool:
    """Looks up, loads and saves pages by key; never raises for a fault of the store.

    Args:
        view: the pages in the store, or None while there is no store.
        pages: moves a page between the host pool and the store.
    """

    def __init__(
        self,
        pages: HostPages,
        view: Callable[[], ShardView | None],
        figures: Figures,
        *,
        load_deadline_s: float,
        save_deadline_s: float,
    ) -> None:
        self.pages = pages
        self._view = view
        self._figures = figures
        self._load_deadline_s, self._save_deadline_s = load_deadline_s, save_deadline_s
        self._reads, self._writes = Breaker(), Breaker()

    @property
    def view(self) -> ShardView | None:
        """The pages in the store, or None while there is no store."""
        return self._view()

    def prefix(self, keys: Sequence[bytes]) -> int:
        """How many leading pages are present."""
        view = self._ready(self._reads)
        if view is None:
            return 0
        return self._guarded("lookup", self._reads, lambda: view.prefix(keys), 0)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        view = self._ready(self._reads)
        absent = [False] * len(keys)
        return absent if view is None else self._guarded("lookup", self._reads, lambda: view.contains(keys), absent)

    def load(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[bool]:
        """Copy page i to the slots from `slots[i]` on; for each whether it arrived. Stops at the first that did not."""
        return self.load_into(keys, lambda i, part, page: self.pages.load(slots[i], part, page))

    def save(self, keys: Sequence[bytes], slots: Sequence[int], parent: bytes | None) -> list[bool]:
        """Store the pages at `slots`, a chain that follows `parent`; for each whether the store has it now."""
        return self.save_from(keys, lambda i, page: self.pages.save(slots[i], page), parent)

    def load_into(self, keys: Sequence[bytes], load: Load) -> list[bool]:
        arrived: list[bool] = []
        view = self._ready(self._reads)
        if view is not None:
            started_s = time.monotonic()
            self._bounded(
                "load", self._reads, self._load_deadline_s, lambda errand: self._load(view, keys, load, arrived, errand)
            )
            arrived = arrived[: len(keys)]  # what a call that was given up adds is not seen
            self._figures.loaded(arrived.count(True), view.nbytes, time.monotonic() - started_s)
        return arrived + [False] * (len(keys) - len(arrived))

    def _load(self, view: ShardView, keys: Sequence[bytes], load: Load, arrived: list[bool], errand: Errand) -> None:
        step = _pages_a_move(view)
        for start in range(0, len(keys), step):

            def consume(i: int, part: Shard, page: Bytes, start: int = start) -> None:
                with errand.touching_memory():
                    load(start + i, part, page)

            found = view.read(keys[start : start + step], consume)
            arrived += found
            if not all(found):
                self._figures.failed("load", "page_lost")
                return

    def save_from(self, keys: Sequence[bytes], save: Save, parent: bytes | None) -> list[bool]:
        stored: list[bool] = []
        view = self._ready(self._writes)
        if view is not None:
            self._bounded(
                "save",
                self._writes,
                self._save_deadline_s,
                lambda errand: self._save(view, keys, save, parent, stored, errand),
            )
            stored = stored[: len(keys)]
        return stored + [False] * (len(keys) - len(stored))

    def _save(
        self,
        view: ShardView,
        keys: Sequence[bytes],
        save: Save,
        parent: bytes | None,
        stored: list[bool],
        errand: Errand,
    ) -> None:
        parents = [parent, *keys[:-1]]
        present = view.contains(keys)
        step = _pages_a_move(view)
        for start in range(0, len(keys), step):
            batch = range(start, min(start + step, len(keys)))
            missing = [i for i in batch if not present[i]]

            def fill(n: int, page: Bytes, missing: list[int] = missing) -> None:
                with errand.touching_memory():
                    save(missing[n], page)

            started_s = time.monotonic()
            results = (
                view.write(
                    [keys[i] for i in missing],
                    fill,
                    parents=[parents[i] for i in missing],
                    deadline_s=_LOCK_WAIT_S,
                )
                if missing
                else []
            )
            outcome = dict(zip(missing, results, strict=True))
            stored += [outcome.get(i) is not Put.FAILED for i in batch]
            seconds = time.monotonic() - started_s
            self._figures.saved(results.count(Put.STORED), view.nbytes, seconds)
            if Put.FAILED in results:
                if seconds >= _LOCK_WAIT_S:
                    self._trip("save", "busy", self._writes, "the store's lock was not free")
                else:
                    self._figures.failed("save", "refused")
                return

    def _bounded(self, what: str, breaker: Breaker, deadline_s: float, call: Callable[[Errand], None]) -> None:
        errand = Errand(call)
        if not self._guarded(what, breaker, lambda: errand.finish(deadline_s), True):
            self._trip(what, "deadline", breaker, f"not over after {deadline_s:g} s", errand)

    def _ready(self, breaker: Breaker) -> ShardView | None:
        return None if breaker.is_open else self._view()

    def _guarded(self, what: str, breaker: Breaker, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as error:
            self._trip(what, "error", breaker, repr(error))
            return otherwise

    def _trip(self, what: str, cause: str, breaker: Breaker, text: str, stuck: Errand | None = None) -> None:
        breaker.trip(stuck)
        self._figures.failed(what, cause)
        log_once(
            f"sglang.{what}.{cause}",
            "a %s failed: %s; the pool is not used for %d s (logged once per cause, counted in the metrics)",
            what, text, PAUSE_S,
            logger=logger,
        )  # fmt: skip


def _pages_a_move(view: ShardView) -> int:
    return max(_MOVE_PAGES, _MOVE_NBYTES // view.nbytes)
