"""`python -m bench.peers`, which `make bench` runs: what it writes where, and how it refuses."""

from __future__ import annotations

import json
import sys
import venv
from pathlib import Path

import pytest

from bench.peers import __main__ as peers
from bench.peers import hicache
from bench.peers.report import Comparison, Goal, row


def test_the_report_is_a_json_file_and_a_table_with_the_ratios(monkeypatch, tmp_path, capsys) -> None:
    asked = {}

    def measured(folder, scale, **options):
        asked.update(options)
        return Comparison({}, {}, [row("batch_get", 1.0, "GB/s", limit=2.0, goal=Goal(at_least_of_peer=4))])

    monkeypatch.setattr(hicache, "run", measured)
    command = ["hicache", "--peer", "file", "--peer", "mooncake", "--sglang-python", "/a/python"]
    peers.main([*command, "--json", str(tmp_path / "found")])
    assert json.loads((tmp_path / "found").read_text())["rows"][0]["goal"] == ">= 4 times peer"
    assert asked["peers"] == ["file", "mooncake"] and asked["sglang"] == Path("/a/python")
    table = capsys.readouterr().out
    assert "batch_get" in table and "0.5x" in table and "not measured" in table
    peers.main([*command, "--quick"])
    assert "goal" not in capsys.readouterr().out, "a quick run says nothing of them"


@pytest.mark.parametrize("arguments", [["store", "--peer", "redis"], ["serve", "--peer", "Nixl"], ["nothing"], []])
def test_what_it_does_not_know_is_refused(arguments, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        peers.main(arguments)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["store", "--model", "/"], "--vllm-python PATH and --model DIR"),
        (["store", "--vllm-python", sys.executable, "--model", "/"], "config.json"),
        (["pd", "--model", "/"], "--vllm-python PATH and --model DIR"),
        (["pd"], "pd needs --vllm-python and --model"),
        (["serve"], "serve needs --model"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_measured(arguments, reason, capsys) -> None:
    with pytest.raises(SystemExit, match="1"):
        peers.main(arguments)
    said = capsys.readouterr()
    assert reason in said.err and not said.out


@pytest.fixture(scope="module")
def empty_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    return str(folder / "bin" / "python")


@pytest.mark.parametrize(
    ("name", "option", "needed"),
    [("store", "--vllm-python", "vLLM"), ("hicache", "--sglang-python", "SGLang"), ("pd", "--vllm-python", "vLLM")],
)
def test_a_python_without_the_engine_is_an_error_that_says_what_it_needs(
    empty_python: str, name: str, option: str, needed: str, tmp_path: Path, capsys
) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = [] if name == "hicache" else ["--model", str(tmp_path)]
    with pytest.raises(SystemExit, match="1"):
        peers.main([name, "--quick", "--folder", str(tmp_path), option, empty_python, *model])
    said = capsys.readouterr()
    assert f"it needs {needed} and mooncake-connector" in said.err and not said.out


def test_a_peer_without_its_wheel_is_said_loudly_and_the_rest_goes_on(empty_python, tmp_path: Path, capsys) -> None:
    (tmp_path / "pools").mkdir()
    command = ["store", "--quick", "--folder", str(tmp_path / "pools"), "--json", str(tmp_path / "found")]
    peers.main([*command, "--peer", "mooncake", "--peer-python", empty_python])
    said = capsys.readouterr().err
    assert "WARNING: no Mooncake rows" in said and "pip install" in said
    rows = json.loads((tmp_path / "found").read_text())["rows"]
    assert all(found["peer"] is None and found["goal"] is None for found in rows)
    figures = [found["figure"] for found in rows]
    for beginning in ("one lookup, 20,000 keys in the index over 1,000", "index memory at 20,000 pages"):
        assert any(figure.startswith(beginning) for figure in figures)
    assert len(figures) == len(set(figures)) and all(found["value"] > 0 for found in rows)
    assert not list((tmp_path / "pools").iterdir())
