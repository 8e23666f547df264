"""Saves: they hold no block, and what vLLM gave to somebody else first is not stored."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
from cases import PROMPT, Interruption, Start, begin_save, every_runner, steady_runners
from harness import Engine
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import SchedulerOutput

import vllm_plugin.prefix.saver
from mooncake_connector.kv.keys import page_keys
from vllm_plugin.blocks import BlockCopies, KVBlocks
from vllm_plugin.messages import SaveResult
from vllm_plugin.prefix.save_planner import SavePlanner
from vllm_plugin.prefix.saver import Saver

OTHERS = [list(range(start, start + 100)) for start in (120, 230, 340)]


def check_pool(engine: Engine, *prompts: list[int], num_tokens: int) -> int:
    """Every page of the pool is one of these texts', and holds its KV; how many there are."""
    stored = 0
    for prompt in prompts:
        stored += sum(engine.pages([*prompt, *oracle.generate(prompt, num_tokens)]))
    assert stored == engine.num_pages()
    return stored


def overtaken(engine: Engine) -> int:
    """Pages that vLLM says were not saved since their blocks were used again."""
    return sum(one.kv_connector_stats.get("overtaken_pages", 0) for one in engine.stats if one.kv_connector_stats)


def crowd_out(engine: Engine, faults: Any, before: Callable[[], None] = lambda: None) -> None:
    """The saver stands still while the request that it saves is aborted, and others fill the whole cache."""
    first = begin_save(engine, faults)
    before()
    overtake(engine, first)
    faults.release()
    engine.finish()


def overtake(engine: Engine, first: str) -> None:
    engine.abort(first)
    for name in [engine.add(prompt, 60) for prompt in OTHERS]:
        engine.run(until=lambda name=name: name in engine.reasons)
        engine.check_answer(name)


@every_runner
def test_pages_saved_late_hold_the_kv_of_their_key_although_others_got_the_blocks(
    start: Start, faults, aside: bool
) -> None:
    engine = start(num_blocks=20, prefix_caching=False)
    crowd_out(engine, faults)
    stored = check_pool(engine, PROMPT, *OTHERS, num_tokens=100)
    assert all(engine.pages(PROMPT)) == aside
    assert (overtaken(engine) > 0) != aside
    assert stored > 0 or not aside


