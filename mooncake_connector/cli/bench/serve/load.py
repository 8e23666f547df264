"""One pass over the prompts, a fixed number at a time, and the figures of it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake_connector.cli.bench.serve.client import Answer, RequestFailed, Server
from mooncake_connector.cli.bench.serve.counters import CacheTokens, cache_tokens
from mooncake_connector.cli.bench.serve.workload import Prompt

Ask = Callable[[Prompt], Answer]

_TURN_S = 0.2


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


def run_pass(server: Server, ask: Ask, prompts: Sequence[Prompt], concurrency: int) -> Pass:
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
        server.calls.end()
        raise
    seconds = time.monotonic() - start
    after = cache_tokens(server)
    tokens = after - before if after is not None and before is not None else None
    return Pass(seconds, tuple(work.answers), work.reason, tokens)


class _Work:
    """Prompts that several threads take one after the other."""

    def __init__(self, ask: Ask, prompts: Sequence[Prompt], give_up_after: int) -> None:
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
