"""Threads that wait for a device: each new one has the first device as its current one, whichever the KV is on.

Who waits for another rank's device does not wait for his own, and takes memory there.
"""

from __future__ import annotations

import threading

import pytest
import torch
from cases import PROMPT, Start, warm_pool
from pd import PROMPT as PD_PROMPT
from pd import MakePair

import vllm_plugin.kv_memory
from vllm_plugin.kv_memory import recorder


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """Threads that waited, with their current device; the KV is on the second one."""
    waited: set[tuple[str, int]] = set()
    current = threading.local()

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            self.record = lambda: None

        def query(self) -> bool:
            return getattr(current, "index", 0) == 1

        def synchronize(self) -> None:
            waited.add((threading.current_thread().name, getattr(current, "index", 0)))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: setattr(current, "index", device.index))
    monkeypatch.setattr(vllm_plugin.kv_memory, "recorder", lambda device: recorder(torch.device("cuda", 1)))
    return waited


def test_the_threads_of_the_pool_wait_for_the_device_of_the_kv(start: Start, waited: set[tuple[str, int]]) -> None:
    warm_pool(start)
    start().ask(PROMPT)
    assert waited == {("mooncake-connector-load", 1), ("mooncake-connector-save", 1)}


def test_the_thread_of_transfers_waits_for_the_device_of_the_kv(pair: MakePair, waited: set[tuple[str, int]]) -> None:
    pair().ask(PD_PROMPT)
    assert waited == {("mooncake-connector-device", 1)}
