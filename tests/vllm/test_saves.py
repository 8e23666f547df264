"""Saves: from blocks that nobody else can get meanwhile, bounded, and finished by an idle engine."""

from __future__ import annotations

import oracle
import pytest
from cases import PROMPT, RUNNERS, Start, every_runner
from harness import Engine

STEADY = [case for case in RUNNERS if case.id in ("v1", "v2-async-lazy")]
OTHERS = [list(range(start, start + 100)) for start in (120, 230, 340)]


def pinned(engine: Engine) -> int:
    return int(engine.half._num_pinned_blocks)


def check_pool(engine: Engine, *prompts: list[int], num_tokens: int) -> int:
    """Every page of the pool is one of these texts', and holds its KV; how many there are."""
    stored = 0
    for prompt in prompts:
        stored += sum(engine.pages([*prompt, *oracle.generate(prompt, num_tokens)]))
    assert stored == engine.num_pages()
    return stored


@every_runner
def test_pages_saved_late_hold_the_kv_of_their_key_although_others_want_the_blocks(
    start: Start, faults, runner: dict[str, bool]
) -> None:
    """Pain point 7. Cure: a save pins its blocks. The saver stands still while the request that it saves is preempted
    or aborted and others fill the whole cache, several times over."""
    engine = start(**runner, num_blocks=20, prefix_caching=False)
    faults.hold_writes()
    first = engine.add(PROMPT, 100)
    engine.run(until=faults.writing.is_set)
    engine.abort(first)
    names = [engine.add(prompt, 60) for prompt in OTHERS]
    engine.run(until=lambda: all(name in engine.reasons for name in names))
    assert [engine.texts[name] for name in names] == [oracle.generate(prompt, 60) for prompt in OTHERS]
    faults.release()
    engine.run()
    engine.check_at_rest()
    assert check_pool(engine, PROMPT, *OTHERS, num_tokens=100) > 0


@every_runner
def test_pages_of_a_preempted_request_are_saved_from_its_old_blocks(
    start: Start, faults, runner: dict[str, bool]
) -> None:
    engine = start(**runner, num_blocks=18, prefix_caching=False)
    faults.hold_writes()
    names = [engine.add(prompt, 60) for prompt in OTHERS[:2]]
    engine.run(until=lambda: all(name in engine.reasons for name in names))
    assert any(engine.requests[name].num_preemptions for name in names)
    faults.release()
    engine.run()
    engine.check_at_rest()
    assert check_pool(engine, *OTHERS, num_tokens=60) > 0


@every_runner
def test_abort_while_saving_keeps_only_the_pinned_blocks(start: Start, faults, runner: dict[str, bool]) -> None:
    """The request ends at once: nobody waits for its saves (`request_finished` never delays)."""
    engine = start(**runner)
    faults.hold_writes()
    name = engine.add(PROMPT, 100)
    engine.run(until=faults.writing.is_set)
    engine.abort(name)
    assert name not in engine.scheduler.requests
    for _ in range(3):
        engine.step()
    assert engine.setup.num_blocks - 1 - engine.free_blocks() == pinned(engine) > 0
    faults.release()
    engine.run()
    engine.check_at_rest()
    assert all(engine.pages(PROMPT))


@every_runner
def test_an_idle_engine_goes_on_until_its_saves_have_ended(start: Start, faults, runner: dict[str, bool]) -> None:
    """Pain point 19. Cure: `has_pending_push_work`. Without it the blocks stay pinned until the next request."""
    engine = start(**runner)
    faults.hold_writes()
    name = engine.add(PROMPT)
    engine.run(until=lambda: name in engine.reasons)
    for _ in range(5):
        engine.step()
    assert not engine.scheduler.has_unfinished_requests()
    assert engine.scheduler.has_requests()
    faults.release()
    engine.run()
    engine.check_at_rest()
    assert all(engine.pages(PROMPT))


@pytest.mark.parametrize("runner", STEADY)
def test_pinned_blocks_are_bounded_while_the_pool_hangs_and_every_request_is_answered(
    start: Start, faults, runner: dict[str, bool]
) -> None:
    engine = start(**runner, num_blocks=64, prefix_caching=False)
    faults.hold_writes()
    most = 0
    for prompt in OTHERS * 3:
        name = engine.add(prompt, 30)
        while name not in engine.reasons:
            engine.step()
            most = max(most, pinned(engine))
        assert engine.texts[name] == oracle.generate(prompt, 30)
    assert 0 < most <= 64 // 4
    faults.release()
    engine.run()
    engine.check_at_rest()


def test_a_long_prompt_is_saved_in_parts_that_fit_the_bound(start: Start) -> None:
    """A chunk of 16 blocks in a cache of 40, of which at most 10 are pinned at a time."""
    prompt = list(range(1, 401))
    engine = start(num_blocks=40, keep_pace=True)
    assert engine.ask(prompt, 20) == oracle.generate(prompt, 20)
    assert all(engine.pages(prompt))
    engine.check_at_rest()


