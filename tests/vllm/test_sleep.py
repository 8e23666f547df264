"""vLLM 0.33 says when it takes its KV memory away and when it is back. 0.32 does not; its calls are made here."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
from cases import PROMPT, Start, begin_load, warmed
from harness import Engine
from pd import PROMPT as LEG
from pd import MakePair, every_order, node_of, port_of, prefill_params, run_all

from vllm_plugin.pd import worker as pd_worker


@pytest.mark.parametrize("setting", ["enable_sleep_mode", "enable_cumem_allocator", None])
def test_memory_may_go_wherever_vllm_has_an_allocator_that_takes_it_away(
    start: Start, base_config: Any, setting: str | None
) -> None:
    """`release_kv_cache_memory` asks for no sleep mode, only for the allocator that sleep mode brings along."""
    worker = start().workers[0]
    memory, model = worker.side.memory, copy.copy(base_config.model_config)
    if setting is not None:
        assert getattr(model, setting) is False, "vLLM has it, off by default"
        setattr(model, setting, True)
    assert not memory.sleeps
    memory._vllm_config = SimpleNamespace(model_config=model)
    memory.register({name: tensor.to("meta") for name, tensor in worker.side._kv_caches.items()})
    assert memory.sleeps is (setting is not None)


def sleep(engine: Engine) -> None:
    """What the workers do once the scheduler is paused."""
    for worker in engine.workers:
        worker.connector.unregister_kv_caches()
        worker.connector.unregister_kv_caches()
        worker.memory[:] = 0xDEAD


def wake(engine: Engine) -> None:
    for worker in engine.workers:
        worker.connector.restore_kv_caches()
        worker.connector.restore_kv_caches()
    engine._shake_hands()


def test_after_sleep_pages_are_saved_and_loaded_as_before(start: Start) -> None:
    engine = start(tp_size=2)
    engine.ask(PROMPT)
    assert engine.scheduler.reset_prefix_cache()
    sleep(engine)
    assert all(not worker.side.memory.registered for worker in engine.workers)
    wake(engine)
    assert engine.ask(PROMPT, 20) == oracle.generate(PROMPT, 20)
    engine.scheduler.reset_prefix_cache()
    engine.check(PROMPT, 20, computed=4 + 19)


def test_a_load_under_way_touches_nothing_from_then_on_and_its_request_is_computed(start: Start, faults) -> None:
    engine = warmed(start)
    name = begin_load(engine, faults, 20)
    worker = engine.workers[0]
    worker.connector.unregister_kv_caches()
    worker.memory[:] = before = 0xDEAD
    faults.release()
    engine.settle()
    assert (worker.memory == before).all()
    worker.connector.restore_kv_caches()
    engine.finish(name, computed=100 + 19)


def test_a_hand_over_that_was_held_ends_and_a_new_node_takes_its_place(pair: MakePair) -> None:
    both = pair()
    both.handed_over(LEG)
    node, port = node_of(both.prefill), port_of(both.prefill)
    sleep(both.prefill)
    wake(both.prefill)
    assert node_of(both.prefill) is not node and port_of(both.prefill) != port
    both.prefill.finish()


def test_a_fetch_under_way_fails_and_is_computed(pair: MakePair) -> None:
    both = pair({"max_num_batched_tokens": 16})
    name = both.add_granted(LEG)
    both.decode.workers[0].connector.unregister_kv_caches()
    both.decode.workers[0].connector.restore_kv_caches()
    both.decode._shake_hands()
    both.finish(name, computed=len(LEG) + 2)


@every_order
@pytest.mark.parametrize("slept", ["prefill", "decode", "both"])
def test_kv_is_handed_over_after_either_side_has_slept(pair: MakePair, slept: str, order: str) -> None:
    both = pair({"tp_size": 2})
    both.ask(LEG, order=order)
    sleepers = {"prefill": [both.prefill], "decode": [both.decode], "both": [*both.both]}[slept]
    for engine in both.both:
        assert engine.scheduler.reset_prefix_cache()
    for engine in sleepers:
        sleep(engine)
    for engine in sleepers:
        wake(engine)
    both.ask(LEG, order=order, computed=1 + 2)
    assert not both.failures()
    both.check_at_rest()


def test_a_port_that_was_set_is_the_same_after_sleep(pair: MakePair) -> None:
    """A router knows it by its configuration."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    both = pair({"extra": {"transfer_port": port}})
    sleep(both.prefill)
    wake(both.prefill)
    assert port_of(both.prefill) == port
    both.ask(LEG, order="concurrent")


@pytest.fixture(params=["one rank", "every rank"])
def fall_asleep_for_good(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], None]:
    """Of an engine of two ranks, whose nodes cannot be made again when it wakes."""
    made = iter([pd_worker.Node] if request.param == "one rank" else [])

    def make(*args: object) -> object:
        for node in made:
            return node(*args)
        raise OSError("no descriptor is left")

    def fall_asleep(engine: Engine) -> None:
        monkeypatch.setattr(pd_worker, "Node", make)
        for worker in engine.workers:
            worker.connector.unregister_kv_caches()
            worker.connector.restore_kv_caches()
        engine._shake_hands()

    return fall_asleep


@pytest.mark.parametrize("steps", [1, 3])
def test_a_prefill_ends_where_no_node_can_be_made_after_sleep(pair: MakePair, fall_asleep_for_good, steps) -> None:
    both = pair({"tp_size": 2, "max_num_batched_tokens": 16})
    name = both.prefill.add(LEG, 1, params=prefill_params())
    for _ in range(steps):
        both.prefill.step()
    fall_asleep_for_good(both.prefill)
    both.prefill.add(LEG, 1, params=prefill_params(), name="later")
    run_all(both.prefill)
    assert both.prefill.texts[name] == both.prefill.texts["later"] == oracle.generate(LEG, 1)
    both.prefill.check_at_rest()


def test_a_hand_over_that_was_held_ends_where_no_node_can_be_made_after_sleep(
    pair: MakePair, fall_asleep_for_good
) -> None:
    both = pair({"tp_size": 2})
    both.handed_over(LEG)
    fall_asleep_for_good(both.prefill)
    both.prefill.finish()


@pytest.mark.parametrize("granted", [False, True])
def test_a_fetch_is_computed_where_no_node_can_be_made_after_sleep(
    pair: MakePair, fall_asleep_for_good, granted
) -> None:
    both = pair(decode={"tp_size": 2})
    first = both.add_granted(LEG) if granted else ""
    name = both.add(LEG, order="concurrent")
    fall_asleep_for_good(both.decode)
    run_all(both.decode)
    assert both.decode.texts[name] == both.decode.texts[first or name] == oracle.generate(LEG, 3)
    both.decode.check_at_rest()
