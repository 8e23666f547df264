"""Lookups that the store cannot answer at once, or answers wrongly: a request waits within bounds, others go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
from cases import PROMPT, Start, every_runner, warm_pool, warmed
from faults import Faults, Late, lying, never
from pd import MakePair, figures
from settings import Setup, multi_connector, transfer_config

import vllm_plugin.prefix.lookups
from store_client.base import Lookup
from vllm_plugin.prefix.lookups import Lookups

OTHER = list(range(200, 300))
LONG, SHORT = {"lookup_wait_s": 60.0}, {"lookup_wait_s": 0.05}
NOTHING_LOADED = len(PROMPT) + 2
ALL_LOADED = 4 + 2


def failures(engine: Any) -> dict[str, int]:
    return dict(figures(engine).get("failures", {}))


@every_runner
def test_an_answer_that_comes_late_is_waited_for(start: Start, faults: Faults) -> None:
    engine = warmed(start, extra=LONG)
    faults.answer = late = Late(asked=4, before=2)
    engine.check(PROMPT, computed=ALL_LOADED)
    assert max(late.times.values()) >= 4
    assert not failures(engine)


def test_a_lookup_of_a_request_that_is_put_aside_is_part_of_its_wait(
    start: Start, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = warmed(start, extra=LONG)
    clock, late = SimpleNamespace(now_s=0.0), Late(asked=4, before=2)

    def takes(seconds: float) -> float:
        clock.now_s += seconds
        return clock.now_s

    monkeypatch.setattr(vllm_plugin.prefix.lookups, "time", SimpleNamespace(monotonic=lambda: takes(0.01)))

    def slow(keys: Sequence[bytes], found: Lookup) -> Lookup:
        answer = late(keys, found)
        if max(late.times.values(), default=0) <= 4:  # those that follow are the load's
            takes(0.5)
        return answer

    faults.answer = slow
    name = engine.add(PROMPT)
    tracked = engine.prefix._tracked[name]
    engine.finish(name, computed=ALL_LOADED)
    assert max(late.times.values()) >= 4
    assert 4 * 0.5 < tracked.lookup_s < clock.now_s, "all the time in which it was looked up, and that once"


@every_runner
def test_others_run_while_a_request_waits_for_its_answer(start: Start, faults: Faults) -> None:
    engine = warmed(start, extra=LONG)
    faults.answer = lambda keys, found: never(keys, found) if found.pages else found
    waiting = engine.add(PROMPT, name="waiting")
    running = engine.answer(OTHER, 20, name="running")
    engine.check_answer(running)
    assert not engine.texts[waiting]
    faults.answer = None
    engine.finish(waiting, computed=ALL_LOADED)


@every_runner
def test_an_answer_that_never_comes_costs_the_wait_and_no_more(
    start: Start, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    engine = warmed(start, extra=SHORT)
    faults.answer = never
    prompts = [PROMPT, OTHER]
    engine.check_all(prompts)
    assert failures(engine) == {"lookup_late": 2}
    assert caplog.text.count("the pool did not say within 0.05 s") == 1


@every_runner
def test_when_the_wait_is_over_what_is_there_is_taken(start: Start, faults: Faults) -> None:
    engine = warmed(start, extra=SHORT)
    faults.answer = lambda keys, found: Lookup(min(2, found.pages), pending=True)
    engine.check(PROMPT, name="again", computed=NOTHING_LOADED - 32)


def test_without_a_wait_nothing_is_put_aside(start: Start, faults: Faults) -> None:
    engine = warmed(start, extra={"lookup_wait_s": 0})
    faults.answer = Late(asked=2)
    engine.add(PROMPT, name="again")
    assert engine.step() > 0
    engine.run()
    assert engine.texts["again"] == oracle.generate(PROMPT, 3) and engine.computed("again") == NOTHING_LOADED
    assert not failures(engine), "nothing was waited for, so nothing was late"


@every_runner
def test_a_store_that_says_that_all_is_there_costs_a_recomputation(start: Start, faults: Faults) -> None:
    engine = start()
    faults.answer = lying
    prompts = [PROMPT, OTHER]
    engine.check_all(prompts, 20)


@pytest.mark.parametrize("pages", [-3, 1 << 40, None], ids=str)
def test_a_count_that_cannot_be_costs_nothing(start: Start, faults: Faults, pages: Any) -> None:
    engine = warmed(start)
    faults.answer = lambda keys, found: Lookup(pages)
    engine.check(PROMPT)


def test_a_store_that_raises_after_it_was_pending_ends_the_wait(start: Start, faults: Faults) -> None:
    engine = warmed(start, extra=LONG)

    def raise_later(keys: Sequence[bytes], found: Lookup) -> Lookup:
        if faults.calls["lookup"] > 3:
            raise OSError("the store is gone")
        return never(keys, found)

    faults.answer = raise_later
    engine.check(PROMPT, computed=NOTHING_LOADED)
    assert failures(engine) == {"lookup": 1}


def test_after_a_lookup_that_hung_the_store_is_left_alone(
    start: Start, faults: Faults, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = warmed(start)
    monkeypatch.setattr(vllm_plugin.prefix.lookups, "_LOOKUP_HANGS_S", 0.01)

    def hang(keys: Sequence[bytes], found: Lookup) -> Lookup:
        time.sleep(0.02)
        return never(keys, found)

    faults.answer = hang
    asked = faults.calls["lookup"]
    for prompt in (PROMPT, OTHER):
        assert engine.ask(prompt) == oracle.generate(prompt, 3)
    assert faults.calls["lookup"] == asked + 1
    assert failures(engine) == {"lookup_hung": 1}
    assert "no prefix reuse for 30 s" in caplog.text
    engine.check_at_rest()


@every_runner
def test_a_request_aborted_while_it_waits_leaves_nothing_behind(start: Start, faults: Faults) -> None:
    engine = warmed(start, extra=LONG)
    faults.answer = never
    asked = faults.calls["lookup"]
    name = engine.add(PROMPT)
    engine.run(until=lambda: faults.calls["lookup"] > asked + 2)
    engine.abort(name)
    engine.finish()
    asked = faults.calls["lookup"]
    time.sleep(0.01)
    assert faults.calls["lookup"] == asked and engine.reasons[name] == "abort"
    faults.answer = None
    engine.check(PROMPT, computed=ALL_LOADED)


@every_runner
def test_a_request_waits_once_in_its_life_also_when_it_is_preempted(start: Start, faults: Faults) -> None:
    prompts = [PROMPT, OTHER]
    engine = start(num_blocks=16, prefix_caching=False, keep_pace=True, extra=SHORT)
    faults.answer = never
    names = [engine.add(prompt, 60) for prompt in prompts]
    engine.run(until=lambda: all(engine.texts.values()))
    engine.prefix._lookups._wait_s = 3600.0  # a second wait would not end
    engine.finish()
    assert [engine.texts[name] for name in names] == [oracle.generate(prompt, 60) for prompt in prompts]
    assert sum(map(engine.computed, names)) > sum(len(prompt) + 60 for prompt in prompts), "nobody was preempted"
    assert failures(engine)["lookup_late"] == 2


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([Lookup(2, True), Lookup(3)], Lookup(2, True)),
        ([Lookup(2), Lookup(3, True)], Lookup(2)),
        ([Lookup(2), Lookup(2, True)], Lookup(2)),
        ([Lookup(2, True), Lookup(2, True)], Lookup(2, True)),
    ],
)
def test_only_ranks_that_have_the_fewest_pages_are_worth_a_wait(
    start: Start, answers: list[Lookup], expected: Lookup
) -> None:
    class View:
        def __init__(self, answer: Lookup) -> None:
            self.lookup = lambda keys: answer

    lookups: Lookups = start().prefix._lookups
    assert lookups.leading([bytes(32)] * 4, [View(answer) for answer in answers]) == expected  # type: ignore[misc]


# Beside others


def test_inside_a_multi_connector_the_answer_is_waited_for(start: Start, pool: Path, faults: Faults) -> None:
    warm_pool(start)
    engine = start(transfer=multi_connector(transfer_config(Setup(extra=LONG), pool)))
    faults.answer = Late(asked=4)
    engine.check(PROMPT, computed=ALL_LOADED)


@every_runner
def test_what_a_transfer_brings_does_not_wait_for_the_store(pair: MakePair, faults: Faults) -> None:
    both = pair({"extra": {"lookup_wait_s": 0}}, {"extra": LONG}, pool=True)
    faults.answer = never
    both.ask(PROMPT, computed=1 + 2)
    assert set(both.failures()) <= {"lookup_late"} and "lookup_late" not in failures(both.decode)
