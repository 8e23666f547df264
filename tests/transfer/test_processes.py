"""Prefill instances in processes of their own, which are killed or stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from simulated.nodes import endings
from simulated.waiting import wait_for

from transfer.protocol.incoming import Where
from transfer.protocol.orders import Ending, Timing
from transfer.session import NodeOptions

TESTS = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


class PrefillProcess:
    """A prefill instance that can be killed and stopped."""

    def __init__(self, port: int = 0, lease_s: float = 30.0, step_s: float = 0.05) -> None:
        command = [sys.executable, "-m", "simulated.prefill_process", str(port), str(lease_s), str(step_s)]
        self._process = subprocess.Popen(
            command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        port_text, engine_id = self.line().split()
        self.where = Where("127.0.0.1", int(port_text), engine_id)

    def compute(self, name: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def processes():
    started = []

    def start(**kwargs) -> PrefillProcess:
        started.append(PrefillProcess(**kwargs))
        return started[-1]

    yield start
    for process in started:
        process.end()


def test_a_producer_that_is_killed_fails_its_transfers_at_once_and_serves_again_on_its_port(make, processes):
    _, decode = make
    d = decode()
    first = processes(step_s=0.5)
    d.fetch("t", first.where, computed=False)
    first.compute("t")
    wait_for(d.ranks[0].bytes.any)
    first.end()
    (ended,) = d.fetched()
    assert ended.ending is Ending.FAILED and "gone" in ended.cause  # and not at the lease
    second = processes(port=first.where.port)
    second.compute("u")
    d.fetch("u", second.where, computed=False)
    assert endings(d.fetched()) == {Ending.DONE}
    d.check()
    d.announce("t", first.where, computed=True)  # a late request of the earlier life
    assert endings(d.fetched()) == {Ending.FAILED}


def test_a_producer_that_is_stopped_is_given_up_and_writes_nothing_when_it_wakes(make, processes):
    _, decode = make
    timing = Timing(lease_s=6.0, heartbeat_s=0.3, retry_s=0.2)
    d = decode(options=NodeOptions(page_tokens=16, timing=timing))
    p = processes(lease_s=60.0, step_s=0.2)
    d.fetch("t", p.where, computed=False)
    p.compute("t")
    wait_for(d.ranks[0].bytes.any)
    p.signal(signal.SIGSTOP)
    (ended,) = d.fetched()
    assert ended.ending is Ending.FAILED and "said nothing" in ended.cause
    d.ranks[0].bytes[:] = 0
    p.signal(signal.SIGCONT)
    said = {p.line(), p.line()}
    assert said in ({"computed t", "sent t cancelled"}, {"computed t", "sent t failed"})  # a write was under way
    assert not d.ranks[0].bytes.any()
