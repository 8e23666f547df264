"""What the pool keeps of requests where `log_requests` is set: the same as the line in the log, and runs of pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cases import PROMPT, Start, every_runner, warm_pool
from typer.testing import CliRunner

from mooncake_connector.cli.main import app
from mooncake_connector.request_record import RequestRecord
from store_client import EmbeddedStore

LOGGED = {"log_requests": True}


def kept(pool: Path) -> dict[str, RequestRecord]:
    """By the request's id."""
    with EmbeddedStore(pool, rebuild=False) as store:
        records = [RequestRecord.decode(told) for told in store.noted_requests()]
    return {record.id: record for record in records if record is not None}


def runs(record: RequestRecord) -> list[tuple[int, int, str]]:
    return [(run.first, run.last, run.cause or run.known) for run in record.runs]


@every_runner
def test_a_miss_and_a_hit(start: Start, pool: Path) -> None:
    engine = start(extra=LOGGED, prefix_caching=False)
    engine.ask(PROMPT, name="first")
    engine.ask(PROMPT, name="second")
    first, second = kept(pool)["first"], kept(pool)["second"]
    assert runs(first) == [(0, 5, "unknown")]
    assert (first.prompt_tokens, first.hit_tokens, first.miss, first.page_tokens) == (100, 0, "never_stored", 16)
    assert first.missed == {"never_stored": 96, "short": 4}
    assert runs(second) == [(0, 5, "stored")]
    assert (second.hit_tokens, second.computed_tokens, second.missed) == (96, 4, {"short": 4})
    assert first.namespace == second.namespace == engine.prefix.namespace().digest.hex()


def test_what_went_is_told_as_it_was_then_and_the_command_says_it(start: Start, pool: Path) -> None:
    warm_pool(start)
    engine = start(extra=LOGGED, prefix_caching=False)
    view = engine.prefix._views()[0]
    tracked = engine.add(PROMPT, 3)
    keys = engine.prefix.track(engine.requests[tracked]).page_keys(6, 16)
    view.own.remove(keys[4:5])
    engine.run()
    assert runs(kept(pool)[tracked]) == [(0, 3, "stored"), (4, 4, "removed"), (5, 5, "stored")]
    said = CliRunner().invoke(app, ["why", "--pool", str(pool), "--request", tracked])
    assert said.exit_code == 0, said.output
    assert "pages 0-3 hit, page 4 removed " in said.stdout and "page 5 stored, but out of reach" in said.stdout
    told = json.loads(CliRunner().invoke(app, ["why", "-p", str(pool), "--request", tracked, "--json"]).stdout)
    assert told[0]["missed"] == {"cleared": 32, "short": 4}


def test_what_the_engine_has_itself_is_no_run(start: Start, pool: Path) -> None:
    engine = start(extra=LOGGED)
    engine.ask(PROMPT)
    engine.ask([*PROMPT, *range(500, 540)], name="longer")
    record = kept(pool)["longer"]
    assert (record.local_tokens, runs(record)) == (96, [(6, 7, "unknown")])


def test_by_default_nothing_is_kept(start: Start, pool: Path) -> None:
    start().ask(PROMPT)
    assert kept(pool) == {}


def test_a_failure_to_look_costs_the_record_alone(
    start: Start, pool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warm_pool(start)
    engine = start(extra=LOGGED)

    def broken(*arguments: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr("store_client.kept.runs_of", broken)
    caplog.set_level("INFO", logger="mooncake_connector")
    engine.ask(PROMPT, 1, name="lost")
    assert engine.computed("lost") == 4
    assert kept(pool) == {}
    assert "look failed" in caplog.text and "request id=lost" in caplog.text
