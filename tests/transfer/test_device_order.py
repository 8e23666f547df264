"""Calls that wait for a device: in their order, none after one that hangs or failed, and no error for who asks."""

from __future__ import annotations

import threading

import pytest

from transfer import device_order
from transfer.device_order import DeviceOrder


def test_calls_wait_in_their_order_for_what_was_queued_before_each():
    told: list[str] = []
    recorded = iter("abc")

    def record():
        name = next(recorded)
        return lambda: told.append(f"waited for {name}")

    order = DeviceOrder(record)
    order.then(lambda: told.append("a"))
    order.then(lambda: told.append("own"), lambda: told.append("waited for its own"))
    order.then(lambda: told.append("b"))
    order.close()
    assert told == ["waited for a", "a", "waited for its own", "own", "waited for b", "b"]


def test_where_there_is_no_device_a_call_is_made_at_once():
    told: list[threading.Thread] = []
    DeviceOrder(lambda: None).then(lambda: told.append(threading.current_thread()))
    assert told == [threading.current_thread()]


def test_a_device_that_failed_makes_no_call_and_the_reason_is_logged(caplog: pytest.LogCaptureFixture):
    order, told = DeviceOrder(lambda: lambda: 1 / 0), list[int]()
    order.then(lambda: told.append(1))
    order.close()
    assert not told and "KV in device memory cannot be sent or fetched: ZeroDivisionError" in caplog.text


def test_it_ends_beside_a_device_that_hangs_where_no_further_thread_can_be_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_order, "_STOP_S", 0.05)
    go_on = threading.Event()
    order = DeviceOrder(lambda: lambda: go_on.wait(60))
    order.then(lambda: None)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        order.close()
    assert not go_on.is_set()
    go_on.set()
    order._thread.shutdown()


def test_a_device_that_hangs_keeps_nobody_from_ending_and_later_calls_are_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_order, "_STOP_S", 0.05)
    go_on, told = threading.Event(), list[int]()
    order = DeviceOrder(lambda: lambda: go_on.wait(60))
    order.then(lambda: told.append(1))
    for _ in range(2):
        order.close()
    order.then(lambda: told.append(2))
    assert not told
    go_on.set()
    order._thread.shutdown()
    assert told == [1]
