"""Fetching: carries out what the plan says, in threads of each tier, straight into the arena of the pool.

Pages are verified where they lie and published in the order of their chain. A tier's call that does not come back costs
that tier a thread, and what it was to bring is looked for elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from mooncake_connector.log import get_logger, log_once
from store_client.agent.chain import BEHIND, Batch, Chain, Question
from store_client.agent.clerk import Clerk
from store_client.agent.landing import Landing
from store_client.agent.lanes import Job, Lane
from store_client.agent.plan import Plan
from store_client.agent.source import Source
from store_client.agent.wish import Wish, Word
from store_client.embedded import EmbeddedStore
from store_client.embedded.names import join_keys

logger = get_logger(__name__)

_MOST_CHAINS = 1024
_MOST_KEYS = 65536
_TICK_S = 0.25
_PUBLISHING_S = 30.0


class Fetcher:
    """All wishes under way. Its methods return at once, but for `forget` and `close`."""

    def __init__(self, pool: EmbeddedStore, sources: Sequence[Source]) -> None:
        self._pool, self._sources = pool, sources
        self._changed = threading.Condition()
        self._plan = Plan(sources)
        self._clerk = Clerk("flow-writes")
        self._closed = False
        self._untold: list[Chain] = []
        self._wake = threading.Event()
        self._usable: list[bool] = []
        threading.Thread(target=self._watch, name="mooncake-connector-flow", daemon=True).start()

    def ask(self, wish: Wish, tell: Callable[[Word], None]) -> Chain:
        """Begin. Another thread tells what is known at once; after `close`, this one."""
        cause = self._refusal(wish)
        clears = self._pool.clears
        # Which of the pages behind a hole the pool has costs more to find out than most wishes cost, and is seen later.
        here = 0 if cause else self._pool.space(wish.namespace, wish.shard).lookup(wish.keys).pages
        with self._locked(tell=self._closed):
            refusal = cause or ("closed" if self._closed else "")
            return self._plan.wish(wish, tell, here, time.monotonic(), clears, refusal)

    def _refusal(self, wish: Wish) -> str:
        if self._closed:
            return "closed"
        try:
            join_keys([*wish.keys, *([] if wish.parent is None else [wish.parent])])
        except ValueError:
            return "bad_request"
        if not 1 <= len(wish.keys) <= _MOST_KEYS or not 1 <= wish.nbytes < 1 << 32 or wish.deadline_s <= 0:
            return "bad_request"
        return "busy" if len(self._plan.chains) >= _MOST_CHAINS else ""

    def cancel(self, chain: Chain) -> None:
        with self._locked():
            self._plan.cancel(chain)

    def forget(self, namespace: bytes | None) -> None:
        """End all wishes of a namespace. Once it returns nothing of them is published any more."""
        with self._locked():
            void = self._plan.forget(namespace, "forgotten")
        with self._changed:
            self._changed.wait_for(lambda: not any(batch.publishing for batch in void), _PUBLISHING_S)

    def queued_pages(self) -> list[int]:
        """By tier."""
        with self._changed:
            return list(self._plan.queued_pages)

    def close(self, deadline: float) -> list[bool]:
        """End everything; for each tier whether all its calls are back."""
        with self._locked():
            self._closed = True
            self._plan.forget(None, "closed")
        self._wake.set()
        ended = [[lane.close(deadline) for lane in source.lanes] for source in self._sources]
        self._clerk.close()
        return [all(lanes) for lanes in ended]

    # -- carrying out -------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self, *, tell: bool = True) -> Iterator[None]:
        """Change the plan, and see to it that what follows from that is done. `tell` False: another thread tells."""
        spoken: list[Chain] = []
        with self._changed:
            yield
            while True:
                questions, batches, said = self._plan.take()
                spoken += said
                if not questions and not batches:
                    break
                for question in questions:
                    self._begin(question)
                for batch in batches:
                    self._send(batch)
            if not tell:
                self._untold += spoken
                spoken = []
            self._changed.notify_all()
        if not tell:
            self._wake.set()
        for chain in spoken:
            self._tell(chain)

    def _begin(self, question: Question) -> None:
        lane = self._sources[question.tier].questions
        cause = lane.run(partial(self._question, question), partial(self._unanswered, question))
        if cause in ("threads", "closed"):
            self._plan.end(question.chain, cause)
        elif cause:
            self._plan.answered(question, None, cause)

    def _send(self, batch: Batch) -> None:
        source = self._sources[batch.tier]
        cause = source.fetches.run(partial(self._fetch, batch), partial(self._failed, batch))
        if cause:
            self._plan.ended(batch, [cause] * len(batch.keys))

    def _tell(self, chain: Chain) -> None:
        """Tell its words in order, without a lock: what is called may ask for something itself."""
        while True:
            with self._changed:
                if chain.telling or not chain.words:
                    return
                word = chain.words.pop(0)
                chain.telling = True
            try:
                chain.tell(word)
            except Exception as error:
                log_once("agent.tell", "a word was not told: %r", error, logger=logger, exc_info=True)
            with self._changed:
                chain.telling = False

    def _watch(self) -> None:
        """Ends what is late, tells what `ask` knew at once, and notices calls that do not come back."""
        while not self._closed or self._untold:
            now = time.monotonic()
            with self._locked():
                untold, self._untold = self._untold, []
                next_deadline = self._plan.expire(now)
                usable = [source.usable() for source in self._sources]
                if usable != self._usable:
                    self._usable = usable
                    self._plan.advance_all()
            for chain in untold:
                self._tell(chain)
            for source in self._sources:
                source.fetches.width = source.tier.parallel
                for lane in source.lanes:
                    self._look_for_hanging(source, lane, now)
            wait_s = _TICK_S if next_deadline is None else min(_TICK_S, max(0.0, next_deadline - time.monotonic()))
            self._wake.wait(wait_s)
            self._wake.clear()

    def _look_for_hanging(self, source: Source, lane: Lane, now: float) -> None:
        hung: list[Job] = lane.overdue(now)
        if hung:
            source.failed(source.breaker(lane), "hanging")
            said = "tier %s: a call did not come back; its other threads go on"
            log_once(f"tier.{source.title}.hanging", said, source.title, logger=logger)
        for job in hung:
            job.fail("hanging")

    # -- in the threads of a tier -------------------------------------------------------------------------------

    def _question(self, question: Question) -> None:
        source, wish = self._sources[question.tier], question.chain.wish
        found, cause, seconds = None, "", 0.0
        if not question.chain.done:
            found, cause, seconds = source.call(
                source.questions, source.reads,
                lambda deadline_s: source.tier.contains(
                    wish.space, question.keys, nbytes=wish.nbytes, deadline_s=deadline_s
                ),
            )  # fmt: skip
        if found is not None and len(found) != question.count:
            found, cause = None, "error"
        if found is not None:
            source.speed.answered(seconds)
            source.tally.add(asked_pages=question.count, hit_pages=sum(found))
        with self._locked():
            self._plan.answered(question, found, cause)

    def _unanswered(self, question: Question, cause: str) -> None:
        with self._locked():
            self._plan.answered(question, None, cause)

    def _failed(self, batch: Batch, cause: str) -> None:
        with self._locked():
            self._plan.ended(batch, [cause] * len(batch.keys))

    def _fetch(self, batch: Batch) -> None:
        with self._locked():
            until = self._plan.start(batch, time.monotonic())
            if until is None:
                return
            after = batch.after
            follows = [key for key in batch.parents[:1] if key is not None and after is not None and not after.ended]
        landing = Landing(self.may_publish, self._sources[batch.tier], batch, until)
        results = landing.run(self._pool, follows, self._clerk)
        landing.remove_corrupt()  # before it is fetched again, or written by who computes it now
        with self._locked():
            batch.publishing = False
            self._plan.ended(batch, results)

    def may_publish(self, batch: Batch, until: float) -> str:
        """Wait for the page before it; why the batch must not be published, or ""."""
        with self._changed:
            after = batch.after
            self._changed.wait_for(
                lambda: batch.ended or after is None or after.ended, max(0.0, until - time.monotonic())
            )
            if batch.ended:
                return "forgotten"
            if after is not None and not after.whole:
                return BEHIND if after.ended else "late"
            batch.publishing = True
            return ""
