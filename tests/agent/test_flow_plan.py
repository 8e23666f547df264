"""The plan of what is fetched, against a model that knows what every tier has: whatever order things happen in."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.flows import wish_for
from hypothesis import given, settings
from hypothesis import strategies as st
from long_form import examples

from store_client.agent.chain import BEHIND, LANDED, Batch, Chain, Question
from store_client.agent.plan import Plan
from store_client.agent.wish import Wish, Word
from store_client.testing import PAGE_NBYTES, chain

LENGTH = 24
KEYS = chain("plan", LENGTH)
MOST_STEPS = 5000


@dataclass
class ModelTier:
    """What a tier has, what it says it has, and whether it is used."""

    has: set[bytes]
    says: set[bytes]
    batch_pages: int
    down: bool = False
    slow: bool = False
    passed_over: int = 0

    @property
    def batch_nbytes(self) -> int:
        return self.batch_pages * PAGE_NBYTES

    def usable(self) -> bool:
        return not self.down

    def why(self) -> str:
        return "unavailable" if self.down else ""

    def worth(self, nbytes: int, wish: Wish, tokens: int) -> bool:
        return not self.slow

    def not_worth(self, pages: int) -> None:
        self.passed_over += pages


@dataclass
class World:
    """Runs a plan: keeps what is to be done, and does some of it when told to."""

    tiers: list[ModelTier]
    pool: set[bytes] = field(default_factory=set)
    questions: list[Question] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    words: dict[int, list[Word]] = field(default_factory=dict)
    chains: list[Chain] = field(default_factory=list)
    fetched: int = 0

    def __post_init__(self) -> None:
        self.plan = Plan(self.tiers)

    def ask(self, count: int, deadline_s: float = 10.0) -> Chain:
        number, keys = len(self.chains), KEYS[:count]
        self.words[number] = []
        here = leading(keys, self.pool)
        one = self.plan.wish(wish_for(keys, deadline_s), self.words[number].append, here, 0.0, 0)
        self.chains.append(one)
        self.take()
        return one

    def take(self) -> None:
        questions, batches, spoken = self.plan.take()
        self.questions += questions
        self.batches += batches
        for one in spoken:
            for word in one.words:
                one.tell(word)
            one.words.clear()
        under_way = [key for batch in self.batches for key in batch.keys]
        assert len(under_way) == len(set(under_way)), "a page is fetched twice at once"
        for batch in self.batches:
            assert len(batch.keys) <= self.tiers[batch.tier].batch_pages
            after = batch.after
            assert after is None or after.ended or after.tier == batch.tier, "it overlaps with another tier's"

    def answer(self, number: int, fails: bool) -> None:
        question = self.questions.pop(number)
        found = None if fails else [key in self.tiers[question.tier].says for key in question.keys]
        self.plan.answered(question, found, "timeout" if fails else "")
        self.take()

    def bring(self, number: int, now: float = 0.0) -> None:
        """Have a tier deliver a batch, up to the first page that it does not have. In order within a tier."""
        tier = self.batches[number].tier
        batch = next(batch for batch in self.batches if batch.tier == tier)
        self.batches.remove(batch)
        if self.plan.start(batch, now) is not None:
            results, hole = [], False
            for key in batch.keys:
                came = key in self.pool or (not hole and key in self.tiers[tier].has)
                results.append(LANDED if came else BEHIND if hole else "undelivered")
                hole = hole or not came
                self.fetched += came and key not in self.pool
                self.pool |= {key} if came else set()
            self.plan.ended(batch, results)
        self.take()

    def finish(self) -> None:
        """Do all there is to do."""
        for _ in range(MOST_STEPS):
            if self.questions:
                self.answer(0, fails=False)
            elif self.batches:
                self.bring(0)
            else:
                return
        raise AssertionError("it goes round in circles")

    def check_words(self) -> None:
        for number, one in enumerate(self.chains):
            words = self.words[number]
            assert all(0 <= word.landed <= word.coming <= len(one.wish.keys) for word in words)
            assert [word.done for word in words[:-1]] == [False] * (len(words) - 1)
            assert [word.landed for word in words] == sorted(word.landed for word in words)


def leading(keys: list[bytes], have: set[bytes]) -> int:
    return next((i for i, key in enumerate(keys) if key not in have), len(keys))


pages = st.sets(st.integers(0, LENGTH - 1)).map(lambda numbers: {KEYS[i] for i in numbers})
prefix = st.integers(0, LENGTH).map(lambda count: set(KEYS[:count]))
honest = st.builds(
    lambda has, size: ModelTier(has, set(has), size), st.one_of(pages, prefix), st.integers(1, 8)
)  # fmt: skip
lying = st.builds(
    lambda has, more, size: ModelTier(has, has | more, size), st.one_of(pages, prefix), pages, st.integers(1, 8)
)


@settings(max_examples=examples(150))
@given(st.lists(honest, min_size=1, max_size=3), prefix, st.lists(st.integers(1, LENGTH), min_size=1), st.data())
def test_all_that_leads_in_pool_and_tiers_together_lands_once(tiers, pool, counts, data):
    world = World(tiers, set(pool))
    has = set(pool).union(*(tier.has for tier in tiers))
    for count in counts:
        world.ask(count)
        for _ in range(data.draw(st.integers(0, 6))):
            if world.questions and data.draw(st.booleans()):
                world.answer(data.draw(st.integers(0, len(world.questions) - 1)), fails=False)
            elif world.batches:
                world.bring(data.draw(st.integers(0, len(world.batches) - 1)))
    world.finish()
    world.check_words()
    for number, one in enumerate(world.chains):
        last = world.words[number][-1]
        expected = leading(list(one.wish.keys), has)
        assert last.done and last.landed == last.coming == expected
        assert last.cause == ("" if expected else "empty")
    assert not world.plan.chains and world.plan.queued_pages == [0] * len(tiers)


@settings(max_examples=examples(150))
@given(st.lists(lying, min_size=1, max_size=3), st.lists(st.integers(1, LENGTH), min_size=1, max_size=4), st.data())
def test_whatever_fails_every_wish_ends_with_what_landed(tiers, counts, data):
    world = World(tiers)
    cancelled = set()
    for count in counts:
        world.ask(count)
    for _ in range(data.draw(st.integers(0, 30))):
        act = data.draw(st.sampled_from(["answer", "fail", "bring", "down", "slow", "cancel", "hang", "forget"]))
        if act in ("answer", "fail") and world.questions:
            world.answer(data.draw(st.integers(0, len(world.questions) - 1)), fails=act == "fail")
        elif act == "bring" and world.batches:
            world.bring(data.draw(st.integers(0, len(world.batches) - 1)))
        elif act == "hang" and world.batches:
            batch = world.batches.pop(0)
            world.plan.ended(batch, ["hanging"] * len(batch.keys))
            world.take()
        elif act in ("down", "slow"):
            setattr(data.draw(st.sampled_from(tiers)), act, data.draw(st.booleans()))
            world.plan.advance_all()
            world.take()
        elif act == "cancel":
            number = data.draw(st.integers(0, len(counts) - 1))
            if not world.chains[number].done:
                cancelled.add((number, len(world.words[number])))
                world.plan.cancel(world.chains[number])
                world.take()
        elif act == "forget" and data.draw(st.integers(0, 5)) == 0:
            for batch in world.plan.forget(None, "forgotten"):
                assert batch.ended
            world.take()
    world.finish()
    world.check_words()
    for number, told in cancelled:
        assert len(world.words[number]) == told
    for number, one in enumerate(world.chains):
        if number not in {number for number, _ in cancelled}:
            last = world.words[number][-1]
            assert last.done and last.landed == last.coming
            assert set(one.wish.keys[: last.landed]) <= world.pool
    assert not world.plan.chains and not any(world.plan.queued_pages)


@settings(max_examples=examples(100))
@given(honest, st.integers(1, LENGTH), st.integers(0, 20), st.data())
def test_at_its_deadline_a_wish_ends_and_nothing_of_it_begins(tier, count, steps, data):
    world = World([tier])
    world.ask(count, deadline_s=1.0)
    world.ask(count, deadline_s=9.0)
    for _ in range(steps):
        if world.questions and data.draw(st.booleans()):
            world.answer(0, fails=False)
        elif world.batches:
            world.bring(0)
    was_done = world.chains[0].done
    assert world.plan.expire(2.0) == (None if world.chains[1].done else 9.0)
    world.take()
    assert world.chains[0].done
    assert was_done or world.words[0][-1].cause == "late"
    world.plan.expire(10.0)
    world.take()
    fetched = world.fetched
    while world.batches:
        world.bring(0, now=10.0)
    assert world.fetched == fetched and not world.plan.chains
    world.check_words()


def test_what_one_tier_has_too_little_of_to_be_worth_it_waits_for_what_it_has_more():
    class ManyOnly(ModelTier):
        def worth(self, nbytes, wish, tokens):
            return nbytes >= 16 * PAGE_NBYTES

    tier = ManyOnly(set(KEYS), set(KEYS), 64)
    world = World([tier])
    world.ask(LENGTH)
    world.answer(0, fails=False)
    assert world.batches == [] and world.words[0] == [], "four pages are not worth it, and nothing is promised"
    world.answer(0, fails=False)
    assert [len(batch.keys) for batch in world.batches] == [LENGTH]
    few = World([ManyOnly(set(KEYS[:8]), set(KEYS[:8]), 64)])
    few.ask(LENGTH)
    few.finish()
    assert few.words[0] == [Word(done=True, cause="not_worth_it", settled=True)] and few.tiers[0].passed_over == 8
    short = World([ManyOnly(set(KEYS), set(KEYS), 64)])
    short.ask(8)
    short.answer(0, fails=False)
    assert short.questions == [] and short.words[0][-1].cause == "not_worth_it", "there are not enough of them"


def test_what_is_not_worth_it_from_one_tier_comes_from_the_next():
    near, far = ModelTier(set(KEYS), set(KEYS), 8, slow=True), ModelTier(set(KEYS), set(KEYS), 8)
    world = World([near, far])
    world.ask(LENGTH)
    world.finish()
    assert world.words[0][-1].landed == LENGTH and near.passed_over


def test_questions_grow_while_they_are_answered_with_yes():
    world = World([ModelTier(set(), set(), 64)])
    long = chain("long", 3000)
    world.tiers[0].says = set(long)
    world.plan.wish(wish_for(long), lambda _: None, 0, 0.0, 0)
    world.take()
    sizes = []
    while world.questions:
        sizes.append(world.questions[0].count)
        world.answer(0, fails=False)
    assert sizes == [4, 32, 256, 1024, 1024, 660]


def test_what_waits_for_a_busy_tier_is_fetched_in_whole_batches():
    """A chain is looked for a few pages first, and what waits is joined by the next ones; not what has begun."""
    world = World([ModelTier(set(KEYS), set(KEYS), 8)])
    waiting = world.ask(LENGTH)
    world.answer(0, fails=False)
    assert [len(batch.keys) for batch in world.batches] == [4]
    world.answer(0, fails=False)
    assert [len(batch.keys) for batch in world.batches] == [8, 8, 8]
    assert world.plan.queued_pages == [LENGTH]
    world.finish()
    assert waiting.landed == LENGTH and world.plan.queued_pages == [0]

    begun = World([ModelTier(set(KEYS), set(KEYS), 8)])
    begun.ask(LENGTH)
    begun.answer(0, fails=False)
    assert begun.plan.start(begun.batches[0], 0.0) is not None
    begun.answer(0, fails=False)
    assert [len(batch.keys) for batch in begun.batches] == [4, 8, 8, 4]


def test_no_page_joins_a_batch_that_another_one_waits_for():
    """Or that one would wait for more and more pages that are none of its chain."""
    fork = [*KEYS[:4], *chain("fork", 2)]
    tier = ModelTier({*KEYS, *fork}, {*KEYS, *fork}, 8)
    world = World([tier])
    world.ask(LENGTH)
    world.answer(0, fails=False)
    forked = world.plan.wish(wish_for(fork), lambda _: None, 0, 0.0, 0)
    world.take()
    world.answer(0, fails=False)
    world.answer(0, fails=False)
    assert [len(batch.keys) for batch in world.batches] == [8, 8, 8, 2]
    assert world.batches[3].after is world.batches[0]
    world.plan.wish(wish_for([*KEYS[:8], *chain("late", 2)]), lambda _: None, 0, 0.0, 0)
    world.finish()
    assert forked.landed == len(fork) and not world.plan.chains
