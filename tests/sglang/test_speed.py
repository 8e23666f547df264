"""The prefill speed that SGLang's scheduler is measured by, and the seconds that hits save at that speed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins

from mooncake_connector.prefill_speed import PrefillSpeed
from sglang_backend import metrics, plugin, speed
from sglang_backend.targets import Target, in_force, misfits


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """And a speed of which nothing is known yet."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr("mooncake_connector.prefill_speed.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    fresh = PrefillSpeed(speed._LEAST_TOKENS)
    for module in (speed, metrics):
        monkeypatch.setattr(module, "prefill_speed", fresh)
    return clock


def step(clock: Any, mode: ForwardMode, lens: list[int] | None, *, launched_s: float, lasts_s: float) -> None:
    """What SGLang does with the result of a step that was launched so many seconds ago, and ends so much later."""
    batch = SimpleNamespace(forward_mode=mode, extend_lens=lens, reqs=lens or [0], launch_ts=clock.now_s - launched_s)
    clock.now_s += lasts_s
    speed._measures(None, None, batch, None)


def test_steps_of_prefill_count_from_their_launch_and_no_others(clock: Any) -> None:
    step(clock, ForwardMode.EXTEND, [600, 400], launched_s=0, lasts_s=2.0)
    step(clock, ForwardMode.DECODE, [1000], launched_s=0, lasts_s=1.0)  # the lengths of the step before
    step(clock, ForwardMode.EXTEND, [8] * 8, launched_s=0, lasts_s=1.0)
    step(clock, ForwardMode.PREBUILT, [1000], launched_s=0, lasts_s=1.0)
    step(clock, ForwardMode.TARGET_VERIFY, None, launched_s=0, lasts_s=1.0)
    assert speed.prefill_speed.tokens_s == pytest.approx(500.0)


def test_a_step_that_was_launched_beside_another_begins_when_that_is_over(clock: Any) -> None:
    step(clock, ForwardMode.EXTEND, [1000], launched_s=0, lasts_s=2.0)
    step(clock, ForwardMode.EXTEND, [1000], launched_s=1.5, lasts_s=2.0)
    assert speed.prefill_speed.tokens_s == pytest.approx(500.0)


def test_seconds_saved_are_hit_tokens_over_the_measured_speed(clock: Any) -> None:
    def saved() -> float:
        return REGISTRY.get_sample_value("mooncake_connector_prefill_seconds_saved_total") or 0.0

    counted, before = metrics.Metrics(enabled=True), saved()
    counted.hit(1000)
    assert saved() == before, "nobody knows the speed yet"
    step(clock, ForwardMode.EXTEND, [1000], launched_s=0, lasts_s=2.0)
    counted.hit(1000)
    metrics.Metrics(enabled=False).hit(1000)
    assert saved() == before + 2.0


def test_a_step_that_cannot_be_measured_costs_nothing(clock: Any) -> None:
    speed._measures(None, None, SimpleNamespace(), None)
    assert speed.prefill_speed.tokens_s is None


def test_the_hook_fits_and_is_in_force() -> None:
    load_plugins()
    assert misfits(speed.TARGETS) == [] and in_force(speed.TARGETS)
    assert hasattr(Scheduler.process_batch_result, "__wrapped__")


def test_another_sglang_is_not_measured_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    placed: list[Any] = []
    monkeypatch.setattr(plugin, "place", placed.append)
    monkeypatch.setattr(speed, "TARGETS", (Target("sglang.srt.managers.scheduler.Scheduler.run_batch_of_old"),))
    plugin._measure_prefill()
    assert placed == [] and "run_batch_of_old" in caplog.text and "prefill_seconds_saved" in caplog.text
