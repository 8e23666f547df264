"""Ranks: each stores and loads its own shard, and a hit needs all of them."""

from __future__ import annotations

import oracle
import pytest
from cases import PROMPT, Start, begin_load, every_runner, steady_runners, warm_pool
from pd import figures

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import page_keys
from vllm_plugin.messages import SaveResult, WorkerReport


def test_each_rank_stores_its_heads_and_of_replicas_one_stores(start: Start, faults) -> None:
    engine = start(tp_size=4)
    engine.ask(PROMPT)
    shards = {shard for shard, _ in faults.written}
    assert shards == {Shard(0, 2, 0, 1), Shard(0, 2, 1, 2)}
    assert set(faults.written.values()) == {1}
    assert engine.num_pages() == 2 * 6
    assert faults.calls["contains"] == 2, "a replica looked for pages to store"


@pytest.mark.parametrize("tp_size", [2, 1])
def test_a_page_that_one_rank_does_not_have_is_a_miss_for_all(start: Start, tp_size: int) -> None:
    writer = start(tp_size=2)
    writer.ask(PROMPT)
    _, second = writer.prefix._views()
    second.own.remove(page_keys(PROMPT, 16)[3:4])
    engine = start(tp_size=tp_size)
    engine.check(PROMPT, computed=len(PROMPT) - 48 + 2)
    assert engine.pages(PROMPT)[3], "what was missing was not stored again"
    assert "failures" not in figures(engine), "a load was tried that could not succeed"


@every_runner
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("tp_size", [2, 1])
def test_a_page_of_which_a_part_is_lost_while_loading_is_recomputed_by_all(
    start: Start, faults, ranks: list[int], tp_size: int
) -> None:
    warm_pool(start, tp_size=2)
    engine = start(tp_size=tp_size)
    faults.lose_reads_of = {Shard(0, 2, rank, rank + 1): 2 + rank for rank in ranks}
    engine.check(PROMPT, 10, computed=len(PROMPT) - 16 * (2 + min(ranks)) + 9)
    assert engine.prefix._stats.data.get("hit_tokens", 0) == 0


@every_runner
def test_ranks_that_end_their_loads_in_different_steps(start: Start, faults) -> None:
    """The first failure report comes steps before the second rank has finished writing its blocks."""
    warm_pool(start, tp_size=2)
    engine = start(tp_size=2)
    name = begin_load(engine, faults, 10)
    for rank in (1, 0):
        loads = engine.workers[rank].connector._worker.prefix._loads
        faults.lose_reads_of = {Shard(0, 2, 1, 2): 3}
        faults.let_through(Shard(0, 2, rank, rank + 1))
        engine.run(until=lambda loads=loads: not loads.pending)
        engine.steps(3)
    faults.release()
    engine.finish(name, computed=len(PROMPT) - 48 + 9)


# Instances of any two TP and PP sizes

SPLITS = [{"tp_size": tp, "pp_size": pp} for tp, pp in [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]]
"""Two layers and two KV heads: at TP=2 a rank holds one, at TP=4 two ranks hold the same one."""
every_writer = pytest.mark.parametrize("wrote", SPLITS, ids="tp{0[tp_size]}pp{0[pp_size]}".format)
every_reader = pytest.mark.parametrize("reads", SPLITS, ids="tp{0[tp_size]}pp{0[pp_size]}".format)


@steady_runners
@every_writer
@every_reader
def test_an_instance_loads_what_one_of_any_split_saved(
    start: Start, faults, wrote: dict[str, int], reads: dict[str, int]
) -> None:
    warm_pool(start, **wrote)
    num_pages = sum(faults.written.values())
    engine = start(**reads)
    engine.check(PROMPT, 10, computed=4 + 9)
    assert engine.num_pages() == num_pages, "pages that others cover were stored again"


@every_writer
@every_reader
@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize("layout", ["LBNHC", "BHLNC"])
def test_pages_of_any_split_go_into_every_layout(
    start: Start, wrote: dict[str, int], reads: dict[str, int], block_tokens: int, layout: str
) -> None:
    """A page of 32 tokens, from blocks of 16 into some of 64, head before or after token; one begins in a local hit."""
    long = [*PROMPT, *range(200, 300)]
    warm_pool(start, long, **wrote, page_tokens=32)
    engine = start(**reads, page_tokens=32, block_tokens=block_tokens, layout=layout)
    assert engine.ask(PROMPT[:90]) == oracle.generate(PROMPT[:90], 3)
    engine.check(long, computed=len(long) % 32 + 2)


def test_a_conversation_goes_on_over_instances_that_are_split_otherwise(start: Start) -> None:
    """A page's chain may come from several instances; what one adds, the next one finds."""
    text = list(PROMPT)
    for turn, (tp_size, pp_size) in enumerate([(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 1)]):
        engine = start(tp_size=tp_size, pp_size=pp_size)
        text += engine.ask(text, 40, name="turn")
        assert text[len(PROMPT) :] == oracle.generate(PROMPT, 40 * (turn + 1))
        known = len(PROMPT) + 40 * turn
        if turn:
            assert engine.computed("turn") <= known % 16 + 16 + 40, "the turns before were not found"
        engine.check_at_rest()
        engine.shut_down()


def test_reports_of_workers_add_up_and_keep_the_worst() -> None:
    """Fewer pages on one rank means fewer pages, and what one could not copy in time is to be saved again by all."""
    one = WorkerReport(saves={1: SaveResult(1, 5), 2: SaveResult(1, 3)}, failed_loads={"a": 32, "both": 64})
    two = WorkerReport(saves={1: SaveResult(1, 4, overtaken=2)}, failed_loads={"b": 0, "both": 16})
    merged = one.aggregate(two)
    assert merged.saves == {1: SaveResult(2, 4, overtaken=2), 2: SaveResult(1, 3)}
    assert merged.failed_loads == {"a": 32, "b": 0, "both": 16}
    assert one.saves[1] == SaveResult(1, 5), "the inputs are left alone"
