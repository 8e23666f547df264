"""What a prefill instance waits for before KV on a device may be read; a stand-in for the device's events."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from pd_cases import P_PAGES, Case, fill
from pd_instances import PAGE, Pair, Prefill
from sglang.srt.disaggregation.base.conn import KVPoll
from simulated.waiting import wait_for

from sglang_backend.pd import manager as manager_module


class Event:
    """Reached when `reached` is set."""

    def __init__(self, reached: bool, **options: Any) -> None:
        self.reached, self.recorded, self.waited = threading.Event(), 0, 0
        if reached:
            self.reached.set()

    def record(self) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        self.waited += 1
        assert self.reached.wait(120)


@pytest.fixture
def marks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What the prefill instance recorded on its stream; as if its KV were on a device with a step under way."""
    made: list[Event] = []

    def event(**options: Any) -> Event:
        made.append(Event(True, **options))
        return made[-1]

    def whole_device(device: torch.device) -> None:
        raise AssertionError("waits for the step under way as well")

    (manager,) = pair.prefill.managers
    monkeypatch.setattr(manager, "device", device := torch.device("cuda", 0))
    monkeypatch.setattr(manager.order, "_record", partial(manager_module._record, device))
    for name, stand_in in (("Event", event), ("set_device", lambda device: None), ("synchronize", whole_device)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return made


def test_a_chunk_is_sent_without_a_wait_for_the_step_under_way(pair, marks) -> None:
    case = Case(pair)
    assert case.end() == (KVPoll.Success, KVPoll.Success)
    assert [(mark.recorded, mark.waited) for mark in marks] == [(1, 1), (1, 1)]


def test_a_prefix_that_a_step_may_still_write_waits_for_its_event(pair, marks) -> None:
    fill(pair)
    prefill = Prefill(pair.prefill, pair.address, pair.room(), P_PAGES)
    prefill.admit()
    (sender,) = prefill.parties
    told: list[int] = []
    sent = sender._sent
    sender._sent = lambda computed, is_last: (told.append(computed.stop_token), sent(computed, is_last=is_last))
    sender._early_send_wait_event = early = Event(False)
    prefill.compute(1)
    assert sender._early_send_wait_event is None, "it is of this chunk alone"
    prefill.compute()
    wait_for(lambda: early.waited)
    assert not told
    early.reached.set()
    wait_for(lambda: len(told) == 2)
    assert told == [PAGE, len(P_PAGES) * PAGE]
    prefill.abort()


def test_a_stage_of_a_pipeline_waits_for_all_that_its_device_has(pair, marks, monkeypatch) -> None:
    """There SGLang sends chunks that are still being computed."""
    (manager,) = pair.prefill.managers
    monkeypatch.setattr(manager, "pp_size", 2)
    assert manager.until_computed(None) is None and not marks
