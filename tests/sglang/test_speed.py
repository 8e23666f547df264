"""The prefill speed that SGLang's scheduler is measured by, and the seconds that hits save at that speed."""

from __future__ import annotations

from collections import deque
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
def speed_of(monkeypatch: pytest.MonkeyPatch) -> PrefillSpeed:
    """One of which nothing is known yet."""
    fresh = PrefillSpeed(speed._LEAST_TOKENS)
    for module in (speed, metrics):
        monkeypatch.setattr(module, "prefill_speed", fresh)
    return fresh


class Steps:
    """SGLang's own adding up of its scheduler's steps, at times of a clock that stands still between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        load_plugins()
        self.now_s, self._number = 100.0, 0
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr("sglang.srt.managers.scheduler.time", clock)
        self.scheduler = SimpleNamespace(
            total_prefill_busy_us=0, total_prefill_uncached_tokens=0, decode_moment_totals=[0.0] * 6,
            _prev_step=None, _prev_prefill_end_ts=None, _pause_intervals=deque(), _pause_started_at=None,
        )  # fmt: skip

    def take(self, mode: ForwardMode, tokens: int, reqs: int = 1, *, launched_s: float = 0, lasts_s: float) -> None:
        """One whose result is there after so long, and that was launched so long ago."""
        self._number += 1
        batch = SimpleNamespace(
            forward_mode=mode, reqs=[SimpleNamespace(rid="request")] * reqs, extend_num_tokens=tokens,
            launch_ts=self.now_s - launched_s, forward_iter=self._number, after_idle_gap=False,
        )  # fmt: skip
        self.now_s += lasts_s
        result = SimpleNamespace(get_num_generated_tokens=lambda size: size)
        Scheduler._record_step_counters(self.scheduler, batch, result)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, speed_of: PrefillSpeed) -> Steps:
    return Steps(monkeypatch)


def test_steps_of_prefill_count_from_their_launch_and_no_others(steps: Steps, speed_of: PrefillSpeed) -> None:
    steps.take(ForwardMode.EXTEND, 1000, 2, lasts_s=2.0)
    steps.take(ForwardMode.DECODE, 1000, lasts_s=1.0)
    steps.take(ForwardMode.EXTEND, 64, 8, lasts_s=1.0)
    steps.take(ForwardMode.PREBUILT, 1000, lasts_s=1.0)
    steps.take(ForwardMode.TARGET_VERIFY, 0, lasts_s=1.0)
    assert speed_of.tokens_s == pytest.approx(500.0)


def test_a_step_that_was_launched_beside_another_begins_when_that_is_over(
    steps: Steps, speed_of: PrefillSpeed
) -> None:
    steps.take(ForwardMode.EXTEND, 1000, lasts_s=2.0)
    steps.take(ForwardMode.EXTEND, 1000, launched_s=1.5, lasts_s=2.0)
    assert speed_of.tokens_s == pytest.approx(500.0)


def test_an_engine_that_is_paused_with_a_step_under_way_computes_no_slower(
    steps: Steps, speed_of: PrefillSpeed
) -> None:
    """`pause_generation` in mode `in_place`: the result waits until it continues, maybe for minutes."""
    steps.scheduler._pause_intervals.append((101.0, 161.0))
    steps.take(ForwardMode.EXTEND, 1000, lasts_s=62.0)
    assert speed_of.tokens_s == pytest.approx(500.0)


def test_seconds_saved_are_hit_tokens_over_the_measured_speed(steps: Steps) -> None:
    def saved() -> float:
        return REGISTRY.get_sample_value("mooncake_connector_prefill_seconds_saved_total") or 0.0

    counted, before = metrics.Metrics(enabled=True), saved()
    counted.hit(1000)
    assert saved() == before, "nobody knows the speed yet"
    steps.take(ForwardMode.EXTEND, 1000, lasts_s=2.0)
    counted.hit(1000)
    metrics.Metrics(enabled=False).hit(1000)
    assert saved() == before + 2.0


def test_a_step_that_cannot_be_measured_costs_nothing(speed_of: PrefillSpeed) -> None:
    asked: list[Any] = []
    speed._measures(lambda *args: asked.append(args), SimpleNamespace(), SimpleNamespace(), None)
    assert len(asked) == 1 and speed_of.tokens_s is None


def test_the_hook_fits_and_is_in_force() -> None:
    load_plugins()
    assert misfits(speed.TARGETS) == [] and in_force(speed.TARGETS)
    assert hasattr(Scheduler._record_step_counters, "__wrapped__")


def test_another_sglang_is_not_measured_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    placed: list[Any] = []
    monkeypatch.setattr(plugin, "place", placed.append)
    monkeypatch.setattr(speed, "TARGETS", (Target("sglang.srt.managers.scheduler.Scheduler.run_batch_of_old"),))
    plugin._measure_prefill()
    assert placed == [] and "run_batch_of_old" in caplog.text and "prefill_seconds_saved" in caplog.text