@every_runner
def test_without_the_word_that_blocks_were_given_away_wrong_pages_would_be_stored_and_found(
    start: Start, faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of all tests here: their look into the pool sees pages of overwritten blocks."""
    monkeypatch.setattr(Saver, "give_away", lambda self, block_ids: None)
    engine = start(num_blocks=20, prefix_caching=False)
    crowd_out(engine, faults)
    with pytest.raises(AssertionError, match="holds other KV"):
        engine.pages(PROMPT)


@every_runner
def test_a_page_whose_blocks_are_written_during_its_copy_is_not_stored_as_it_was_read(
    start: Start, aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Interruption(monkeypatch)
    copy.event.clear()
    engine = start(num_blocks=20, prefix_caching=False)
    first = engine.add(PROMPT, 100)
    engine.run(until=lambda: copy.times)
    overtake(engine, first)
    copy.event.set()
    engine.finish()
    check_pool(engine, PROMPT, *OTHERS, num_tokens=100)
    assert all(engine.pages(PROMPT)) == aside


@every_runner
def test_pages_planned_when_a_request_ends_are_right_although_its_blocks_are_used_in_the_next_step(
    start: Start, aside: bool
) -> None:
    """The blocks of the first are the first that vLLM gives the second: last in, first out."""
    engine = start(num_blocks=20, prefix_caching=False)
    name = engine.add(PROMPT, 29)  # the page that ends with token 128 is complete one step before the request ends
    engine.run(until=lambda: name in engine.reasons)
    engine.check(OTHERS[0], 60)
    pages = engine.pages([*PROMPT, *oracle.generate(PROMPT, 29)])
    assert pages[:6] == [True] * 6 or not aside
    check_pool(engine, PROMPT, OTHERS[0], num_tokens=60)


def test_a_block_that_another_one_is_copied_to_is_read_by_no_save_any_more(start: Start, faults) -> None:
    """vLLM says so nowhere else where it copies what a running request is about to overwrite."""
    engine = start()
    name = begin_save(engine, faults)
    planner = engine.prefix.saves
    target = next(iter(planner._readers))
    free = engine.setup.num_blocks - 1
    copied = [KVCacheBlockCopy(free, target), KVCacheBlockCopy(target, free)]
    planner.look_at(dataclasses.replace(SchedulerOutput.make_empty(), kv_cache_block_copies=copied))
    assert planner._given_away == {target}
    faults.release()
    engine.finish(name)


@every_runner
def test_pages_of_a_preempted_request_that_were_overtaken_are_saved_when_it_was_computed_again(
    start: Start, faults, aside: bool
) -> None:
    engine = start(num_blocks=18, prefix_caching=False, keep_pace=False)
    faults.hold_writes()
    names = [engine.add(prompt, 60) for prompt in OTHERS[:2]]
    engine.run(until=lambda: any(engine.requests[name].num_preemptions for name in names))
    engine.run(until=lambda: len(engine.reasons) == 1)
    faults.release()
    engine.settle()
    engine.finish()
    preempted = [engine.requests[name].num_preemptions > 0 for name in names]
    for prompt, again in zip(OTHERS, preempted, strict=False):
        assert all(engine.pages(prompt)) or not again
    assert check_pool(engine, *OTHERS, num_tokens=60) > 0


@pytest.mark.parametrize("events", [False, True])
def test_overtaken_pages_of_a_request_that_still_runs_are_planned_again(start: Start, faults, events: bool) -> None:
    """Cure: `saved_pages` goes back, where an event is due to the first page of the save: it names all of its pages."""
    engine = start(events=events)
    name = begin_save(engine, faults)
    engine.prefix.saves.ended(next(iter(engine.prefix.saves._under_way)), SaveResult(1, 2, overtaken=2))
    so_far = len(engine.texts[name])
    engine.run(until=lambda: len(engine.texts[name]) >= so_far + 20)
    planned = [key for step in engine.metadata for job in step.saves for key in job.keys]
    assert [planned.count(key) for key in page_keys(PROMPT, 16)] == ([2] * 6 if events else [1, 1, 2, 2, 2, 2])
    faults.release()
    engine.finish()


@every_runner
def test_a_save_holds_no_block(start: Start, faults) -> None:
    engine = start()
    name = begin_save(engine, faults)
    engine.abort(name)
    engine.steps(3)
    assert engine.free_blocks() == engine.setup.num_blocks - 1
    faults.release()
    engine.finish()
    assert all(engine.pages(PROMPT))


@every_runner
def test_an_idle_engine_goes_on_until_its_saves_have_ended(start: Start, faults) -> None:
    """Events and figures would otherwise wait for the next request."""
    engine = start()
    faults.hold_writes()
    engine.answer(PROMPT)
    engine.steps(5)
    assert not engine.scheduler.has_unfinished_requests()
    assert engine.scheduler.has_requests()
    faults.release()
    engine.finish()
    assert all(engine.pages(PROMPT))


@every_runner
def test_the_time_that_the_last_steps_take_is_not_idle(start: Start, faults, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a prefill takes seconds, its saves begin after that."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("vllm_plugin.prefix.save_planner.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr("vllm_plugin.prefix.save_planner._COLLECT_S", 1.0)
    engine = start()
    faults.hold_writes()
    name = engine.add(PROMPT)
    engine.step()
    clock.now_s += 30
    engine.run(until=lambda: name in engine.reasons)
    assert engine.prefix.saves.wants_steps()
    clock.now_s += 2
    assert not engine.prefix.saves.wants_steps()
    faults.release()
    engine.settle()


@every_runner
def test_an_idle_engine_does_not_go_on_for_ever_while_the_pool_hangs(
    start: Start, faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_plugin.prefix.save_planner._COLLECT_S", 0.05)
    engine = start()
    faults.hold_writes()
    engine.ask(PROMPT)
    assert not engine.scheduler.has_requests()
    assert engine.prefix.saves._under_way
    faults.release()
    engine.settle()
    monkeypatch.setattr("vllm_plugin.prefix.save_planner._COLLECT_S", 60.0)
    engine.check(OTHERS[0])  # whose steps collect what was left
    assert all(engine.pages(PROMPT))


@steady_runners
def test_while_the_pool_hangs_every_request_is_answered_with_all_blocks(start: Start, faults, aside: bool) -> None:
    engine = start(num_blocks=20, prefix_caching=False)
    faults.hold_writes()
    for prompt in OTHERS * 3:
        name = engine.answer(prompt, 60)
        engine.check_answer(name)
        assert engine.requests[name].num_preemptions == 0
    faults.release()
    engine.finish()
    check_pool(engine, *OTHERS, num_tokens=60)


def test_what_is_copied_aside_is_bounded_and_the_rest_overtaken(
    start: Start, faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(num_blocks=20, prefix_caching=False)
    room = 3 * engine.workers[0].side.memory.groups[0].blocks.block_nbytes
    monkeypatch.setattr(vllm_plugin.prefix.saver, "_ASIDE_NBYTES", room)
    faults.hold_writes()
    engine.answer(PROMPT, 1)
    engine.check_answer(engine.answer(OTHERS[0], 60))
    assert 0 < sum(job.aside_nbytes for job in engine.workers[0].jobs()) <= room
    faults.release()
    engine.finish()
    assert sum(engine.pages(PROMPT)) == 3
    assert overtaken(engine) == 3


@pytest.mark.parametrize("events", [False, True])
def test_where_memory_may_go_between_two_steps_saves_read_what_was_copied_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, events: bool
) -> None:
    """As on a device in sleep mode. A save for which there is not enough room gets further each time it is planned."""
    read_late: list[int] = []
    monkeypatch.setattr(KVBlocks, "save_page", lambda *_: read_late.append(1))
    engine = start(events=events)
    memory = engine.workers[0].side.memory
    memory.sleeps = True
    room = 3 * memory.groups[0].blocks.block_nbytes
    monkeypatch.setattr(vllm_plugin.prefix.saver, "_ASIDE_NBYTES", room)
    name, saver = engine.add(PROMPT, 100), engine.workers[0].prefix._saver
    while name not in engine.reasons:  # on a busy machine all steps would be over before a save is
        engine.step()
        assert all(save.over.wait(60.0) for save in saver.pending)
    engine.finish(name)
    assert all(engine.pages(PROMPT)) and not read_late
    assert check_pool(engine, PROMPT, num_tokens=100) > len(engine.pages(PROMPT))


def test_what_lies_aside_goes_with_its_deadline_although_the_pool_hangs(
    start: Start, faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(num_blocks=20, prefix_caching=False)
    room = 7 * engine.workers[0].side.memory.groups[0].blocks.block_nbytes
    monkeypatch.setattr(vllm_plugin.prefix.saver, "_ASIDE_NBYTES", room)
    saver = engine.workers[0].prefix._saver
    faults.hold_writes()
    for prompt in OTHERS * 2:
        engine.answer(prompt, 1)
        saver.give_away(None)
        assert any(job.aside_nbytes for job in saver.pending)
        for job in saver.pending:
            job.deadline_s = -1.0
        engine.run()
        assert not saver.pending
    gc.collect()
    held = sum(one.nbytes for one in gc.get_objects() if isinstance(one, BlockCopies))
    assert held <= 2 * room  # the saves that wait, and the one that hangs
    faults.release()
    engine.check_at_rest()


@pytest.mark.parametrize("block_tokens", [16, 128])
def test_one_page_is_saved_however_small_the_cache(start: Start, block_tokens: int) -> None:
    engine = start(num_blocks=10 if block_tokens == 16 else 3, block_tokens=block_tokens, page_tokens=64)
    engine.check(PROMPT, 5)
    assert engine.pages(PROMPT) == [True]


@steady_runners
def test_a_save_that_hangs_is_given_up_and_stores_nothing_later(start: Start, faults) -> None:
    """It goes on later, when the blocks hold other KV: it must not store that under its own key."""
    engine = start(num_blocks=20, prefix_caching=False, extra={"save_deadline_s": 0.05})
    faults.hold_writes()
    engine.check(PROMPT)
    engine.check_all(OTHERS, 30)
    faults.release()
    assert engine.workers[0].prefix._saver.stop(30.0)
    assert engine.num_pages() == 0


def test_refused_writes_cost_the_pages_and_nothing_else(start: Start, faults) -> None:
    faults.refuse_writes = True
    engine = start()
    engine.check_all(OTHERS, 20)
    assert engine.num_pages() == 0


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("made to fail")


@pytest.mark.parametrize("name", ["prefix.saver.Saver._fitting", "blocks.KVBlocks.copy"])
def test_a_defect_of_ours_costs_pages_and_never_stores_a_wrong_one(
    start: Start, faults, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where it is not known what can be saved, nothing is."""
    engine = start(num_blocks=20, prefix_caching=False)
    crowd_out(engine, faults, lambda: monkeypatch.setattr(f"vllm_plugin.{name}", fail))
    check_pool(engine, PROMPT, *OTHERS, num_tokens=100)
    assert not any(engine.pages(PROMPT))


@every_runner
def test_what_was_planned_in_a_step_that_failed_is_not_saved_in_a_later_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(num_blocks=20, prefix_caching=False)
    take, failed = SavePlanner.take, []

    def fail_once(planner: SavePlanner) -> Any:
        if planner._planned and not failed:
            failed.append(planner)
            fail()
        return take(planner)

    monkeypatch.setattr(SavePlanner, "take", fail_once)
    engine.answer(PROMPT, 1)
    assert failed
    engine.check(OTHERS[0], 60)
    check_pool(engine, PROMPT, OTHERS[0], num_tokens=60)
