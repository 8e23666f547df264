"""`reset_prefix_cache(reset_connector=True)`: nothing computed with the old weights is read or stored any more."""

from __future__ import annotations

import pytest
from cases import PROMPT, Start, begin_load, every_runner, warmed


@every_runner
def test_after_a_reset_lookups_miss_and_new_pages_go_elsewhere(start: Start) -> None:
    engine = start()
    engine.ask(PROMPT)
    before = engine.prefix.namespace()
    engine.change_weights()
    engine.check(PROMPT)
    assert engine.prefix.namespace().digest != before.digest
    assert engine.scheduler.reset_prefix_cache(reset_connector=False)
    engine.check(PROMPT, computed=4 + 2)


def test_another_instance_never_sees_pages_of_weights_changed_in_memory(start: Start) -> None:
    engine = start()
    engine.change_weights()
    engine.ask(PROMPT)
    other = start()
    other.check(PROMPT, computed=len(PROMPT) + 2)


@every_runner
def test_running_requests_start_over_and_nothing_of_theirs_is_mixed(start: Start) -> None:
    """`reset_running_requests` preempts them: they are computed again from the first token, and may be stored."""
    engine = start(keep_pace=True)
    name = engine.add(PROMPT, 40)
    engine.run(until=lambda: len(engine.texts[name]) >= 20)
    engine.drain()
    engine.settle()
    engine.run(until=lambda: not engine.prefix.saves._under_way)
    engine.change_weights(start_over=True)
    engine.finish()
    assert all(engine.pages(PROMPT, weights=1))


def test_a_request_that_goes_on_with_old_kv_is_not_stored_under_the_new_name(start: Start) -> None:
    """Cure: `tracked.root = None`. Its later pages hang on KV of the old weights."""
    engine = start(keep_pace=True)
    name = engine.add(PROMPT, 60)
    engine.run(until=lambda: len(engine.texts[name]) >= 5)
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.finish()
    assert not any(engine.pages([*PROMPT, *engine.texts[name]]))


def test_a_save_planned_before_a_reset_is_not_sent_after_it(start: Start) -> None:
    """A request's last pages are planned when it ends, and sent with the next step; the reset comes in between."""
    engine = start()
    name = engine.add(PROMPT, 60)
    engine.run(until=lambda: len(engine.texts[name]) >= 58)
    engine.settle()
    engine.run(until=lambda: not engine.prefix.saves._under_way)
    engine.prefix._tracked[name].saved_pages = 0
    engine.abort(name)
    assert engine.prefix.saves._planned
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert not engine.prefix.saves._planned
    engine.run()
    engine.settle()
    engine.check_at_rest()
    assert not any(engine.pages(PROMPT))


def test_reset_before_the_identity_is_known_still_changes_the_namespace(start: Start) -> None:
    engine = start()
    known, engine.prefix._namespace = engine.prefix._namespace, None
    assert engine.prefix.reset()
    assert engine.prefix.namespace() is None
    engine.prefix._namespace = known
    assert engine.prefix.namespace().digest != known.digest
    assert engine.prefix.namespace().is_private and not known.is_private


@every_runner
@pytest.mark.parametrize("how", [{}, {"reset_connector": True}, {"reset_running_requests": True}])
def test_a_reset_while_pages_are_being_saved_answers_as_without_us(start: Start, faults, how: dict[str, bool]) -> None:
    engine = start()
    faults.hold_writes()
    engine.answer(PROMPT)
    engine.run(until=faults.writing.is_set)
    running = engine.add(PROMPT[::-1], 60)
    engine.run(until=lambda: len(engine.texts[running]) >= 3)
    engine.drain()  # until then vLLM holds the blocks of a preempted request for any connector that loads
    assert engine.scheduler.reset_prefix_cache(**how) == ("reset_running_requests" in how)
    engine.run(until=lambda: running in engine.reasons)
    assert engine.scheduler.reset_prefix_cache(**how)
    faults.release()
    engine.finish()


@every_runner
def test_vllm_refuses_a_reset_while_a_load_is_under_way_which_ends_at_its_deadline(start: Start, faults) -> None:
    """A request that waits for a load holds its blocks; vLLM does not ask the connector."""
    engine = warmed(start)
    name = begin_load(engine, faults)
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.workers[0].prefix._loads.pending[0].deadline_s = 0.0
    engine.run(until=lambda: name in engine.reasons)
    engine.drain()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.check_answer(name)


def test_a_reset_leaves_the_pages_of_the_old_weights_to_those_who_have_them(start: Start) -> None:
    engine, other = start(), start()
    engine.ask(PROMPT)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.check(PROMPT, computed=len(PROMPT) + 2)
    other.check(PROMPT, computed=4 + 2)


@pytest.mark.parametrize("reset_connector", [False, True])
def test_a_reset_of_the_local_cache_alone_keeps_the_pool(start: Start, reset_connector: bool) -> None:
    engine = start()
    engine.ask(PROMPT)
    assert engine.scheduler.reset_prefix_cache(reset_connector=reset_connector)
    engine.ask(PROMPT, name="again")
    assert (engine.computed("again") == 4 + 2) != reset_connector
