"""Tensor parallelism: every rank stores and loads its own shard, and a hit needs all of them."""

from __future__ import annotations

import oracle
import pytest
from cases import PROMPT, RUNNERS, Start, every_runner, warm_pool

from mooncake_connector.keys import page_keys
from store_client.base import Shard
from vllm_plugin.messages import WorkerReport


@every_runner
@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_load_what_ranks_saved(start: Start, runner: dict[str, bool], tp_size: int) -> None:
    """Two KV heads: at TP=2 a rank holds one, at TP=4 two ranks hold the same one."""
    warm_pool(start, tp_size=tp_size)
    engine = start(**runner, tp_size=tp_size)
    assert engine.ask(PROMPT, 10, name="again") == oracle.generate(PROMPT, 10)
    assert engine.computed("again") == 4 + 9
    engine.check_at_rest()


def test_each_rank_stores_its_heads_and_of_replicas_one_stores(start: Start, faults) -> None:
    engine = start(tp_size=4)
    engine.ask(PROMPT)
    shards = {shard for shard, _ in faults.written}
    assert shards == {Shard(0, 2, 0, 1), Shard(0, 2, 1, 2)}
    assert set(faults.written.values()) == {1}
    assert engine.num_pages() == 2 * 6
    assert faults.calls["contains"] == 2, "a replica looked for pages to store"


def test_a_page_that_one_rank_does_not_have_is_a_miss_for_all(start: Start) -> None:
    engine = start(tp_size=2, prefix_caching=False)
    engine.ask(PROMPT)
    _, second = engine.half._views()
    second.own.remove(page_keys(PROMPT, 16)[3:4])
    assert engine.ask(PROMPT, name="again") == oracle.generate(PROMPT, 3)
    assert engine.computed("again") == len(PROMPT) - 48 + 2
    assert all(engine.pages(PROMPT)), "the missing shard was not stored again"
    reported = [stats.kv_connector_stats for stats in engine.stats if stats.kv_connector_stats]
    assert not any("failures" in figures for figures in reported), "a load was tried that could not succeed"


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]], ids=str)
def test_a_page_that_a_rank_loses_while_loading_is_recomputed_by_all(
    start: Start, faults, runner: dict[str, bool], ranks: list[int]
) -> None:
    warm_pool(start, tp_size=2)
    engine = start(**runner, tp_size=2)
    faults.lose_reads_of = {Shard(0, 2, rank, rank + 1): 2 + rank for rank in ranks}
    assert engine.ask(PROMPT, 10, name="again") == oracle.generate(PROMPT, 10)
    assert engine.computed("again") == len(PROMPT) - 16 * (2 + min(ranks)) + 9
    assert engine.half._stats.data.get("hit_tokens", 0) == 0
    engine.check_at_rest()


@every_runner
def test_ranks_that_end_their_loads_in_different_steps(start: Start, faults, runner: dict[str, bool]) -> None:
    """The first failure report comes steps before the second rank has finished writing its blocks."""
    warm_pool(start, tp_size=2)
    engine = start(**runner, tp_size=2)
    faults.hold_reads()
    name = engine.add(PROMPT, 10)
    engine.run(until=faults.reading.is_set)
    for rank in (1, 0):
        loader = engine.workers[rank].connector._worker._loader
        faults.lose_reads_of = {Shard(0, 2, 1, 2): 3}
        faults.let_through(Shard(0, 2, rank, rank + 1))
        engine.run(until=lambda loader=loader: not loader._pending)
        for _ in range(3):
            engine.step()
    faults.release()
    engine.run()
    assert engine.texts[name] == oracle.generate(PROMPT, 10)
    assert engine.computed(name) == len(PROMPT) - 48 + 9
    engine.check_at_rest()


def test_reports_of_workers_add_up_and_keep_the_worst() -> None:
    """The merged report is what the scheduler unpins by; fewer pages on one rank means fewer pages."""
    one = WorkerReport(saves={1: (1, 5), 2: (1, 3)}, failed_loads={"a"})
    two = WorkerReport(saves={1: (1, 4)}, failed_loads={"b"})
    merged = one.aggregate(two)
    assert merged.saves == {1: (2, 4), 2: (1, 3)}
    assert merged.failed_loads == {"a", "b"}
    assert one.saves[1] == (1, 5), "the inputs are left alone"
