"""One tier as the agent uses it: its threads, its speed, whether it is left alone, and what became of its calls."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from mooncake_connector.config.tiers import TierSettings
from mooncake_connector.log import get_logger, kind_of, log_once
from store_client.agent.breaker import Breaker
from store_client.agent.lanes import Lane
from store_client.agent.late import LateWrites
from store_client.agent.report import Tally, TierReport
from store_client.agent.wish import Wish
from store_client.agent.worth import Speed, is_worth_it
from store_client.tiers.base import Tier, TierError, TierStats

logger = get_logger(__name__)

T = TypeVar("T")

_QUESTIONS_AT_ONCE = 2
_FIGURES_S = 3.0
"""For a tier to say its figures, before those that it gave last are told."""
GRACE_S = 2.0
"""A call that takes so much longer than it was given hangs."""


class Source:
    def __init__(self, settings: TierSettings, tier: Tier, secret: bytes) -> None:
        self.settings, self.tier, self._secret = settings, tier, secret
        self.title = settings.title
        self.reads, self.writes, self.lists = Breaker(), Breaker(), Breaker()
        self.speed, self.tally = Speed(), Tally()
        self.late_writes = LateWrites()
        self.questions = Lane(f"ask-{self.title}", _QUESTIONS_AT_ONCE, urgent=True)
        self.fetches = Lane(f"fetch-{self.title}", tier.parallel)
        self.gifts = Lane(f"give-{self.title}", self.gifts_at_once)
        self.surveys = Lane(f"list-{self.title}", 1, urgent=True)
        """For which shards it has, with `lists`: listing may be slow or forbidden where reading is neither."""
        self.looks = Lane(f"look-{self.title}", 1, urgent=True)
        """For what routers ask, which no engine is to wait for."""
        self._stats = TierStats()
        self._asking: tuple[threading.Thread, float] | None = None
        """Who asks the tier for its figures, and since when."""
        self._asking_lock = threading.Lock()

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return self.questions, self.surveys, self.looks, self.fetches, self.gifts

    def breaker(self, lane: Lane) -> Breaker:
        """What calls of that lane open."""
        return {self.surveys: self.lists, self.gifts: self.writes}.get(lane, self.reads)

    @property
    def gifts_at_once(self) -> int:
        """As the tier says by now."""
        return 1 if self.settings.write == "none" else self.tier.parallel

    @property
    def secret(self) -> bytes:
        """What its seals are keyed with."""
        return self._secret if self.tier.needs_mac else b""

    # -- as the plan sees it ------------------------------------------------------------------------------------

    @property
    def batch_nbytes(self) -> int:
        return self.tier.batch_nbytes

    def usable(self) -> bool:
        return self.reads.allows(time.monotonic()) and not self.questions.stuck and not self.fetches.stuck

    def why(self) -> str:
        if self.usable():
            return ""
        return "hanging" if self.questions.stuck or self.fetches.stuck else self.reads.cause or "open"

    def worth(self, nbytes: int, wish: Wish, tokens: int) -> bool:
        expected_s = self.speed.expected_s(nbytes, time.monotonic())
        return is_worth_it(expected_s, tokens, wish.prefill_tokens_s)

    def not_worth(self, pages: int) -> None:
        self.tally.add(not_worth_it_pages=pages)

    # -- calls --------------------------------------------------------------------------------------------------

    def call(
        self, lane: Lane, breaker: Breaker, make: Callable[[float], T], allowed_s: float | None = None
    ) -> tuple[T | None, str, float]:
        """What `make(deadline_s)` returned, or why not, and the seconds it took. In a job of `lane` only.

        `allowed_s` None is all that the settings allow; what takes longer than less than that is no fault of the tier.
        """
        timeout_s = self.settings.timeout_s
        given_s = timeout_s if allowed_s is None else min(allowed_s, timeout_s)
        started_s = time.monotonic()
        if not breaker.enter(started_s):
            return None, breaker.cause or "open", 0.0
        answer, cause, lasting = None, "", False
        lane.expect(given_s + GRACE_S)
        try:
            answer = make(given_s)
        except TierError as error:
            cause, lasting = error.cause, error.lasting
            self._say(cause, str(error))
        except Exception as error:
            cause = "error"
            self._say(cause, repr(error))
        ended_s = time.monotonic()
        if not lane.back():
            return None, "hanging", ended_s - started_s
        if not cause:
            breaker.succeed()
        elif cause == "timeout" and given_s < timeout_s:
            cause = "late"
            breaker.leave()
        else:
            self.failed(breaker, cause, lasting=lasting)
        return answer, cause, ended_s - started_s

    def failed(self, breaker: Breaker, cause: str, *, lasting: bool = False) -> None:
        self.tally.failed(cause)
        if breaker.fail(cause, time.monotonic(), lasting=lasting):
            logger.info("tier %s is left alone for a while: %s", self.title, cause)

    def _say(self, cause: str, text: str) -> None:
        log_once(f"tier.{self.title}.{cause}:{kind_of(text)}", "tier %s: %s", self.title, text, logger=logger)

    # -- reports ------------------------------------------------------------------------------------------------

    def report(self, queued_pages: int) -> TierReport:
        now = time.monotonic()
        counts, seconds, errors = self.tally.values()
        (reads, read_s), (writes, write_s) = self.reads.state(now), self.writes.state(now)
        figures = self._figures()
        return TierReport(
            title=self.title, kind=self.settings.kind, reads=reads,
            writes="none" if self.settings.write == "none" else writes, cause=self.reads.cause or self.writes.cause,
            retry_s=round(max(read_s, write_s), 3), errors=errors, queued_pages=queued_pages,
            latency_s=self.speed.latency_s, bandwidth=self.speed.bandwidth, capacity_nbytes=figures.capacity_nbytes,
            used_nbytes=figures.used_nbytes, pages=figures.pages, evicted_pages=figures.evicted_pages,
            notes=dict(figures.notes), fetch_s=seconds["fetch_s"],
            write_s=seconds["write_s"], **counts,
        )  # fmt: skip

    def _figures(self) -> TierStats:
        """The tier's own, or those that it gave last where it does not answer: it is asked by one thread at a time."""
        if not any(lane.stuck for lane in self.lanes):
            with self._asking_lock, contextlib.suppress(RuntimeError):  # no thread can be started
                if self._asking is None or not self._asking[0].is_alive():
                    name = f"mooncake-connector-figures-{self.title}"
                    thread = threading.Thread(target=self._ask_figures, name=name, daemon=True)
                    thread.start()
                    self._asking = thread, time.monotonic()
            if self._asking is not None:
                thread, since_s = self._asking
                thread.join(max(0.0, since_s + _FIGURES_S - time.monotonic()))
        return self._stats

    def _ask_figures(self) -> None:
        with contextlib.suppress(Exception):  # its calls say why, and are counted
            self._stats = self.tier.stats()
