"""An engine as far as routing can see it: prefills in turn, a prefix cache of blocks, and memory that decoding takes.

Prompts are computed one after the other, at a rate that decoding lowers. Blocks of running requests are held; those
that nobody holds stay cached until the space is needed, the longest unused first, ends of prompts before beginnings.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake_connector.cli.bench.routing.trace import BLOCK_TOKENS, Asked


@dataclass(frozen=True, slots=True)
class Shape:
    """What all instances are like.

    Args:
        prefill_tokens_per_s: of one instance with nothing else to do.
        cache_tokens: memory for KV, of running requests and of the prefix cache together.
        most_running: requests that an instance decodes at a time.
        token_s: from one token of an answer to the next.
        decode_share: how much of the prefill rate is lost while as many requests as can be are decoded.
    """

    prefill_tokens_per_s: float
    cache_tokens: int
    most_running: int = 64
    token_s: float = 0.03
    decode_share: float = 0.5


class Clock:
    """Simulated time, and what is to happen."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when_s, next(self._order), what))

    def run(self) -> None:
        while self._due:
            self.now_s, _, what = heapq.heappop(self._due)
            what()


@dataclass(slots=True)
class Job:
    """A request at an engine; `on_first` is called with its first token, `on_end` with its last."""

    asked: Asked
    on_first: Callable[[], None]
    on_end: Callable[[], None]


class Engine:
    """One instance."""

    def __init__(self, shape: Shape, clock: Clock) -> None:
        self._shape, self._clock = shape, clock
        self._waiting: deque[Job] = deque()
        self._is_prefilling, self._running = False, 0
        self._held: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._answers = 0
        self._capacity = shape.cache_tokens // BLOCK_TOKENS
        self.computed_tokens = 0

    def submit(self, job: Job) -> None:
        self._waiting.append(job)
        self._next()

    def cached(self, hashes: Sequence[int]) -> int:
        """Of how many blocks it has the KV, from the first on."""
        for at, one in enumerate(hashes):
            if one not in self._held and one not in self._idle:
                return at
        return len(hashes)

    def _next(self) -> None:
        if self._is_prefilling or not self._waiting or self._running >= self._shape.most_running:
            return
        asked = self._waiting[0].asked
        hit = self.cached(asked.hash_ids)
        answer = -(-asked.output_length // BLOCK_TOKENS)
        needed = len(asked.hash_ids) - hit + answer
        idle_hits = sum(one in self._idle for one in asked.hash_ids[:hit])
        free = self._capacity - len(self._held) - self._answers - idle_hits
        if needed > free and self._running:
            return  # until a request ends; one that is larger than all of the memory is computed alone
        job = self._waiting.popleft()
        for one in asked.hash_ids:
            self._idle.pop(one, None)
            self._held[one] = self._held.get(one, 0) + 1
        self._answers += answer
        while self._idle and len(self._held) + len(self._idle) + self._answers > self._capacity:
            self._idle.popitem(last=False)
        computed = max(1, asked.input_length - hit * BLOCK_TOKENS)  # the last token is never a hit
        self.computed_tokens += computed
        rate = self._shape.prefill_tokens_per_s
        rate *= 1.0 - self._shape.decode_share * self._running / self._shape.most_running
        self._is_prefilling = True
        self._running += 1
        self._clock.at(self._clock.now_s + computed / rate, lambda: self._prefilled(job))

    def _prefilled(self, job: Job) -> None:
        self._is_prefilling = False
        job.on_first()
        self._clock.at(self._clock.now_s + job.asked.output_length * self._shape.token_s, lambda: self._ended(job))
        self._next()

    def _ended(self, job: Job) -> None:
        self._running -= 1
        self._answers -= -(-job.asked.output_length // BLOCK_TOKENS)
        for one in reversed(job.asked.hash_ids):  # the beginning was used last, so the end goes first
            self._held[one] -= 1
            if not self._held[one]:
                del self._held[one]
                self._idle[one] = None
        while self._idle and len(self._held) + len(self._idle) + self._answers > self._capacity:
            self._idle.popitem(last=False)
        job.on_end()
        self._next()
