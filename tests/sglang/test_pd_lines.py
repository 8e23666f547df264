"""The line of a request that was handed over: one on each side, with what a pool said of the prompt."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from pd_cases import D_PAGES, P_PAGES, fill
from pd_instances import DECODE, PAGE, PREFILL, Decode, Pair, Prefill, running
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams

from mooncake_connector.misses import Miss
from mooncake_connector.request_line import RequestLine
from sglang_backend import told
from sglang_backend.pd import prompts
from sglang_backend.told import Told, Waiting

TOKENS = PAGE * len(P_PAGES)
REQUEST = "asked-by-a-client"


@pytest.fixture(autouse=True)
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    """Of this test alone."""
    fresh = Waiting()
    monkeypatch.setattr(told, "waiting", fresh)
    monkeypatch.setattr("sglang_backend.pd.lines.waiting", fresh)
    return fresh


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Pair]:
    load_plugins()
    caplog.set_level("INFO", logger="mooncake_connector")
    with running(monkeypatch, log_requests="true"):
        made = Pair(2, 1)
        yield made
        made.close()


def sides(pair: Pair, prefix: int = 0, req: Req | None = None) -> tuple[Prefill, Decode]:
    def of(make: Any, *args: Any, **more: Any) -> Any:
        return prompts.telling(lambda queue, req: make(*args, **more), None, req)

    req = req or Req(REQUEST, "", array("q", range(TOKENS)), SamplingParams())
    req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage = 2, 1, 4
    room = pair.room()
    fill(pair)
    prefilled = of(Prefill, pair.prefill, pair.address, room, P_PAGES)
    return prefilled, of(Decode, pair.decode, pair.address, room, D_PAGES, prefix=prefix)


def hand_over(pair: Pair, prefix: int = 0) -> None:
    prefill, decode = sides(pair, prefix)
    prefill.run()
    decode.run(pair.address)
    assert decode.until() == KVPoll.Success
    decode.clear()
    assert prefill.until() == KVPoll.Success
    prefill.clear()


def lines(caplog: pytest.LogCaptureFixture) -> dict[str, dict[str, str]]:
    """By side: a decode instance has fetched tokens."""
    said = [record.getMessage() for record in caplog.records]
    found = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in said if line.startswith("request id=")]
    by_side = {PREFILL.value if line["fetched_tokens"] == "0" else DECODE.value: line for line in found}
    assert len(by_side) == len(found), "one of each side, whatever its ranks"
    return by_side


def counts(line: dict[str, str]) -> list[int]:
    return [int(line[f"{name}_tokens"]) for name in ("prompt", "local", "hit", "fetched", "computed")]


def test_both_sides_have_a_line_in_the_name_of_the_client(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    hand_over(pair, prefix=1)
    said = lines(caplog)
    assert {line["id"] for line in said.values()} == {REQUEST}
    assert counts(said["prefill"]) == [TOKENS, 3, 4, 0, TOKENS - 7]
    assert counts(said["decode"]) == [TOKENS, PAGE, 0, TOKENS - PAGE, 0]
    assert all(float(line["transfer_ms"]) > 0 for line in said.values())
    assert said["prefill"]["transport"] in ("cma", "shm", "tcp") and said["decode"]["transport"] == "-"
    assert said["prefill"]["miss"] == "-" and said["decode"]["miss"] == "elsewhere"


def test_what_the_pool_said_of_the_prompt_is_in_it_and_kept(
    pair: Pair, caplog: pytest.LogCaptureFixture, waiting: Waiting
) -> None:
    kept: list[tuple[RequestLine, Any]] = []
    line = RequestLine(
        id=REQUEST, prompt_tokens=PAGE, local_tokens=0, hit_tokens=PAGE, load_s=0.5, miss=Miss.NEVER_STORED
    )
    waiting.add(Told(line, {Miss.NEVER_STORED: 1}, lambda *said: kept.append(said)))
    assert kept == [] and lines(caplog) == {}, "it waits for the transfer"
    prefill, decode = sides(pair, prefix=2)
    prefill.run()
    decode.run(pair.address)
    assert decode.until() == KVPoll.Success
    decode.clear()
    said = lines(caplog)["decode"]
    assert counts(said) == [TOKENS, PAGE, PAGE, TOKENS - 2 * PAGE, 0] and said["load_ms"] == "500.000"
    ((line, missed),) = kept
    assert (line.fetched_tokens, missed) == (TOKENS - 2 * PAGE, {Miss.ELSEWHERE: TOKENS - 2 * PAGE})
    waiting.add(Told(line, {}, lambda *said: kept.append(said)))
    assert len(kept) == 2, "it came after the transfer, and is said at once"
    assert prefill.until() == KVPoll.Success
    prefill.clear()


def test_what_a_retracted_request_had_generated_is_fetched_and_what_comes_then_is_not(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    req = Req(REQUEST, "", array("q", range(TOKENS - 2)), SamplingParams())
    req.output_ids, req.pd_rebootstrap_in_progress = array("q", [7, 8]), True
    prefill, decode = sides(pair, req=req)
    prefill.run()
    decode.run(pair.address)
    assert decode.until() == KVPoll.Success
    req.output_ids.append(9)  # as SGLang does before it lets go of the receiver
    decode.clear()
    assert counts(lines(caplog)["decode"]) == [TOKENS, 0, 0, TOKENS, 0]
    assert prefill.until() == KVPoll.Success
    prefill.clear()


def test_a_request_that_ends_before_has_none(
    pair: Pair, caplog: pytest.LogCaptureFixture, waiting: Waiting
) -> None:
    waiting.add(Told(RequestLine(id=REQUEST, prompt_tokens=1, local_tokens=0, hit_tokens=0), {}, lambda *said: None))
    prefill, decode = sides(pair)
    decode.run(pair.address)
    prefill.abort()
    assert decode.until() == KVPoll.Failed
    decode.failed()
    decode.clear()
    assert lines(caplog) == {} and waiting.take(REQUEST) is None


def test_by_default_there_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, waiting: Waiting
) -> None:
    load_plugins()
    caplog.set_level("INFO", logger="mooncake_connector")
    with running(monkeypatch):
        made = Pair()
        hand_over(made)
        made.close()
    assert lines(caplog) == {} and not waiting.is_on


def test_of_too_many_that_wait_the_oldest_is_said_by_itself(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, waiting: Waiting
) -> None:
    monkeypatch.setattr(told, "_MOST_WAITING", 2)
    waiting.is_on = True
    said: list[str] = []
    for name in "abac":
        line = RequestLine(id=name, prompt_tokens=1, local_tokens=0, hit_tokens=0)
        waiting.add(Told(line, {}, lambda line, missed: said.append(line.id)))
    assert said == ["a"], "the first when there are three; the former of one name is that of a request begun anew"