@pytest.mark.parametrize("block_tokens", [16, 128])
def test_one_page_is_saved_however_small_the_cache(start: Start, block_tokens: int) -> None:
    """Four blocks of 16 make a page of 64: more than a quarter of this cache."""
    engine = start(num_blocks=10 if block_tokens == 16 else 3, block_tokens=block_tokens, page_tokens=64)
    assert engine.ask(PROMPT, 5) == oracle.generate(PROMPT, 5)
    assert engine.pages(PROMPT) == [True]
    engine.check_at_rest()


@pytest.mark.parametrize("runner", STEADY)
def test_waiting_for_pinned_blocks_never_starves_the_engine(
    start: Start, faults, runner: dict[str, bool], monkeypatch
) -> None:
    """Cure: `frees_blocks_soon` says yes only while the oldest pin is young. The saver hangs for ever here, and holds
    blocks that nobody else does; the two requests that then run do not fit into the rest together."""
    monkeypatch.setattr("vllm_plugin.scheduler._WORTH_WAITING_S", 0.01)
    engine = start(**runner, num_blocks=20, prefix_caching=False, extra={"save_deadline_s": 600.0})
    faults.hold_writes()
    gone = engine.add(PROMPT[:64], 1)
    engine.run(until=lambda: gone in engine.reasons)
    names = [engine.add(prompt, 60) for prompt in OTHERS[:2]]
    engine.run(until=lambda: all(name in engine.reasons for name in names))
    assert [engine.texts[name] for name in names] == [oracle.generate(prompt, 60) for prompt in OTHERS[:2]]
    assert any(engine.requests[name].num_preemptions for name in names)
    assert pinned(engine) >= 4
    faults.release()
    engine.run()
    engine.check_at_rest()


def test_the_engine_waits_for_young_pins_instead_of_preempting(start: Start, faults, monkeypatch) -> None:
    """Blocks that only a save still holds come back within milliseconds; preempting a request costs far more."""
    monkeypatch.setattr("vllm_plugin.scheduler._WORTH_WAITING_S", 600.0)
    engine = start(num_blocks=20, prefix_caching=False)
    faults.hold_writes()
    gone = engine.add(PROMPT[:64], 1)
    engine.run(until=lambda: gone in engine.reasons)
    engine.run(until=faults.writing.is_set)
    assert pinned(engine) == 4
    request = engine.requests[engine.add(list(range(200, 430)), 60)]  # all the other blocks, and soon one more
    for _ in range(60):
        engine.step()
    assert request.num_preemptions == 0
    faults.release()
    engine.run()
    assert request.num_preemptions == 0
    assert engine.texts[request.request_id] == oracle.generate(list(range(200, 430)), 60)
    engine.check_at_rest()


def test_pins_that_free_nothing_are_not_waited_for(start: Start, faults, monkeypatch) -> None:
    """Blocks that a running request holds as well do not come back when their save ends. Cure: `ref_cnt == 1`."""
    monkeypatch.setattr("vllm_plugin.scheduler._WORTH_WAITING_S", 600.0)
    monkeypatch.setattr("harness.PATIENCE_S", 5.0)
    engine = start(num_blocks=18, prefix_caching=False, extra={"save_deadline_s": 600.0})
    faults.hold_writes()
    names = [engine.add(prompt, 60) for prompt in OTHERS[:2]]
    engine.run(until=lambda: all(name in engine.reasons for name in names))
    assert any(engine.requests[name].num_preemptions for name in names)


@pytest.mark.parametrize("runner", STEADY)
def test_a_save_that_hangs_is_given_up_and_its_blocks_come_back(
    start: Start, faults, runner: dict[str, bool]
) -> None:
    """It goes on later, when the blocks hold other KV: it must not store that under its own key."""
    engine = start(**runner, num_blocks=20, prefix_caching=False, extra={"save_deadline_s": 0.05})
    faults.hold_writes()
    engine.ask(PROMPT)
    engine.check_at_rest()
    assert engine.ask_all(OTHERS, 30) == [oracle.generate(prompt, 30) for prompt in OTHERS]
    engine.check_at_rest()
    saver = engine.workers[0].connector._worker._saver
    faults.release()
    saver.stop(30.0)
    assert not saver._thread.is_alive()
    assert engine.num_pages() == 0


def test_refused_writes_cost_the_pages_and_nothing_else(start: Start, faults) -> None:
    faults.refuse_writes = True
    engine = start()
    assert engine.ask_all(OTHERS, 20) == [oracle.generate(prompt, 20) for prompt in OTHERS]
    engine.check_at_rest()
    assert engine.num_pages() == 0
