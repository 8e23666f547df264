"""One pass over the prompts, a fixed number at a time: its answers, and what the server counted meanwhile."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from mooncake_connector.cli.bench.serve.answer import Answer, RequestFailed
from mooncake_connector.cli.bench.serve.client import Server
from mooncake_connector.cli.bench.serve.workload import Prompt

_TURN_S = 0.2


class CacheTokens(NamedTuple):
    """Prompt tokens by where their KV came from, by the server's own counters."""

    computed: int = 0
    engine_cache: int = 0
    connector: int = 0

    def plus(self, other: CacheTokens) -> CacheTokens:
        return CacheTokens(*map(add, self, other))

    def minus(self, other: CacheTokens) -> CacheTokens:
        return CacheTokens(*map(sub, self, other))


_VLLM = {"local_compute": "computed", "local_cache_hit": "engine_cache", "external_kv_transfer": "connector"}


def cache_tokens(server: Server) -> CacheTokens | None:
    """vLLM's counters since its start, over all of its engines; None where a server has none of them."""
    counts: dict[str, float] = {}
    try:
        status, _, content = server.get("/metrics")
        for family in text_string_to_metric_families(content.decode(errors="replace")) if status == 200 else ():
            for sample in family.samples:
                name = _VLLM.get(sample.labels.get("source", ""))
                if sample.name == "vllm:prompt_tokens_by_source_total" and name is not None:
                    counts[name] = counts.get(name, 0.0) + sample.value
        return CacheTokens(**{name: int(value) for name, value in counts.items()}) if counts else None
    except Exception:  # nobody promises that what is there is Prometheus's format
        return None


@dataclass(frozen=True, slots=True)
class Pass:
    """What came of one pass; `answers` has None where a request failed or was not sent any more."""

    seconds: float
    answers: tuple[Answer | None, ...]
    reason: str | None
    """Why the first failed request failed."""
    tokens: CacheTokens | None

    @property
    def failed(self) -> int:
        return self.answers.count(None)

    @property
    def per_second(self) -> float:
        """Answered requests a second."""
        return (len(self.answers) - self.failed) / self.seconds if self.seconds else 0.0


def run_pass(server: Server, ask: Callable[[Prompt], Answer], prompts: Sequence[Prompt], concurrency: int) -> Pass:
    """Ask all prompts in their order. Given up, and the rest failed, when too many in a row fail."""
    before = cache_tokens(server)
    work = _Work(ask, prompts, give_up_after=2 * concurrency)
    threads = [threading.Thread(target=work.run, daemon=True) for _ in range(min(concurrency, len(prompts)))]
    start = time.monotonic()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # in turns, so that Ctrl-C is heard
                thread.join(_TURN_S)
    except BaseException:
        work.stop()
        raise
    seconds = time.monotonic() - start
    after = cache_tokens(server)
    tokens = after.minus(before) if after is not None and before is not None else None
    return Pass(seconds, tuple(work.answers), work.reason, tokens)


class _Work:
    """Prompts that several threads take one after the other."""

    def __init__(self, ask: Callable[[Prompt], Answer], prompts: Sequence[Prompt], give_up_after: int) -> None:
        self.answers: list[Answer | None] = [None] * len(prompts)
        self.reason: str | None = None
        self._ask, self._prompts = ask, prompts
        self._lock = threading.Lock()
        self._next = 0
        self._in_a_row = 0
        self._give_up_after = give_up_after

    def run(self) -> None:
        while (index := self._take()) is not None:
            try:
                self.answers[index] = self._ask(self._prompts[index])
            except RequestFailed as error:
                self._failed(str(error))
            else:
                self._in_a_row = 0

    def stop(self) -> None:
        with self._lock:
            self._next = len(self._prompts)

    def _take(self) -> int | None:
        with self._lock:
            index = self._next
            if index >= len(self._prompts) or self._in_a_row >= self._give_up_after:
                return None
            self._next += 1
            return index

    def _failed(self, reason: str) -> None:
        with self._lock:
            self.reason = self.reason or reason
            self._in_a_row += 1


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that `share` (0 to 1) of the values do not exceed; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
