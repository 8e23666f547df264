"""Pages that are on their way from a tier: asked for early, promised at once, and computed if they do not come.

The store is the real pool behind faults that hide its pages until they have "landed".
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import oracle
import pytest
from cases import PROMPT, Start, every_runner, steady_runners, warm_pool, warmed
from faults import Arrivals, Faults, never
from pd import PROMPT as PD_PROMPT
from pd import MakePair, figures
from simulated.waiting import wait_for
from vllm.v1.request import RequestStatus

import store_client.agent.clients as clients
import store_client.jobs
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import page_keys
from mooncake_connector.prefill_speed import PrefillSpeed
from store_client.base import Lookup
from vllm_plugin.prefix.lookups import Lookups

KEYS = page_keys(PROMPT, 16)
OTHER = list(range(200, 300))
TIERS = {"tiers": ["mooncake"], "agent": "external", "lookup_wait_s": 60.0}
"""With nobody there to answer: what the tiers say is said by `Arrivals`."""
ALL_LOADED = 4 + 2
NOTHING_LOADED = len(PROMPT) + 2


def failures(engine: Any) -> dict[str, int]:
    """By cause, but for the agent, which is not there."""
    causes = figures(engine).get("failures", {})
    return {cause: count for cause, count in causes.items() if not cause.startswith("agent_")}


def promises(engine: Any) -> list[int]:
    """Pages that were promised, landed and lost."""
    return [figures(engine).get(f"tier_{outcome}_pages", 0) for outcome in ("promised", "landed", "lost")]


@pytest.fixture(autouse=True)
def _unhurried_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client.jobs, "_HEARING_S", 60.0)
    monkeypatch.setattr("vllm_plugin.prefix.lookups._NOT_LANDED_PAUSE_S", 600.0)


# What is coming


@every_runner
def test_pages_that_are_coming_are_promised_and_loaded_as_they_land(start: Start, faults: Faults) -> None:
    engine = warmed(start, extra=TIERS)
    faults.answer = arrivals = Arrivals(KEYS)
    arrivals.land(KEYS[:1])
    name = engine.add(PROMPT, 20)
    loads = engine.workers[0].prefix._loads
    engine.run(until=lambda: loads.pending and loads.pending[0].pages == 1)
    assert loads.pending[0].num_coming == len(KEYS) - 1
    arrivals.land(KEYS[:4])
    engine.run(until=lambda: loads.pending[0].pages == 4)
    running = engine.answer(OTHER, 5)
    engine.check_answer(running)
    assert not engine.texts[name] and not engine.received
    arrivals.land(KEYS)
    engine.finish(name, computed=4 + 19)
    assert not failures(engine)
    assert figures(engine)["tier_hit_tokens"] == 16 * (len(KEYS) - 1), "one page was there when the request came"
    assert promises(engine) == [len(KEYS) - 1, len(KEYS) - 1, 0]


@every_runner
@pytest.mark.parametrize("landed", [0, 3])
def test_what_does_not_land_by_the_deadline_is_computed_and_the_pool_goes_on_serving(
    start: Start, faults: Faults, landed: int
) -> None:
    warm_pool(start, PROMPT, OTHER)
    engine = start(extra=TIERS)
    faults.answer = arrivals = Arrivals([*KEYS, *page_keys(OTHER, 16)])
    arrivals.land(KEYS[:landed])
    name = engine.add(PROMPT, 10)
    loads = engine.workers[0].prefix._loads
    engine.run(until=lambda: loads.pending and loads.pending[0].awaits and loads.pending[0].pages == landed)
    loads.pending[0].deadline_s = 0.0
    engine.finish(name, computed=len(PROMPT) - 16 * landed + 9)
    assert failures(engine) == {"load_not_landed": 1}
    assert promises(engine) == [len(KEYS) - landed, 0, len(KEYS) - landed]
    arrivals.land(page_keys(OTHER, 16)[:2])
    engine.check(OTHER, name="other", computed=len(OTHER) - 32 + 2)
    assert failures(engine) == {"load_not_landed": 1}, "what had been promised in vain was promised again"


@every_runner
def test_what_is_not_coming_any_more_is_computed_at_once(start: Start, faults: Faults) -> None:
    engine = warmed(start, extra=TIERS)
    faults.answer = arrivals = Arrivals(KEYS)
    arrivals.land(KEYS[:2])
    name = engine.add(PROMPT, 10)
    loads = engine.workers[0].prefix._loads
    engine.run(until=lambda: loads.pending and loads.pending[0].awaits)
    arrivals.promised.clear()
    engine.finish(name, computed=len(PROMPT) - 32 + 9)
    assert failures(engine) == {"load_page_lost": 1}
    assert promises(engine) == [len(KEYS) - 2, 0, len(KEYS) - 2]


def test_a_worker_whose_store_has_not_heard_yet_does_not_give_up_what_was_promised(
    start: Start, faults: Faults
) -> None:
    engine = warmed(start, extra=TIERS)
    faults.answer = arrivals = Arrivals(KEYS, deaf=3)
    name = engine.add(PROMPT)
    engine.run(until=lambda: not arrivals.deaf)
    arrivals.land(KEYS)
    engine.finish(name, computed=ALL_LOADED)


@every_runner
def test_a_request_that_is_aborted_while_its_pages_are_coming_leaves_nothing_behind(
    start: Start, faults: Faults
) -> None:
    engine = warmed(start, extra=TIERS)
    faults.answer = arrivals = Arrivals(KEYS)
    name = engine.add(PROMPT)
    loads = engine.workers[0].prefix._loads
    engine.run(until=lambda: loads.pending and loads.pending[0].awaits)
    engine.abort(name)
    arrivals.land(KEYS)
    engine.run()
    engine.check_at_rest()
    engine.check(PROMPT, name="again", computed=ALL_LOADED)


@every_runner
def test_preempted_requests_take_what_is_coming_again(start: Start, faults: Faults) -> None:
    engine = start(num_blocks=16, prefix_caching=False, keep_pace=True, extra=TIERS)

    def land_when_loaded(asked: Sequence[bytes], found: Lookup) -> Lookup:
        loading = threading.current_thread().name == "mooncake-connector-load"
        return found if loading else Lookup(0, coming=found.pages)

    faults.answer = land_when_loaded
    names = [engine.add(prompt, 60) for prompt in (PROMPT, OTHER)]
    engine.finish(*names)
    assert any(engine.requests[name].num_preemptions for name in names)
    assert faults.calls["read"] > 0, "the preempted request was promised nothing"


@pytest.mark.parametrize("split", [{"tp_size": 2}, {"pp_size": 2}], ids=["tp2", "pp2"])
def test_each_rank_waits_for_its_own_pages(start: Start, faults: Faults, split: dict[str, int]) -> None:
    warm_pool(start, **split)
    engine = start(**split, extra=TIERS)
    faults.answer = arrivals = Arrivals(KEYS)
    name = engine.add(PROMPT, 10)
    loads = [worker.prefix._loads for worker in engine.workers]
    engine.run(until=lambda: all(one.pending and one.pending[0].awaits for one in loads))
    assert len({shard for shard, _, _ in faults.announced}) == 2
    arrivals.land(KEYS)
    engine.finish(name, computed=4 + 9)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([Lookup(1, coming=3), Lookup(4)], Lookup(1, coming=3)),
        ([Lookup(1, coming=3), Lookup(2)], Lookup(1, coming=1)),
        ([Lookup(1, coming=3), Lookup(2, True)], Lookup(1, True, 1)),
        ([Lookup(1, coming=3), Lookup(0, coming=2)], Lookup(0, coming=2)),
        ([Lookup(2, True, 1), Lookup(0, coming=9)], Lookup(0, True, 3)),
        ([Lookup(3, coming=9), Lookup(4)], Lookup(3, coming=1)),
    ],
)
def test_as_many_pages_are_promised_as_every_rank_will_have(
    start: Start, answers: list[Lookup], expected: Lookup
) -> None:
    class View:
        def __init__(self, answer: Lookup) -> None:
            self.lookup = lambda keys: answer

    lookups: Lookups = start().prefix._lookups
    assert lookups.leading([bytes(32)] * 4, [View(answer) for answer in answers]) == expected  # type: ignore[misc]


# What is asked


def test_a_prompt_is_announced_when_it_arrives_and_before_its_turn(start: Start, faults: Faults) -> None:
    engine = start(extra=TIERS)
    engine.add(PROMPT)
    ((shard, keys, said),) = faults.announced
    assert (shard, keys, said["parent"], said["prefill_tokens_s"]) == (Shard(0, 2, 0, 2), KEYS, None, None)
    engine.run()
    engine.add(OTHER)
    _, keys, said = faults.announced[-1]
    assert keys == page_keys(OTHER, 16)
    speed = said["prefill_tokens_s"]
    assert speed is not None and 0 < speed < float("inf")
    engine.finish()


@pytest.mark.parametrize("case", ["no tiers", "short", "no name", "hung pool"])
def test_nothing_is_announced_where_nothing_could_be_taken(start: Start, faults: Faults, case: str) -> None:
    engine = start(extra={} if case == "no tiers" else TIERS)
    if case == "hung pool":
        engine.prefix._lookups._stalled_until_s = float("inf")
    engine.check(PROMPT[:15] if case == "short" else PROMPT)
    if case == "no name":
        faults.announced.clear()
        engine.prefix.track = lambda request: type("Nameless", (), {"root": None})()
        engine.prefix.announce(engine.requests["r0"])
    assert not faults.announced


@every_runner
def test_tiers_that_say_nothing_put_a_request_aside_once_and_cost_it_nothing_else(start: Start, faults: Faults) -> None:
    """The store says pending for a moment after the first question, and no longer."""
    engine = warmed(start, extra=TIERS)
    asked: list[Lookup] = []

    def quiet(keys: Sequence[bytes], found: Lookup) -> Lookup:
        asked.append(Lookup(0, pending=len(asked) < 2))  # the announcement looks as well
        return asked[-1]

    faults.answer = quiet
    engine.check(PROMPT, computed=NOTHING_LOADED)
    assert not failures(engine) and not asked[-1].pending
    assert figures(engine)["tier_waits"] == 1 and figures(engine)["tier_wait_seconds"] > 0


@pytest.mark.parametrize("others", [False, True], ids=["idle", "busy"])
def test_a_request_waits_for_the_first_word_where_the_next_step_is_near(
    start: Start, faults: Faults, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    """While others compute, the next step is as far away as the last one took, which may be more than it is worth."""
    engine = warmed(start, extra=TIERS)
    takes = property(lambda speed: 30.0, lambda speed, step_s: None)
    monkeypatch.setattr(type(engine.prefix.speed), "step_s", takes, raising=False)
    asked: list[Lookup] = []

    def slow(keys: Sequence[bytes], found: Lookup) -> Lookup:
        asked.append(Lookup(0, pending=len(asked) < 3, wait_s=20.0))
        return asked[-1]

    if others:
        other = engine.add(OTHER, 40)
        engine.run(until=lambda: engine.texts[other])
    before, unheard = (figures(engine).get(figure, 0) for figure in ("tier_waits", "tier_unheard"))
    faults.answer = slow
    engine.check(PROMPT, computed=NOTHING_LOADED)
    assert figures(engine).get("tier_waits", 0) - before == (not others)
    assert figures(engine).get("tier_unheard", 0) - unheard == others


def unheard_until_awaited(faults: Faults) -> None:
    faults.answer = lambda keys, found: found if faults.calls["await_word"] else never(keys, found)


@every_runner
def test_an_idle_engine_listens_for_the_word_before_it_puts_a_request_aside(start: Start, faults: Faults) -> None:
    """Once in a step, whoever waits: vLLM would sleep as long."""
    engine = warmed(start, extra=TIERS)
    unheard_until_awaited(faults)
    name = engine.add(PROMPT)
    engine.step()
    assert faults.calls["await_word"] == 1 and engine.requests[name].status != RequestStatus.WAITING
    faults.answer = never
    for prompt in (OTHER, PROMPT):
        engine.add(prompt)
    engine.step()
    assert faults.calls["await_word"] == 2
    faults.answer = None
    engine.finish(name, computed=ALL_LOADED)
    engine.run()


@pytest.mark.parametrize("split", [{}, {"pp_size": 2}], ids=["busy", "pipeline"])
def test_nobody_listens_for_the_word_where_others_would_wait(
    start: Start, faults: Faults, split: dict[str, int]
) -> None:
    engine = warmed(start, extra=TIERS, **split)
    if not split:
        other = engine.add(OTHER, 60)
        engine.run(until=lambda: engine.texts[other])
    before = faults.calls["await_word"]
    unheard_until_awaited(faults)
    name = engine.add(PROMPT)
    for _ in range(5):
        engine.step()
    assert faults.calls["await_word"] == before and not engine.texts[name]
    faults.answer = None
    engine.finish(name, computed=ALL_LOADED)
    engine.run()


def test_what_the_agent_did_not_do_is_among_the_engines_failures(start: Start) -> None:
    """In one process the scheduler's side and the worker's have one client, and each failure counts once."""
    engine = warmed(start, extra=TIERS)
    (client,) = clients._clients.values()
    wait_for(lambda: client.failures["agent_lost"])
    client.close()  # nothing is added any more
    engine.check(PROMPT)
    engine.check(OTHER, name="other")
    assert figures(engine)["failures"]["agent_lost"] == client.failures["agent_lost"]


def test_the_tiers_are_not_asked_for_what_another_instance_brings(pair: MakePair, faults: Faults) -> None:
    both = pair({}, {"extra": TIERS}, pool=True)
    both.prefill.prefix._tiered = False
    faults.answer = never
    both.ask(PD_PROMPT, computed=1 + 2)
    assert not faults.announced
    assert "lookup_late" not in failures(both.decode)


@steady_runners
def test_a_store_that_cannot_be_told_costs_nothing(start: Start, faults: Faults) -> None:
    engine = warmed(start, extra=TIERS)
    faults.raise_in = {"prefetch"}
    engine.check(PROMPT, computed=ALL_LOADED)


# How fast it computes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = type("Clock", (), {"now_s": 100.0})()
    monkeypatch.setattr("mooncake_connector.prefill_speed.time", type("Time", (), {"monotonic": lambda: clock.now_s}))
    return clock


def test_the_speed_of_prefill_is_that_of_the_steps_that_prefill(clock: Any) -> None:
    speed = PrefillSpeed(16, 1)
    for num_tokens, lasts_s in [(8, 1.0), (1000, 2.0), (8, 50.0), (1000, 2.0)]:
        speed.planned(num_tokens, 8)
        clock.now_s += lasts_s
        speed.computed()
        clock.now_s += 1000.0  # idle
    assert speed.tokens_s == pytest.approx(500.0)


def test_a_step_that_is_planned_beside_another_begins_when_that_is_over(clock: Any) -> None:
    speed = PrefillSpeed(16, 2)
    speed.planned(1000, 1)
    for _ in range(5):
        speed.planned(1000, 1)
        clock.now_s += 2.0
        speed.computed()
    assert speed.tokens_s == pytest.approx(500.0)


def test_before_anything_was_computed_the_speed_is_not_known() -> None:
    speed = PrefillSpeed(16, 1)
    speed.computed()
    assert speed.tokens_s is None


def test_texts_of_the_model_differ() -> None:
    assert oracle.generate(PROMPT, 10) != oracle.generate(OTHER, 10)
