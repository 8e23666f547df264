"""Serving beside other connectors: which can be chosen, and the picture of the report."""

from __future__ import annotations

import sys

import pytest

from bench.peers import __main__ as peers
from bench.peers import plot, serve
from bench.test_serve_bench import report
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.serve.engines import ALONE, OURS, OWN


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
