"""Who is asked: the pool's files, the processes that have it open, its agent, and engines' `/metrics`.

Each is asked by a thread of its own, again and again, so that one that does not answer holds nothing up.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from mooncake_connector.deploy.watch import read
from mooncake_connector.errors import PoolError
from mooncake_connector.metrics.registry import PREFIX, VLLM_PREFIX
from store_client.agent.visit import ask_report
from store_client.base import StoreStats
from store_client.embedded import PoolUser, pool_users
from store_client.embedded.glance import Glances

_SLOWLY_S = 5.0
"""Processes come and go rarely, and tiers report what they did in all: these are not asked more often."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Said(Generic[T]):
    """One answer, and when it came; `cause` says why there is none."""

    at_s: float
    value: T | None
    cause: str = ""


class Asking(Generic[T]):
    """Asks until it is closed."""

    def __init__(self, ask: Callable[[], T], every_s: float) -> None:
        self._ask, self._every_s = ask, every_s
        self._closed = threading.Event()
        self.last_two: tuple[Said[T] | None, Said[T] | None] = (None, None)
        """The former answer and the latest one; None until there were so many."""
        self.number = 0
        """How many answers there were."""
        threading.Thread(target=self._go_on, name="top", daemon=True).start()

    def _go_on(self) -> None:
        while not self._closed.is_set():
            began_s = time.monotonic()
            try:
                said: Said[T] = Said(began_s, self._ask())
            except PoolError as error:
                said = Said(began_s, None, str(error))
            except Exception as error:  # an answer of whoever listens at a URL may be anything
                said = Said(began_s, None, repr(error))
            self.last_two = (self.last_two[1], said)
            self.number += 1
            self._closed.wait(max(0.0, self._every_s - (time.monotonic() - began_s)))

    @property
    def latest(self) -> Said[T] | None:
        return self.last_two[1]

    def close(self) -> None:
        self._closed.set()


Look = tuple[str, StoreStats]
Series = Mapping[str, Mapping[str, float]]
"""Name without `vllm:` where it is ours -> its own labels' values, in the order of their names and joined by commas
("" where it has none) -> the sum over all other labels."""

_TABLES = {"cause", "transport", "operation", "reason", "outcome"}
_OTHERS = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prefix_cache_", "vllm:external_prefix_cache_",
    "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:cached_tokens", "sglang:prompt_tokens",
)  # fmt: skip


class Sources:
    """All that one `top` asks; `no_pool` says why there is no pool among it."""

    def __init__(self, pool: Path | None, urls: list[str], every_s: float, no_pool: str = "") -> None:
        slowly_s = max(every_s, _SLOWLY_S)
        self.pool, self.every_s, self.no_pool = pool, every_s, no_pool
        self.looks = Asking(Glances(pool).look, every_s) if pool is not None else None
        self.users = Asking(lambda: _users(pool), slowly_s) if pool is not None else None
        self.agent = Asking(lambda: ask_report(pool), slowly_s) if pool is not None else None
        self.engines = {url: Asking(lambda url=url: _metrics(url), every_s) for url in urls}  # type: ignore[misc]

    @property
    def changing(self) -> list[Asking[Any]]:
        """What is asked at every interval."""
        return [one for one in (self.looks, *self.engines.values()) if one is not None]

    @property
    def all(self) -> list[Asking[Any]]:
        return [one for one in (self.looks, self.users, self.agent, *self.engines.values()) if one is not None]

    def have_answered(self, times: int) -> bool:
        """Whether what changes from look to look has answered so often, and everything else once."""
        return all(one.number >= times for one in self.changing) and all(one.number for one in self.all)

    def close(self) -> None:
        for one in self.all:
            one.close()


def _users(pool: Path) -> list[PoolUser]:
    users = pool_users(pool)
    if users is None:
        raise PoolError("a process that does not run keeps the pool locked, or the pool is damaged")
    return users


def _metrics(url: str) -> Series:
    text = read(f"{url}/metrics")
    if text is None:
        raise PoolError("no answer")
    try:
        series = series_in(text)
    except Exception:  # of a page that is none of metrics
        series = {}
    if not any(name.startswith(_OTHERS) for name in series):
        raise PoolError("no engine's metrics")
    return series


def series_in(text: str) -> Series:
    """What is ours in an engine's `/metrics`, and a few figures of the engine itself. Raises ValueError."""
    wanted = (PREFIX, VLLM_PREFIX, *_OTHERS)
    lines = [line for line in text.splitlines() if line.startswith(wanted) and "_bucket{" not in line]
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            told_apart = ",".join(value for label, value in sorted(sample.labels.items()) if label in _TABLES)
            name = sample.name.removeprefix("vllm:") if sample.name.startswith(VLLM_PREFIX) else sample.name
            if math.isfinite(sample.value):
                values = found.setdefault(name, {})
                values[told_apart] = values.get(told_apart, 0.0) + sample.value
    return found
