"""`python -m bench.peers`, which `make bench` runs: what it writes where, how it refuses, and the picture it draws."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from bench.peers import __main__ as peers
from bench.peers import hicache, plot, serve
from bench.peers.report import Comparison, Goal, row
from bench.test_serve_bench import report
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.serve.engines import ALONE, OURS, OWN

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.skipif(not shutil.which("make"), reason="NOT TESTED: needs make")
def test_make_bench_runs_and_lists_each_of_them() -> None:
    def make(*arguments: str) -> str:
        done = subprocess.run(["make", "-n", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    recipes = make(*(f"bench-{name}" for name in peers.BENCHES)).split("\n")
    for name in peers.BENCHES:
        assert any(f"-m bench.peers {name} " in line for line in recipes), name
    assert f"NAME={'|'.join(peers.BENCHES)} " in make("help")


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
        (["hybrid", "--model", "/"], "hybrid needs --vllm-python PATH and --model DIR"),
        (["hybrid", "--vllm-python", sys.executable, "--model", "/"], "has no checkpoint gemma3, gpt-oss"),
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


def test_every_connector_that_needs_a_module_can_be_chosen():
    assert {*serve.NEEDED} <= {*serve.PEERS} and [*OWN] == [ALONE, OURS]


def test_a_picture_needs_matplotlib_before_anything_is_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match=r"pip install matplotlib"):
        plot.check()


def test_a_picture_says_how_much_the_engine_s_cache_holds():
    assert "4 at a time, a cache in the engine for 68% of them" in plot._title(report())


def test_a_picture_is_a_small_png():
    pytest.importorskip("matplotlib")
    content = plot.draw(report())
    assert content.startswith(b"\x89PNG") and len(content) < 100_000


def test_the_report_is_there_also_where_no_picture_can_be(monkeypatch, tmp_path, capsys):
    def broken(report):
        raise BenchError("no room")

    monkeypatch.setattr(serve, "run", lambda *given: report())
    monkeypatch.setattr(plot, "check", lambda: None)
    monkeypatch.setattr(plot, "draw", broken)
    with pytest.raises(SystemExit, match="1"):
        peers.main(["serve", "--model", str(tmp_path), "--plot", str(tmp_path / "x.png")])
    said = capsys.readouterr()
    assert said.err.endswith("error: no room\n") and OURS in said.out
