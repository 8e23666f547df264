"""One host pool of SGLang and its pages in the store.

SGLang asks from threads of its own, one for lookups, one for reads and one for writes, and waits without a limit; so
every call ends in time here: pages are moved by a mover (:mod:`store_client.mover`), whose job is given up at its
deadline, lookups read mapped memory alone, and after a fault the store is left alone for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, TypeVar

from mooncake_connector.config.schema import Config
from mooncake_connector.log import get_logger, log_once
from mooncake_connector.misses import Miss
from sglang_backend.host_pages import HostPages
from sglang_backend.metrics import Metrics
from store_client.base import Bytes
from store_client.jobs import NOT_LANDED, Job, Load, Save
from store_client.missing import fate_of, why_missing
from store_client.mover import PAUSE_S, UNWANTED, Mover
from store_client.sharded import ConsumePart, ShardView

_STOP_S = 2.0
_ASK_AGAIN_S = 0.002
_LOOKUP_HANGS_S = 1.0
"""A lookup only reads memory: one that took so much longer than it may wait says that the next one will as well."""
_MOST_PROMISED = 1 << 16
"""Keys of pages that were promised and not asked for yet; beyond so many they are forgotten, and not counted."""
_FAULTS = ("busy", "deadline", "error")
"""What the store is left alone for: SGLang would wait for each of the next calls as long."""

J = TypeVar("J", bound=Job)
T = TypeVar("T")

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Movers:
    """What moves the pages of all host pools of one backend."""

    loads: Mover[Load] = field(default_factory=lambda: Mover("load", _FAULTS))
    saves: Mover[Save] = field(default_factory=lambda: Mover("save", _FAULTS))

    def stop(self) -> None:
        self.loads.stop(_STOP_S)
        self.saves.stop(_STOP_S)


class Found(NamedTuple):
    """What a lookup found."""

    pages: int
    """So many leading ones."""
    why: Miss | None = None
    """Why not the one behind them."""


class StoredPool:
    """Looks up, loads and saves pages by key; never raises for a fault of the store.

    Args:
        view: the pages in the store, or None while there is no store.
        pages: moves a page between the host pool and the store.
        asked: whether SGLang still waits for the answer to its lookup.
    """

    def __init__(
        self,
        pages: HostPages,
        view: Callable[[], ShardView | None],
        movers: Movers,
        metrics: Metrics,
        config: Config,
        asked: Callable[[], bool],
    ) -> None:
        self.pages = pages
        self._asked = asked
        self._view, self._movers, self._metrics, self._config = view, movers, metrics, config
        self._impatient_until_s = 0.0
        self._promised: set[bytes] = set()

    @property
    def view(self) -> ShardView | None:
        """The pages in the store, or None while there is no store."""
        return self._view()

    def prefix(self, keys: Sequence[bytes], parent: bytes | None = None, *, fetch: bool = True) -> Found:
        """How many leading pages are present or coming, after a wait for those of which the store does not know yet.

        SGLang's prefetch thread may wait. Its scheduler, which asks in the main thread, may not, and is told of what is
        present alone, as everybody is where not `fetch`. `parent` is the key before the first one, where it is known.
        """
        ready = self._ready(self._movers.loads)
        if ready is None:
            return Found(0, Miss.STALLED if self._view() is not None else Miss.UNAVAILABLE)
        return self._look_up(lambda view: self._prefix(view, keys, parent, fetch), Found(0, Miss.UNAVAILABLE))

    def each(self, keys: Sequence[bytes], wait_s: float) -> list[bool]:
        """For each page by itself whether it is present or coming, after a wait as in `prefix`, of at most `wait_s`."""
        return self._look_up(lambda view: self._each(view, keys, wait_s), [False] * len(keys))

    def _each(self, view: ShardView, keys: Sequence[bytes], wait_s: float) -> list[bool]:
        asked_s = time.monotonic()
        if self._patience_s(asked_s) is None:  # each key is a question of its own, whose answer would not count
            return view.contains(keys)
        view.prefetch((), patient=True)
        found = [view.lookup([key]) for key in keys]
        waits = late = any(one.pending for one in found)
        while late and time.monotonic() - asked_s < wait_s and self._asked():
            time.sleep(_ASK_AGAIN_S)
            found = [view.lookup([key]) if one.pending else one for key, one in zip(keys, found, strict=True)]
            late = any(one.pending for one in found)
        if waits:
            self._metrics.waited(time.monotonic() - asked_s)
        self._waited(asked_s, wait_s, late=late)
        self._promise([key for key, one in zip(keys, found, strict=True) if one.coming])
        return [one.pages + one.coming > 0 for one in found]

    def _patience_s(self, now_s: float) -> float | None:
        """How long a lookup may wait; None where pages that are coming do not count either."""
        may_wait = now_s >= self._impatient_until_s and threading.current_thread() is not threading.main_thread()
        return self._config.lookup_wait_s if may_wait else None

    def _prefix(self, view: ShardView, keys: Sequence[bytes], parent: bytes | None, fetch: bool) -> Found:
        if not fetch:
            pages = sum(takewhile(bool, view.contains(keys)))
            return Found(pages, None if pages == len(keys) else self._why(view, keys[pages]))
        asked_s = time.monotonic()
        wait_s = self._patience_s(asked_s)
        if self._config.tiers:
            view.prefetch(keys, parent=parent, patient=True)
        found = view.lookup(keys)
        if found.pending and wait_s:
            found = view.lookup_within(keys, wait_s, self._asked)
            self._metrics.waited(time.monotonic() - asked_s)
        self._waited(asked_s, wait_s, late=found.pending)
        pages = found.pages
        if wait_s is not None:
            self._promise(keys[found.pages : found.pages + found.coming])
            pages += found.coming
        if pages == len(keys):
            return Found(pages)
        late = found.pending or found.unheard or pages < found.pages + found.coming
        return Found(pages, Miss.LATE if late else self._why(view, keys[pages]))

    def _why(self, view: ShardView, key: bytes) -> Miss:
        """Why a page is missing, as far as the pool remembers."""
        fate = fate_of([view], key)
        why = why_missing(fate)
        if fate is not None and why is Miss.EVICTED:
            self._metrics.evicted(unused_s=fate.unused_s, reuse_s=fate.unused_s + fate.ago_s)
        return why

    def why_not_everywhere(self, key: bytes, whole: ShardView | None) -> Miss:
        """Why another rank lacks a page; `whole` is the page with the parts of all ranks, where those are here."""
        return Miss.RANKS_DISAGREE if whole is None or whole.contains([key])[0] else self._why(whole, key)

    def _waited(self, asked_s: float, wait_s: float | None, *, late: bool) -> None:
        """A lookup that was begun at `asked_s` is over; `late`: the store did not say all of it."""
        now_s = time.monotonic()
        if late and wait_s and self._asked():
            self._impatient_until_s = now_s + PAUSE_S  # else each request behind this one would wait as long in turn
            self._metrics.failed("lookup", "late")
            log_once(
                "sglang.lookup.late",
                "the pool did not say within %g s whether it will have the rest of a prompt: what is not there is "
                "computed, and no lookup waits for %d s",
                wait_s, PAUSE_S,
                logger=logger,
            )  # fmt: skip
        if now_s - asked_s > (wait_s or 0.0) + _LOOKUP_HANGS_S:
            self._lookup_failed("hung", f"it took {now_s - asked_s:.1f} s")

    def _promise(self, keys: Sequence[bytes]) -> None:
        """SGLang will be told that these are hits, and asks for them in a moment; not for all, and not always."""
        if keys:
            if len(self._promised) > _MOST_PROMISED:
                self._promised.clear()
            self._promised.update(keys)
            self._metrics.promised(len(keys))

    def _count_promised(self, keys: Sequence[bytes], loaded: int) -> None:
        """What became of those that were promised, of which the first `loaded` came."""
        if self._promised:
            found = [number < loaded for number, key in enumerate(keys) if key in self._promised]
            self._promised.difference_update(keys)
            self._metrics.came(sum(found), len(found) - sum(found))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._look_up(lambda view: view.contains(keys), [False] * len(keys))

    def load(self, keys: Sequence[bytes], copy: ConsumePart, wanted: Callable[[], bool]) -> list[bool]:
        """For each page whether it arrived; stops at the first that did not, and once they are not `wanted` any more.

        `copy` takes page i out of the stored page of a part.
        """
        job = Load(keys=keys, view=self._view, deadline_s=self._config.load_deadline_s, copy=copy)
        if view := self._run("load", self._movers.loads, job, wanted):
            self._metrics.moved("load", job.pages, view.nbytes, job.seconds)
        self._count_promised(keys[: job.pages] if job.cause == UNWANTED else keys, job.pages)
        return [number < job.pages for number in range(len(keys))]

    def save(
        self,
        keys: Sequence[bytes],
        copy: Callable[[int, Bytes], None],
        parent: bytes | None,
        wanted: Callable[[], bool] | None = None,
    ) -> list[bool]:
        """Store a chain of pages that follows `parent`, as long as they are `wanted`; for each whether it is stored.

        `copy` writes page i into the page of this rank's shard.
        """
        job = Save(keys=keys, view=self._view, deadline_s=self._config.save_deadline_s, copy=copy, parent=parent)
        if view := self._run("save", self._movers.saves, job, wanted):
            self._metrics.moved("save", job.stored, view.nbytes, job.seconds)
        return [number in job.present for number in range(len(keys))]

    def _run(
        self, what: str, mover: Mover[J], job: J, wanted: Callable[[], bool] | None = None
    ) -> ShardView | None:
        """Have a job done and wait for its end; None where the store is not to be used now."""
        view = self._ready(mover)
        if view is not None:
            mover.run(job, wanted)
            if job.cause not in ("", UNWANTED):
                self._metrics.failed(what, job.cause)
            if job.cause == NOT_LANDED:  # until others land, SGLang is told of what is there alone
                self._impatient_until_s = time.monotonic() + PAUSE_S
        return view

    def _look_up(self, call: Callable[[ShardView], T], otherwise: T) -> T:
        view = self._ready(self._movers.loads)
        try:
            return otherwise if view is None else call(view)
        except Exception as error:
            self._lookup_failed("error", repr(error))
            return otherwise

    def _lookup_failed(self, cause: str, text: str) -> None:
        self._movers.loads.pause()
        self._metrics.failed("lookup", cause)
        log_once(
            f"sglang.lookup.{cause}",
            "a lookup failed: %s; the pool is not read for %d s (logged once per cause, counted in the metrics)",
            text, PAUSE_S,
            logger=logger,
        )  # fmt: skip

    def _ready(self, mover: Mover[J]) -> ShardView | None:
        return None if mover.paused or mover.hangs else self._view()
