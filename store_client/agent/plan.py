"""What is fetched, from where and in which order: no thread, no clock, no tier. Events go in, things to do come out.

A *chain* is one wish under way. Its keys are looked for in all tiers at once, a few first and then more, and each page
is taken from the nearest tier that has said so far that it has it. Pages are put into *batches*, each from one tier; a
page that several chains want is in one batch only. Pages of a chain that come from one tier overlap; those from another
tier begin once the page before them has landed, so that a tier that hangs holds up no thread of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from store_client.agent.chain import BEHIND, LANDED, Batch, Chain, Question
from store_client.agent.wish import Wish, Word

FIRST_QUESTION = 4
"""Keys asked for first: a miss costs little."""
_QUESTION_GROWTH = 8
_LONGEST_QUESTION = 1024
_MOST_BATCH_PAGES = 512

_UNKNOWN, _ASKED, _YES, _NO = range(4)
_TOGETHER = -1
"""In place of a tier: the page is in the pool, or somebody fetches it already."""
_OURS = ("no_room", "busy", "error", "late", "forgotten", "closed", "threads")
"""Causes that no other tier cures."""

Name = tuple[bytes, object, int, int, bytes]
"""Of a page on its way: namespace, shard, size, clears of the pool when it was asked for, key."""


class Reach(Protocol):
    """What the plan has to know of a tier."""

    @property
    def batch_nbytes(self) -> int:
        """So much at a time suits it."""

    def usable(self) -> bool:
        """Whether it may be called now."""

    def why(self) -> str:
        """Why it may not; empty where it may."""

    def worth(self, nbytes: int, wish: Wish, tokens: int) -> bool:
        """Whether to wait for so many bytes, which hold so many tokens."""

    def not_worth(self, pages: int) -> None:
        """Told of pages that are not fetched for that."""


class Plan:
    """All wishes under way. The caller locks; after each call it does what `take` returns."""

    def __init__(self, tiers: Sequence[Reach]) -> None:
        self._tiers = tiers
        self.chains: set[Chain] = set()
        self._flights: dict[Name, tuple[Batch, int]] = {}
        self._questions: list[Question] = []
        self._batches: list[Batch] = []
        self._spoken: list[Chain] = []
        self.queued_pages = [0] * len(tiers)
        """By tier, pages that are in batches."""
        self._queued_nbytes = [0] * len(tiers)

    def take(self) -> tuple[list[Question], list[Batch], list[Chain]]:
        """What is to be done: questions to ask, batches to fetch, in order, and chains that have words to tell."""
        out = self._questions, self._batches, self._spoken
        self._questions, self._batches, self._spoken = [], [], []
        return out

    # -- events -------------------------------------------------------------------------------------------------

    def wish(
        self, wish: Wish, tell: Callable[[Word], None], here: int, now: float, clears: int, refusal: str = ""
    ) -> Chain:
        """`here`: how many leading pages the pool has. `refusal`: the cause for which the wish ends at once."""
        count, tiers = len(wish.keys), len(self._tiers)
        landed = bytearray(i < here for i in range(count))
        chain = Chain(
            wish, tell, now + wish.deadline_s, clears, [bytearray(count) for _ in range(tiers)], landed, count,
            [FIRST_QUESTION] * tiers, [None] * tiers,
        )  # fmt: skip
        self.chains.add(chain)
        if refusal:
            self.end(chain, refusal)
        else:
            self._advance(chain)
        return chain

    def answered(self, question: Question, found: Sequence[bool] | None, cause: str = "") -> None:
        """`found` None: the tier did not say, for `cause`."""
        chain, tier = question.chain, question.tier
        if chain.questions[tier] is not question or chain.done:
            return
        chain.questions[tier] = None
        answers = chain.answers[tier]
        for i in range(question.count):
            answers[question.start + i] = _YES if found is not None and found[i] else _NO
        chain.cause = chain.cause or cause
        if found is not None and all(found):
            chain.sizes[tier] = min(chain.sizes[tier] * _QUESTION_GROWTH, _LONGEST_QUESTION)
        self._advance(chain)

    def start(self, batch: Batch, now: float) -> float | None:
        """Until when the batch has to be there, or None where nobody wants it any more; it has ended then."""
        batch.begun = True
        deadline = max((chain.deadline for chain in batch.chains()), default=now)
        if batch.ended or (batch.after is not None and batch.after.ended and not batch.after.whole):
            self.ended(batch, [BEHIND] * len(batch.keys))
            return None
        if deadline <= now:
            self.ended(batch, ["late"] * len(batch.keys))
            return None
        return deadline

    def ended(self, batch: Batch, results: Sequence[str]) -> None:
        """What became of each page: LANDED, or why it did not."""
        if batch.ended:
            return
        batch.ended, batch.whole = True, not any(results)
        self._queue(batch, -len(batch.keys))
        for i, (key, result) in enumerate(zip(batch.keys, results, strict=True)):
            self._flights.pop(self._name(batch.wish, batch.clears, key), None)
            for chain, at in batch.wanted[i].items():
                if result == LANDED:
                    chain.here[at] = 1
                else:
                    self._failed(chain, at, batch.tier, result)
        for follower in batch.followers:
            self._release(follower)
        for chain in batch.chains():
            self._advance(chain)

    def cancel(self, chain: Chain) -> None:
        """Nobody wants it any more, and nobody is told."""
        chain.words.clear()
        chain.last = Word(chain.last.coming, chain.last.landed, done=True)
        self._drop(chain)

    def expire(self, now: float) -> float | None:
        """End the chains that are late; when the next one will be."""
        for chain in [chain for chain in self.chains if chain.deadline <= now]:
            self.end(chain, "late")
        return min((chain.deadline for chain in self.chains), default=None)

    def end(self, chain: Chain, cause: str) -> None:
        if not chain.done:
            self._say(chain, Word(chain.landed, chain.landed, done=True, cause=cause, settled=True))
            self._drop(chain)

    def forget(self, namespace: bytes | None, cause: str) -> list[Batch]:
        """End all that is under way of a namespace (None: of all); returns the batches, of which nothing may be
        published from now on."""

        def concerned(wish: Wish) -> bool:
            return namespace is None or wish.namespace.digest == namespace

        void = {batch for batch, _ in self._flights.values() if concerned(batch.wish)}
        for chain in list(self.chains):
            if concerned(chain.wish):
                self.end(chain, cause)
        for batch in void:
            self.ended(batch, [cause] * len(batch.keys))
        return list(void)

    def advance_all(self) -> None:
        """Look again at all chains: what may be asked of the tiers has changed."""
        for chain in list(self.chains):
            self._advance(chain)

    # -- a chain ------------------------------------------------------------------------------------------------

    def _advance(self, chain: Chain) -> None:
        if chain.done:
            return
        self._search(chain)
        while not self._commit(chain):
            self._search(chain)
        while chain.landed < len(chain.here) and chain.here[chain.landed]:
            chain.landed += 1
        self._ask(chain)
        coming = max(chain.committed, chain.landed)
        settled = len(chain.sources) >= chain.limit or not any(chain.questions)
        waits = not settled or coming > chain.landed
        cause = "" if waits or chain.landed == len(chain.here) else self._why(chain)
        word = Word(coming, chain.landed, not waits, cause, settled)
        if word != chain.last:
            self._say(chain, word)
        if word.done:
            self._drop(chain)

    def _why(self, chain: Chain) -> str:
        if chain.cause or chain.refused:
            return chain.cause or "not_worth_it"
        return next(filter(None, (tier.why() for tier in self._tiers)), "" if chain.landed else "empty")

    def _search(self, chain: Chain) -> None:
        """Find a source for as many leading keys as there are answers for."""
        keys, sources, open_tiers = chain.wish.keys, chain.sources, self._open(chain)
        while len(sources) < chain.limit:
            at = len(sources)
            flight = self._flights.get(self._name(chain.wish, chain.clears, keys[at]))
            if chain.here[at]:
                sources.append(_TOGETHER)
            elif flight is not None and not flight[0].ended:
                flight[0].wanted[flight[1]][chain] = at
                sources.append(_TOGETHER)
            else:
                tier = next((t for t in open_tiers if chain.answers[t][at] == _YES), None)
                if tier is None:
                    break
                sources.append(tier)

    def _open(self, chain: Chain) -> list[int]:
        return [t for t, tier in enumerate(self._tiers) if t not in chain.refused and tier.usable()]

    def _commit(self, chain: Chain) -> bool:
        """Put what was found into batches, as far as it is worth it; False where the search has to be done again."""
        while chain.committed < len(chain.sources):
            start, tier = chain.committed, chain.sources[chain.committed]
            if tier == _TOGETHER:
                chain.committed += 1
                continue
            stop = next((i for i in range(start, len(chain.sources)) if chain.sources[i] != tier), len(chain.sources))
            if self._worth(chain, tier, stop - start):
                self._batch(chain, tier, start, stop)
                chain.committed = stop
            elif (
                stop == len(chain.sources)
                and self._may_grow(chain, tier)
                and self._worth(chain, tier, chain.limit - start)
            ):
                break  # more of them may be worth what these are not
            else:
                self._tiers[tier].not_worth(stop - start)
                chain.refused.add(tier)
                self._back(chain, start)
                return False
        return True

    def _worth(self, chain: Chain, tier: int, pages: int) -> bool:
        """Of these pages and those that the chain has from the tier already, behind all that others wait for."""
        wish, pages = chain.wish, pages + chain.taken.get(tier, 0)
        nbytes = pages * wish.nbytes + self._queued_nbytes[tier]
        return self._tiers[tier].worth(nbytes, wish, pages * wish.page_tokens)

    def _may_grow(self, chain: Chain, tier: int) -> bool:
        at = len(chain.sources)
        return at < chain.limit and chain.answers[tier][at] in (_UNKNOWN, _ASKED)

    def _batch(self, chain: Chain, tier: int, start: int, stop: int) -> None:
        """They join the batch of the page before where that still waits: so a busy tier is read in large ones."""
        wish, keys = chain.wish, chain.wish.keys
        step = max(1, min(_MOST_BATCH_PAGES, self._tiers[tier].batch_nbytes // wish.nbytes))
        chain.taken[tier] = chain.taken.get(tier, 0) + stop - start
        while start < stop:
            parent = keys[start - 1] if start else wish.parent
            flight = None if parent is None else self._flights.get(self._name(wish, chain.clears, parent))
            batch, at = flight or (None, 0)
            room = 0
            if batch is not None and batch.tier == tier and batch.is_open and at == len(batch.keys) - 1:
                room = step - len(batch.keys)
            if batch is None or room <= 0:
                if batch is not None:
                    batch.followed = True
                batch, room = Batch(tier, wish, chain.clears, [], [], [], batch), step
            last = min(start + room, stop)
            for i in range(start, last):
                self._flights[self._name(wish, chain.clears, keys[i])] = batch, len(batch.keys)
                batch.add(chain, i)
            self._queue(batch, last - start)
            self._release(batch)
            start = last

    def _queue(self, batch: Batch, pages: int) -> None:
        self.queued_pages[batch.tier] += pages
        self._queued_nbytes[batch.tier] += pages * batch.wish.nbytes

    def _release(self, batch: Batch) -> None:
        """Have it fetched, or wait for the one before it."""
        after = batch.after
        if batch.released or batch.ended:
            return
        if after is None or after.ended or (after.tier == batch.tier and after.released):
            batch.released = True
            self._batches.append(batch)
            for follower in batch.followers:
                self._release(follower)
        elif batch not in after.followers:
            after.followers.append(batch)

    def _ask(self, chain: Chain) -> None:
        at = len(chain.sources)
        if at >= chain.limit or chain.done:
            return
        for tier in self._open(chain):
            answers = chain.answers[tier]
            if chain.questions[tier] is not None or answers[at] != _UNKNOWN:
                continue
            stop = at
            while stop < min(at + chain.sizes[tier], chain.limit) and answers[stop] == _UNKNOWN:
                answers[stop] = _ASKED
                stop += 1
            question = chain.questions[tier] = Question(chain, tier, at, stop - at)
            self._questions.append(question)

    def _failed(self, chain: Chain, at: int, tier: int, cause: str) -> None:
        if chain.done:
            return
        if cause in _OURS:
            chain.limit = min(chain.limit, at)
            chain.cause = chain.cause or cause
        elif cause != BEHIND:
            chain.answers[tier][at] = _NO
            chain.cause = cause
        self._back(chain, at)

    def _back(self, chain: Chain, at: int) -> None:
        """Look again for the pages from `at` on."""
        for i in range(at, len(chain.sources)):
            flight = self._flights.get(self._name(chain.wish, chain.clears, chain.wish.keys[i]))
            if flight is not None:
                flight[0].wanted[flight[1]].pop(chain, None)
        del chain.sources[at:]
        chain.committed = min(chain.committed, at)

    def _say(self, chain: Chain, word: Word) -> None:
        chain.last = word
        chain.words.append(word)
        self._spoken.append(chain)

    def _drop(self, chain: Chain) -> None:
        self.chains.discard(chain)
        self._back(chain, 0)

    @staticmethod
    def _name(wish: Wish, clears: int, key: bytes) -> Name:
        return wish.namespace.digest, wish.shard, wish.nbytes, clears, key
