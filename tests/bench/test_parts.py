"""Parts of the benchmark that must not lie: wrong bytes and lost children are errors, ratios come from their rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.peers import children, index, mooncake_store
from bench.peers import store as compared
from bench.peers import vllm as vllm_rows
from mooncake_connector.cli.bench import store
from mooncake_connector.cli.bench.measure import BenchError, Task, best_seconds
from mooncake_connector.cli.bench.store import Scale, bench_space
from store_client import EmbeddedStore

TINY = Scale(num_pages=4, page_nbytes=1 << 16, prefix_keys=64, rounds=1)


def test_a_run_that_counts_for_nothing_comes_first_and_preparation_before_every_run() -> None:
    calls: list[str] = []
    tasks = {"a": Task(lambda: calls.append("run"), prepare=lambda: calls.append("prepare"))}
    best_seconds(tasks, rounds=2)
    assert calls == ["prepare", "run"] * 3


def test_things_to_compare_take_turns() -> None:
    calls: list[str] = []
    best_seconds({name: Task(lambda name=name: calls.append(name)) for name in "ab"}, rounds=1)  # type: ignore[misc]
    assert calls == ["a", "b", "a", "b"]


def test_wrong_bytes_from_the_store_end_the_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with store.pool_of_another_process(tmp_path, TINY) as pool:
        store.measure_data(pool, TINY)
        monkeypatch.setattr(store, "content", lambda nbytes: np.zeros(nbytes, dtype=np.uint8))
        with pytest.raises(BenchError, match="other bytes"):
            store.measure_data(pool, TINY)


def test_the_pool_is_filled_by_another_process(tmp_path: Path) -> None:
    with store.pool_of_another_process(tmp_path, TINY):
        owners = [path for path in tmp_path.rglob("owners/*") if path.is_file()]
        assert len(owners) >= 2, "this process's own and the writer's"


def test_a_full_index_knows_its_keys_and_no_others(tmp_path: Path) -> None:
    batches = index.filled_pool(tmp_path / "pool", 5000, sample=128)
    with EmbeddedStore(tmp_path / "pool") as store:
        space = bench_space(store)
        assert all(space.lookup(batch).pages == len(batch) for batch in batches)
        assert store.stats().pages == 5000
        assert space.lookup([bytes(32)]).pages == 0


def test_the_peer_of_a_row_is_its_better_setting_between_two_processes() -> None:
    peer = {
        mooncake_store.POOL_OFF: {"get": 2.0, "put": 1.0},
        mooncake_store.POOL_ON: {"get": 1.0, "put": 2.0},
        mooncake_store.OWN: {"get": 0.1, "put": 0.1},
    }
    figures = ("memcpy", "get", "get scattered", "put", "lookup", "prefix lookup", "lmdb lookup", "lmdb prefix lookup")
    scale = Scale(num_pages=1000, page_nbytes=1_000_000)
    rows = compared.store_rows(dict.fromkeys(figures, 0.5), peer, scale)
    assert [row.peer for row in rows] == [1.0, 1.0, None, None, None]
    assert [row.value for row in rows[:3]] == [2.0] * 3
    assert [row.goal for row in rows[:2]] == [">= 0.45 of limit, >= 4 times peer", ">= 0.4 of limit, >= 4 times peer"]


def run_child(program: str, outcome: Path, **env: str) -> dict[str, Any]:
    env = {**children.path(children.SCRIPTS), **env}
    return children.run([sys.executable, "-c", program, str(outcome)], outcome, deadline_s=60, env=env)


def test_a_child_that_fails_leaves_what_it_measured_and_its_reason(tmp_path: Path) -> None:
    program = "import sys; from outcome import *; write_outcome(sys.argv[1], {'put': 1.5}); sys.exit('no more space')"
    found = run_child(program, tmp_path / "outcome")
    assert found["put"] == 1.5
    assert "no more space" in found["error"]


def test_a_child_does_not_inherit_our_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_CONNECTOR_POOL", "/a/pool/of/engines")
    program = "import os, sys; from outcome import *; write_outcome(sys.argv[1], {**os.environ, 'ready': True})"
    found = run_child(program, tmp_path / "outcome", MOONCAKE_CONNECTOR_CAPACITY="1GiB")
    assert "MOONCAKE_CONNECTOR_POOL" not in found and found["MOONCAKE_CONNECTOR_CAPACITY"] == "1GiB"


def test_a_child_that_hangs_is_killed_at_its_deadline(tmp_path: Path) -> None:
    found = children.run(["sh", "-c", "echo $$; exec sleep 600"], tmp_path / "outcome", deadline_s=2)
    assert "not done after" in found["error"]
    pid = int(found["error"].rsplit(" ", 1)[1])
    assert not Path(f"/proc/{pid}").exists()


def test_the_connector_s_part_is_what_it_adds_to_a_hit_in_vllm_s_own_cache() -> None:
    ours = {"connector_s": [0.3, 0.2, 0.9], "local_s": [0.1, 0.2, 0.25]}
    theirs = {"connector_s": [0.4], "local_s": [0.1]}
    part, whole = vllm_rows.ttft_rows(ours, theirs)
    assert part.value == pytest.approx(100) and part.peer == pytest.approx(300) and part.ok is False
    assert whole.value == pytest.approx(300) and whole.peer == pytest.approx(400) and whole.ok is True
    assert whole.limit == pytest.approx(200)


def test_rows_of_a_child_that_failed_are_empty_and_not_reached() -> None:
    rows = [*vllm_rows.ttft_rows({"error": "x"}, {}), vllm_rows.idle_row({"error": "x"})]
    assert all(row.value is None and row.ok is None for row in rows)
