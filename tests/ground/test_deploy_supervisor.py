"""How often a process may die before it is given up, on a clock of the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_connector.deploy import supervisor, watch
from mooncake_connector.deploy.commands import Command
from mooncake_connector.deploy.supervisor import State


class Lives:
    """A supervisor of one instance, whose processes and clock are of the test."""

    def __init__(self, monkeypatch, folder: Path, **more: float) -> None:
        self.now_s, self.alive, self.answers, self.said = 0.0, True, True, list[str]()
        monkeypatch.setattr(supervisor, "time", self)
        monkeypatch.setattr(supervisor.keeper, "become_reaper", lambda: None)
        monkeypatch.setattr(supervisor, "Watch", lambda *_: self)
        monkeypatch.setattr(supervisor.subprocess, "Popen", lambda *_, **__: self.born())
        deadlines = {"start_deadline_s": 900.0, "silence_deadline_s": 300.0, **more}
        command = Command("decode-0", "decode", ("x",), {}, "", ())
        self.supervisor = supervisor.Supervisor(
            [command], engine="vllm", needed={"decode"}, logs=folder, start_at_once=None, say=self.said.append,
            **deadlines,
        )  # fmt: skip
        self.stdin, self.returncode, self.pid = self, 3, 0

    def born(self) -> Lives:
        self.alive = True
        return self

    def monotonic(self) -> float:
        return self.now_s

    def poll(self) -> int | None:
        return None if self.alive else self.returncode

    def send_signal(self, number: int) -> None:
        self.alive = False

    def close(self) -> None:
        pass

    @property
    def latest(self) -> watch.Answer:
        return watch.Answer(self.now_s, 200 if self.answers else 0, None)

    def live(self, for_s: float, *, answering: bool = True) -> bool:
        """One life from its start to its end; whether another one may follow."""
        self.answers = answering
        (process,) = self.supervisor.processes
        while process.state not in (State.STARTING, State.GIVEN_UP):
            self.now_s += 1
            self.supervisor.tick()
        end_s = self.now_s + for_s
        while self.now_s < end_s and process.state is not State.RESTARTING:
            self.now_s += 1
            self.supervisor.tick()
        self.alive = False
        self.supervisor.tick()
        return process.state is State.RESTARTING


@pytest.mark.parametrize("for_s", [1, 210, 500])
def test_what_dies_again_and_again_is_given_up_however_long_it_lives(monkeypatch, tmp_path, for_s):
    lives = Lives(monkeypatch, tmp_path)
    assert [lives.live(for_s) for _ in range(4)] == [True, True, True, False]
    assert "4 times and never was well for 600 s in between" in str(lives.supervisor.failure)


def test_deaths_are_forgotten_once_it_was_well_for_the_whole_window(monkeypatch, tmp_path):
    lives = Lives(monkeypatch, tmp_path)
    assert all(lives.live(for_s) for for_s in (5, 5, 5, 610, 5, 5))
    assert not lives.live(5)


def test_starts_that_hang_are_deaths_as_well(monkeypatch, tmp_path):
    lives = Lives(monkeypatch, tmp_path)
    assert lives.live(700)
    assert [lives.live(5000, answering=False) for _ in range(3)] == [True, True, False]
