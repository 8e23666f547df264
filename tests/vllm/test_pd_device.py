"""A device that does its work later than it is given it: nothing is said of blocks before their KV is there.

The memory is the processor's; what is shown is when the connector speaks. tests/gpu has real devices.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from cases import every_runner
from pd import PROMPT, MakePair, Pair, every_granularity, last, node_of, run_all, transfers_of
from simulated.waiting import wait_for

import transfer.serving
import vllm_plugin.kv_memory

CHUNKED = {"max_num_batched_tokens": 32}


class Device:
    """Does what is queued on it when the test says so."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.done.set()
        self.fault: Exception | None = None
        self.recorded = 0

    def record(self) -> Callable[[], None]:
        self.recorded += 1
        return self._wait

    def _wait(self) -> None:
        assert self.done.wait(60)
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of the instances, in the order in which they start."""
    made: list[Device] = []

    def recorder(device: Any) -> Callable[[], Callable[[], None]]:
        made.append(Device())
        return made[-1].record

    monkeypatch.setattr(vllm_plugin.kv_memory, "recorder", recorder)
    monkeypatch.setattr(transfer.serving, "_MIN_BATCH_NBYTES", 1)
    yield made
    for device in made:
        device.done.set()


def heard(both: Pair) -> list[list[tuple[int, int]]]:
    """How far the prefill instance's transfers are, when its node has heard all that it was told so far."""
    node_of(both.prefill)._thread.run(asyncio.sleep(0), 10)
    return [list(one.progress) for one in transfers_of(both.prefill)]


def finish(both: Pair, name: str) -> None:
    both.finish(name)


@every_runner
@every_granularity
def test_what_the_device_has_not_computed_is_not_given_away(
    pair: MakePair, granularity: str, devices: list[Device]
) -> None:
    both = pair(CHUNKED, granularity=granularity)
    name = both.add_granted(PROMPT)
    devices[0].done.clear()
    run_all(both.prefill, until=lambda: last(both.prefill) in both.prefill.reasons)
    assert heard(both) == [[]]
    assert transfers_of(both.prefill)[0].finished_s is None
    devices[0].done.set()
    finish(both, name)
    assert both.failures() == {}
    assert both.decode.computed(name) == 1 + 2


@every_runner
def test_what_was_computed_before_a_preemption_is_not_given_away_after_it(
    pair: MakePair, devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair(CHUNKED, granularity="chunk")
    name = both.add_granted(PROMPT)
    node, (device, _) = node_of(both.prefill), devices
    preempted, computed, before, told = node.preempted, node.computed, [], []
    monkeypatch.setattr(node, "preempted", lambda what: (before.append(device.recorded), preempted(what)))
    monkeypatch.setattr(
        node, "computed",
        lambda layer, made, *rest: (told.extend(one.run for _, one in made), computed(layer, made, *rest)),
    )  # fmt: skip
    device.done.clear()
    run_all(both.prefill, until=lambda: both.prefill.computed(last(both.prefill)) >= 32)
    both.prefill.preempt()
    run_all(both.prefill, until=lambda: before)
    after = device.recorded - before[0]
    device.done.set()
    wait_for(lambda: not both.prefill.workers[0].pd._device._thread._work.qsize())
    heard(both)
    assert before[0] > 0
    assert told.count(1) <= after
    finish(both, name)
    assert both.decode.computed(name) == 1 + 2


@every_runner
def test_blocks_are_granted_when_their_former_owner_has_left_the_device(pair: MakePair, devices: list[Device]) -> None:
    both = pair()
    devices[1].done.clear()
    name = both.add(PROMPT, order="concurrent")
    run_all(*both.both, until=lambda: last(both.prefill) in both.prefill.reasons and fetching(both))
    assert not granted(both)
    devices[1].done.set()
    finish(both, name)
    assert both.decode.computed(name) == 1 + 2


def test_a_request_that_ends_before_its_blocks_are_granted_gets_none(
    pair: MakePair, devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair()
    devices[1].done.clear()
    name = both.add(PROMPT, order="concurrent")
    run_all(*both.both, until=lambda: last(both.prefill) in both.prefill.reasons and fetching(both))
    memory, told = node_of(both.decode)._fetching._memory, []
    monkeypatch.setattr(memory, "grant", lambda *what: told.append(what))
    both.decode.abort(name)
    run_all(*both.both, until=lambda: not both.decode.workers[0].pd._transfers)
    devices[1].done.set()
    both.finish()
    assert not told


def test_after_a_fault_of_the_device_transfers_end_at_their_deadline(pair: MakePair, devices: list[Device]) -> None:
    both = pair(transfer_deadline_s=1, transfer_lease_s=1)
    devices[0].fault = RuntimeError("an illegal memory access")
    name = both.add(PROMPT, order="concurrent")
    finish(both, name)
    assert both.decode.computed(name) == len(PROMPT) + 2
    assert both.failures().keys() <= {"fetch_expired", "fetch_failed", "send_expired", "send_failed"}


def granted(both: Pair) -> bool:
    """Whether the decode instance's node was told of blocks."""
    node = node_of(both.decode)
    node._thread.run(asyncio.sleep(0), 10)
    return any(transfer.is_granted for transfer in list(node._fetching.consumer._transfers.values()))


def fetching(both: Pair) -> bool:
    """Whether the decode instance has blocks for what it fetches."""
    wait_for(lambda: both.decode.step() is not None)
    return any(incoming.granted for incoming in both.decode.pd._incoming.values())
