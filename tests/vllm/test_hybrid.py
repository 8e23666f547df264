"""Prefix reuse of models with several KV-cache groups: what is stored, what is a hit, what becomes of lost pages.

vLLM's own scheduler and managers; every slot that a request attends to is checked, in each group (`runner.py`).
"""

from __future__ import annotations

import dataclasses
import mmap
import random
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from cases import Start, every_runner
from harness import Engine
from mixes import chunked, full, window
from runner import WrongKV
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored

from mooncake_connector.kv.keys import page_keys
from vllm_plugin.blocks import KVBlocks
from vllm_plugin.kv_groups import read_geometry

MIXES = {
    "window": [full(), window(20)],
    "window of all but a token of a block": [window(17), full()],
    "windows": [window(40), full(), window(40)],
    "two windows": [full(), window(33), window(70)],
    "chunked": [full(), chunked(80)],
}
_RNG = random.Random(7)
PROMPT = [_RNG.randrange(oracle.VOCAB // 2) for _ in range(100)]
"""Six full pages and 4 tokens more."""
every_mix = pytest.mark.parametrize("mix", MIXES)


def tail(count: int) -> list[int]:
    """Tokens that no prompt has had."""
    return [_RNG.randrange(oracle.VOCAB // 2, oracle.VOCAB) for _ in range(count)]


def warmed(start: Start, mix: str = "window", *prompts: list[int], **settings: Any) -> Engine:
    """An engine over a pool that another one has filled."""
    engine = start(kv_spec=MIXES[mix], **settings)
    engine.check_all(prompts or [PROMPT])
    engine.shut_down()
    return start(kv_spec=MIXES[mix], **settings)


@every_runner
@every_mix
def test_another_instance_goes_on_from_the_end_of_a_prompt(start: Start, mix: str) -> None:
    engine = warmed(start, mix)
    engine.check(PROMPT, 20, computed=4 + 19)
    engine.check([*PROMPT, *tail(30)], 20)


@every_mix
def test_where_vllm_keeps_every_boundary_prompts_go_on_from_each(start: Start, mix: str) -> None:
    engine = warmed(start, mix, retention_tokens=None)
    assert engine.scheduler.reset_prefix_cache()
    for cut in range(47, 82):
        before = cut // 16 * 16
        engine.check([*PROMPT[:cut], *tail(7)], 2, computed=cut - before + 7 + 1)
        assert engine.scheduler.reset_prefix_cache()


@every_mix
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48, 64, 80, 96])
def test_a_prompt_of_any_length_can_be_asked_again(start: Start, mix: str, length: int) -> None:
    """The last token is computed in any case, and attends to its window: a hit of all tokens would have dropped one."""
    engine = warmed(start, mix, PROMPT[:length], prefix_caching=False)
    engine.check(PROMPT[:length], 20, computed=length - (length - 1) // 16 * 16 + 19)


def test_where_prompts_part_the_second_leaves_what_the_third_goes_on_from(start: Start) -> None:
    """The first cannot know where others will part from it, and windows are not stored everywhere."""
    shared = PROMPT[:64]
    engine = warmed(start, "two windows", [*shared, *tail(40)])
    engine.check([*shared, *tail(40)], computed=64 + 40 + 2)
    assert engine.scheduler.reset_prefix_cache()
    engine.check([*shared, *tail(40)], computed=40 + 2)


def test_windows_are_stored_at_the_end_of_prompts_alone(start: Start) -> None:
    engine = start(kv_spec=MIXES["window"])
    engine.ask(PROMPT, 60)
    text = [*PROMPT, *oracle.generate(PROMPT, 60)]
    assert all(engine.pages(text)[:9])
    assert [page for page, there in enumerate(engine.pages(text, group=1)) if there] == [4, 5]


def test_a_hit_adds_to_that_of_vllms_own_cache(start: Start) -> None:
    engine = warmed(start, "windows", retention_tokens=None)
    engine.check(PROMPT[:50], computed=2 + 2)
    engine.check(PROMPT, computed=4 + 2)


@every_mix
def test_a_group_that_has_lost_its_pages_ends_the_hit_of_all(start: Start, mix: str) -> None:
    """A hit that is longer in one group than in another gave garbled text elsewhere (sglang#30321)."""
    for group in range(len(MIXES[mix])):
        engine = warmed(start, mix)
        for view in engine.prefix._views(group):
            assert view.clear() > 0
        rest = len(PROMPT) - 80 if (mix, group) == ("chunked", 1) else len(PROMPT)  # where a chunk begins it has it all
        engine.check(PROMPT, computed=rest + 2)
        engine.shut_down()


def test_the_hit_ends_where_all_groups_agree(start: Start) -> None:
    engine = warmed(start, "windows", PROMPT, PROMPT[:70])
    (view,) = engine.prefix._views(2)
    before = engine.pages(PROMPT, group=2)
    view.clear()
    engine.check(PROMPT[:70], computed=70 + 2)
    assert sum(before) > sum(engine.pages(PROMPT, group=2)) > 0
    assert engine.scheduler.reset_prefix_cache()
    engine.check(PROMPT, computed=36 + 2)


@every_runner
@pytest.mark.parametrize("group", [0, 1, 2])
def test_pages_of_one_group_that_go_while_a_load_runs_have_the_request_computed(
    start: Start, faults, group: int
) -> None:
    """vLLM takes no failed blocks from models with several groups: it raises, in 0.32 and 0.33."""
    engine = warmed(start, "two windows")
    faults.hold_reads()
    name = engine.add(PROMPT, 20)
    engine.run(until=faults.reading.is_set)
    (view,) = engine.prefix._views(group)
    assert view.clear() > 0
    faults.release()
    engine.finish(name, computed=len(PROMPT) + 19)
    engine.check([*PROMPT, *tail(9)], 20)


def test_a_failed_load_fails_the_request_where_that_is_asked_for(start: Start, faults) -> None:
    engine = warmed(start, extra={"transfer_failure": "fail"})
    faults.lose_reads = lambda keys: [False] * (len(keys) - 1) + [True]
    name = engine.add(PROMPT)
    engine.run()
    assert engine.reasons[name] == "error"
    engine.check_at_rest()


@pytest.mark.parametrize("group", [0, 1])
def test_one_wrong_bit_in_a_page_of_any_group_is_a_miss(start: Start, group: int, pool: Path) -> None:
    engine = warmed(start)
    (view,) = engine.prefix._views(group)
    pages: list[bytes] = []
    last = page_keys(PROMPT, 16)[5:]
    getattr(view.own, "_space", view.own).read(last, lambda _, page: pages.append(bytes(page)), nbytes=view.nbytes)
    spoil(pool, pages[0])
    engine.check(PROMPT, 20, computed=len(PROMPT) + 19)


def spoil(pool: Path, page: bytes) -> None:
    """Flip one bit of a page in the pool's file."""
    for arena in pool.rglob("arena"):
        with arena.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
            at = content.find(page)
            if at >= 0:
                content[at + 3] ^= 1
                return
    raise AssertionError("the page is nowhere in the pool")


@pytest.mark.parametrize("group", [0, 1])
def test_wrong_bytes_of_any_group_are_attended_to(start: Start, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all these tests: what is loaded matters, and is looked at."""
    engine = warmed(start)
    target = engine.workers[0].side.memory.groups[group].blocks
    load_page = KVBlocks.load_page

    def load_wrong(blocks: KVBlocks, part: Any, table: Any, first: int, page: Any, skip: int) -> None:
        copied = np.array(page)
        if blocks is target:
            copied[-1] ^= 1
        load_page(blocks, part, table, first, copied, skip)

    monkeypatch.setattr(KVBlocks, "load_page", load_wrong)
    with pytest.raises(WrongKV):
        engine.ask(PROMPT)


def test_the_null_block_is_neither_written_nor_stored(start: Start) -> None:
    engine = warmed(start, "two windows", PROMPT * 3, retention_tokens=None, max_num_batched_tokens=48)
    null = engine.workers[0].memory[:, 0].copy()
    engine.check(PROMPT * 3, 20)
    assert np.array_equal(engine.workers[0].memory[:, 0], null)
    for group in range(3):
        engine.pages(PROMPT * 3, group=group)  # each holds the KV of its key


def test_what_a_window_has_left_behind_before_its_page_was_full_is_not_stored(start: Start) -> None:
    engine = start(kv_spec=MIXES["window"], page_tokens=64, retention_tokens=None, max_num_batched_tokens=40)
    engine.check(PROMPT * 3, 20)
    assert all(engine.pages(PROMPT * 3)) and not all(engine.pages(PROMPT * 3, group=1))


def test_a_page_is_announced_when_all_groups_that_keep_it_have_it(start: Start, faults) -> None:
    engine = start(kv_spec=MIXES["window"], events=True)
    events: list[Any] = []
    engine.scheduler.kv_event_publisher.publish = lambda batch: events.extend(
        event for event in batch.events if getattr(event, "medium", MEDIUM_CPU) == MEDIUM_CPU
    )
    faults.hold_writes()
    engine.answer(PROMPT)
    assert not events
    faults.release()
    engine.run()
    assert [key for event in events for key in event.block_hashes] == page_keys(PROMPT, 16)
    assert {type(event) for event in events} == {BlockStored}
    engine.prefix._views()[0].clear()
    engine.ask(tail(8))
    gone = [key for event in events if isinstance(event, BlockRemoved) for key in event.block_hashes]
    assert sorted(gone) == sorted(page_keys(PROMPT, 16))


def test_a_window_without_room_is_not_announced(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(kv_spec=MIXES["window"], events=True)
    window_blocks = engine.workers[0].side.memory.groups[1]
    monkeypatch.setattr(window_blocks, "blocks", None)
    engine.ask(PROMPT)
    assert not engine.prefix.saves.take_events()


def test_after_weights_changed_no_group_is_read(start: Start) -> None:
    engine = start(kv_spec=MIXES["windows"])
    engine.ask(PROMPT)
    engine.change_weights()
    engine.check(PROMPT, computed=len(PROMPT) + 2)
    assert engine.scheduler.reset_prefix_cache()
    engine.check(PROMPT, computed=4 + 2)


@pytest.mark.parametrize("changes", [{"sliding_window": 20}, {"attention_chunk_size": 32}], ids=str)
def test_with_the_hybrid_manager_off_windows_are_kept_like_everything_else(
    start: Start, changes: dict[str, int]
) -> None:
    """`--disable-hybrid-kv-cache-manager`: one group, of which vLLM says the window and keeps every token."""
    settings: dict[str, Any] = {"kv_spec": dataclasses.replace(full(), **changes), "hybrid_manager_off": True}
    engine = start(**settings)
    engine.check(PROMPT)
    engine.shut_down()
    start(**settings).check([*PROMPT[:50], *tail(5)], 20, computed=2 + 5 + 19)


def test_groups_differ_in_nothing_but_their_group(start: Start) -> None:
    engine = start(kv_spec=MIXES["windows"])
    geometry, namespace = engine.prefix._geometry, engine.prefix.namespace()
    names = [geometry.group_namespace(namespace, position) for position in range(3)]
    assert len({name.digest for name in names}) == 3
    assert {dataclasses.replace(name, group="").digest for name in names} == {namespace.digest}
    assert [group.layers for group in geometry.groups] == [(1,), (0,), (2,)]


def test_both_processes_count_the_groups_alike(start: Start) -> None:
    engine = start(kv_spec=MIXES["windows"])
    worker = engine.workers[0]
    described = read_geometry(worker._config, worker.connector._kv_cache_config)
    assert described.groups == engine.prefix._geometry.groups
