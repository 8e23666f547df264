"""Loads into blocks that a device still works on: a forward pass under way may write for their former owner."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from cases import PROMPT, Start, every_runner, warmed
from harness import Engine
from test_pd_device import Device

import vllm_plugin.kv_memory


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(vllm_plugin.kv_memory, "recorder", lambda where: device.record)
    yield device
    device.done.set()


def load_under_way(engine: Engine, device: Device) -> str:
    """A request whose load was handed to its thread while the device is busy."""
    device.done.clear()
    name = engine.add(PROMPT)
    engine.run(until=engine.workers[0].jobs)
    return name


@every_runner
def test_blocks_are_filled_when_their_former_owner_has_left_the_device(start: Start, device: Device) -> None:
    """For a producer vLLM frees the blocks of a request that ends although its last forward pass may be under way."""
    engine = warmed(start, kv_role="kv_producer")
    before = engine.workers[0].runner.memory.copy()
    name = load_under_way(engine, device)
    time.sleep(0.05)  # for a load that does not wait
    assert (engine.workers[0].runner.memory == before).all()
    device.done.set()
    engine.finish(name, computed=4 + 2)


@every_runner
def test_after_a_fault_of_the_device_what_would_be_loaded_is_recomputed(start: Start, device: Device) -> None:
    engine = warmed(start)
    name = load_under_way(engine, device)
    device.fault = RuntimeError("an illegal memory access")
    device.done.set()
    engine.finish(name, computed=len(PROMPT) + 2)


def test_a_device_that_hangs_costs_a_load_its_deadline_and_no_more(start: Start, device: Device) -> None:
    engine = warmed(start, extra={"load_deadline_s": 0.05})
    name = load_under_way(engine, device)
    engine.run(until=lambda: name in engine.reasons)
    engine.check_answer(name, len(PROMPT) + 2)
