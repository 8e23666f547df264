"""One line in the log for each request, where it is asked for: whatever becomes of it, and once."""

from __future__ import annotations

import re

import pytest
from cases import PROMPT, Start, begin_load, every_runner, steady_runners, warm_pool
from faults import Arrivals, Faults
from pd import MakePair, prefill_params

from mooncake_connector.kv.keys import page_keys

LOGGED = {"log_requests": True}
KEYS = page_keys(PROMPT, 16)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """The lines of requests, each as its keys and values."""
    said = [record.getMessage() for record in caplog.records]
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in said if line.startswith("request id=")]


def line(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    (only,) = lines(caplog)
    return only


@pytest.fixture(autouse=True)
def _infos(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="mooncake_connector")


@every_runner
def test_a_miss_and_a_hit(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(extra=LOGGED, prefix_caching=False)
    engine.ask(PROMPT, name="first")
    assert line(caplog) | {"lookup_ms": ""} == {
        "id": "first", "prompt_tokens": "100", "local_tokens": "0", "hit_tokens": "0", "fetched_tokens": "0",
        "computed_tokens": "100", "lookup_ms": "", "load_ms": "0.000", "transfer_ms": "0.000", "transport": "-",
        "tier": "-", "miss": "never_stored",
    }  # fmt: skip
    engine.ask(PROMPT, name="second")
    first, second = lines(caplog)
    assert (second["id"], second["hit_tokens"], second["computed_tokens"]) == ("second", "96", "4")
    assert second["miss"] == "short" and float(second["load_ms"]) > 0 < float(second["lookup_ms"])
    assert first.keys() == second.keys()


def test_what_the_engine_has_itself(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(extra=LOGGED)
    engine.ask(PROMPT)
    caplog.clear()
    engine.ask(PROMPT, name="again")
    assert line(caplog)["local_tokens"] == "96" and line(caplog)["computed_tokens"] == "4"


def test_by_default_there_is_none(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start().ask(PROMPT)
    assert lines(caplog) == []


@steady_runners
def test_a_load_that_fails_half_way(start: Start, faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    warm_pool(start)
    engine = start(extra=LOGGED)
    faults.lose_reads = lambda keys: [number >= 2 for number in range(len(keys))]
    engine.ask(PROMPT, 1, name="lost")
    said = line(caplog)
    assert (said["hit_tokens"], said["miss"]) == ("32", "load_failed")
    assert int(said["computed_tokens"]) == engine.computed("lost") == 68


@steady_runners
def test_a_request_that_is_preempted_or_aborted(
    start: Start, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    warm_pool(start)
    engine = start(extra=LOGGED, num_blocks=28)
    engine.abort(begin_load(engine, faults))
    faults.release()
    engine.run()
    assert lines(caplog) == [], "what ends before its turn says nothing"
    names = {engine.add([number] * 100, 60) for number in range(4)}
    engine.run()
    assert any(request.num_preemptions for request in engine.requests.values())
    assert sorted(one["id"] for one in lines(caplog)) == sorted(names)


def test_pages_that_a_tier_brought(start: Start, faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    warm_pool(start)
    engine = start(extra=LOGGED | {"tiers": ["mooncake"], "agent": "external", "lookup_wait_s": 60.0})
    faults.answer = arrivals = Arrivals(KEYS)
    arrivals.land(KEYS[:1])
    engine.add(PROMPT)
    loads = engine.workers[0].prefix._loads
    engine.run(until=lambda: loads.pending and loads.pending[0].pages == 1)
    arrivals.land(KEYS)
    engine.run()
    assert (line(caplog)["tier"], line(caplog)["hit_tokens"]) == ("mooncake", "96")


@steady_runners
def test_what_another_instance_brings(pair: MakePair, caplog: pytest.LogCaptureFixture) -> None:
    both = pair(decode={"tp_size": 2}, pool=False, **LOGGED)
    both.ask(PROMPT)
    both.check_at_rest()
    prefill, decode = sorted(lines(caplog), key=lambda one: int(one["fetched_tokens"]))
    assert (prefill["fetched_tokens"], prefill["computed_tokens"]) == ("0", "100")
    assert prefill["transport"] in ("cma", "shm", "tcp"), "whoever is fetched from is told how"
    assert float(prefill["transfer_ms"]) > 0
    assert (decode["fetched_tokens"], decode["computed_tokens"], decode["miss"]) == ("100", "0", "elsewhere")
    assert float(decode["transfer_ms"]) > 0


def test_a_request_whose_kv_nobody_fetches(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(extra=LOGGED | {"transfer_lease_s": 1})
    name = engine.add(PROMPT, 1, params=prefill_params())
    engine.run(until=lambda: engine.computed(name) > 0)
    assert lines(caplog) == [], "not until it is over"
    engine.abort(name)
    engine.run()
    assert line(caplog)["transport"] == "-"
