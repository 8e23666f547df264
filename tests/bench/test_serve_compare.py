"""`bench serve --model`, beside other connectors too, where servers fail: each is named, and none is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.peers import serve
from bench.streaming_server import wait_until
from bench.test_serve_bench import write_config
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.serve import compare, engines
from mooncake_connector.cli.bench.serve.engines import ALONE, OURS
from mooncake_connector.cli.bench.serve.report import ServeReport
from mooncake_connector.cli.bench.serve.workload import Workload

pytestmark = pytest.mark.slow  # each starts several processes

FAKE = Path(__file__).parent / "fake_vllm.py"
WORK = Workload(requests=8, prefixes=2, prefix_tokens=64, concurrency=2, rounds=2)
PEERS = ["ExampleConnector", "OffloadingConnector", "FlexKVConnectorV1"]


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The servers that were started, by name; their processes."""
    folder = tmp_path / "pids"
    folder.mkdir()
    monkeypatch.setenv("FAKE_VLLM_PIDS", str(folder))
    monkeypatch.setenv("FAKE_VLLM", "")
    monkeypatch.setattr(compare, "_SETTLE_S", 0)

    def started() -> dict[str, int]:
        return {name: int(pid) for name, _, pid in (path.name.rpartition("-") for path in folder.iterdir())}

    return started


def measure(tmp_path: Path, said: list[str] | None = None) -> ServeReport:
    model = write_config(tmp_path / "model")
    return serve.run(FAKE, model, "auto", WORK, PEERS, tmp_path, 60, (said if said is not None else []).append)


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_every_connector_is_measured_or_told_with_the_reason(tmp_path, started, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "OffloadingConnector=refuses")
    report = measure(tmp_path)
    assert [(row.server, row.requests, row.failed) for row in report.rows] == [
        (name, 16, 0) for name in (ALONE, ALONE, OURS, OURS, "ExampleConnector", "ExampleConnector")
    ]
    assert [row.answers_compared for row in report.rows] == [0, 16, 16, 16, 16, 16]
    assert {item.server: item.reason for item in report.absent} == {
        "FlexKVConnectorV1": f"its module 'flexkv' is not installed in {FAKE}",
        "OffloadingConnector": "RuntimeError: there is no GPU here",
    }
    assert {*started()} == {"alone", "MooncakeKVConnector", "ExampleConnector", "OffloadingConnector"}
    assert not any(map(is_running, started().values()))
    assert {path.name for path in tmp_path.iterdir()} == {"model", "pids"}, "the temporary caches are gone"


def test_a_server_that_dies_keeps_what_it_had_and_is_asked_no_more(tmp_path, started, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "ExampleConnector=dies")
    said: list[str] = []
    report = measure(tmp_path, said)
    rows = [row for row in report.rows if row.server == "ExampleConnector"]
    assert sum(row.failed for row in rows) > 0 and {row.requests for row in rows} == {8}
    reasons = {item.server: item.reason for item in report.absent}
    assert reasons["ExampleConnector"] == "died in round 1: ValueError: block 7 is gone"
    assert any(line.startswith("WARNING: ExampleConnector died") for line in said)
    assert {row.failed for row in report.rows if row.server == OURS} == {0}


def test_a_cache_of_the_engine_that_holds_the_prefixes_is_warned_of(tmp_path, started, monkeypatch):
    said: list[str] = []
    settings = measure(tmp_path, said).settings
    assert settings["engine_cache_share"] == 1
    assert any("room for 100% of the prefixes" in line and "more --prefixes" in line for line in said)


@pytest.mark.parametrize("name", ["alone", "MooncakeKVConnector"])
def test_without_vllm_alone_or_ours_there_is_no_report(tmp_path, started, monkeypatch, name):
    monkeypatch.setenv("FAKE_VLLM", f"{name}=refuses")
    with pytest.raises(BenchError, match="could not be measured: RuntimeError: there is no GPU here"):
        measure(tmp_path)
    assert not any(map(is_running, started().values()))


def test_a_server_that_never_gets_ready_is_given_up(tmp_path, started, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "ExampleConnector=hangs")
    comes_up = engines._comes_up

    def impatient_with_one(engine, absent):
        if engine.name == "ExampleConnector":
            wait_until(lambda: engine.name in started())
            monkeypatch.setattr(engines, "_START_DEADLINE_S", 0.5)
        return comes_up(engine, absent)

    monkeypatch.setattr(engines, "_START_DEADLINE_S", 120.0)
    monkeypatch.setattr(engines, "_comes_up", impatient_with_one)
    reasons = {item.server: item.reason for item in measure(tmp_path).absent}
    assert "did not start within" in reasons["ExampleConnector"]
    assert not is_running(started()["ExampleConnector"])


def _with_default_signals() -> None:
    """Whoever runs these tests may ignore some: a shell's & does, and nohup."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_whoever_ends_the_command_ends_its_servers(tmp_path, started, number):
    if number is signal.SIGKILL and not shutil.which("setpriv"):
        pytest.skip("there is no setpriv on this machine")
    arguments = ["--model", str(write_config(tmp_path / "model")), "--vllm-python", str(FAKE)]
    arguments += ["--requests", "8", "--prefixes", "2", "--prefix-tokens", "64", "--rounds", "100"]
    arguments += ["--folder", str(tmp_path)]
    command = [sys.executable, "-m", "mooncake_connector.cli.main", "bench", "serve", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=_with_default_signals)
    said: list[bytes] = []
    try:
        for line in process.stderr:
            said.append(line)
            if b"round 1" in line:
                break
        else:
            raise AssertionError(f"it ended before its first round:\n{b''.join(said).decode()}")
        os.kill(process.pid, number)
        process.wait(60)
    finally:
        process.kill()
        process.stderr.close()
    assert len(started()) == 2
    wait_until(lambda: not any(map(is_running, started().values())))
    if number is not signal.SIGKILL:
        assert {path.name for path in tmp_path.iterdir()} == {"model", "pids"}


def test_the_report_as_json_has_everything(tmp_path, started):
    found = json.loads(measure(tmp_path).to_json())
    assert {*found} == {"machine", "versions", "settings", "rows", "absent"}
    assert found["settings"]["seed"] == 0 and found["settings"]["engine_cache_blocks"] == 3
