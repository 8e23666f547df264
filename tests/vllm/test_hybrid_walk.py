"""The random walk of test_walk.py over models with several KV-cache groups: windows, chunks, blocks of two sizes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from cases import Interruption, Start
from harness import PATIENCE_S, Engine
from hosts import Host, client
from long_form import LONG
from mixes import chunked, full, state, window
from simulated.waiting import wait_for
from test_walk import CROWD, check_answers, check_pool, crowd_out, prompts, walk
from vllm.v1.kv_cache_interface import KVCacheSpec

import vllm_plugin.prefix.saver
from mooncake_connector.kv.keys import page_keys
from store_client.sharded import ShardView

NUM_REQUESTS = 60
TURNS: list[dict[str, bool]] = [
    {},
    {"v2_runner": True, "async_scheduling": True, "lazy": True},
    {"async_scheduling": True},
    {"v2_runner": True},
]
SETTINGS: dict[str, dict[str, Any]] = {
    "window": {"kv_spec": [full(), window(20)], "num_blocks": 40},
    "window in the middle of a block": {"kv_spec": [window(40), full()], "num_blocks": 48, "retention_tokens": None},
    "two windows, large pages": {
        "kv_spec": [full(), window(33), window(70)], "num_blocks": 80, "page_tokens": 32, "retention_tokens": 64,
    },
    "blocks of two sizes": {"kv_spec": [full(), window(40, 32, 1)], "num_blocks": 44, "layers_a_group": 2},
    "pages smaller than blocks": {"kv_spec": [full(48), window(60, 48)], "num_blocks": 16, "retention_tokens": None},
    "two of full attention": {"kv_spec": [full(), window(24), full(32, 1)], "num_blocks": 64},
    "chunks": {"kv_spec": [full(), chunked(32)], "num_blocks": 40},
    "chunks that begin inside a page": {"kv_spec": [full(), chunked(48)], "num_blocks": 48, "page_tokens": 32},
    "states": {"kv_spec": [full(), state(), state()], "num_blocks": 48, "extra": {"state_budget": 1024}},
    "states at many boundaries, and a window": {
        "kv_spec": [full(), window(24), state()], "num_blocks": 48, "retention_tokens": 32, "page_tokens": 32,
    },
    "a window and states on two ranks": {
        "kv_spec": [full(heads=1), window(40, heads=1), state(heads=1)], "num_blocks": 56, "tp_size": 2,
        "extra": {"state_budget": 1024},
    },
    "stages that each have none of some groups": {
        "kv_spec": [full(), window(24), state()], "num_blocks": 48, "pp_size": 2, "extra": {"state_budget": 1024},
    },
    "two stages of two ranks": {
        "kv_spec": [full(heads=1), window(40, heads=1), state(heads=1)], "num_blocks": 56, "tp_size": 2, "pp_size": 2,
        "layers_a_group": 3, "retention_tokens": 32, "extra": {"state_budget": 1024},
    },
    "chunks on three stages": {"kv_spec": [full(), chunked(32)], "num_blocks": 40, "pp_size": 3, "layers_a_group": 4},
}  # fmt: skip


DRAWN = 60 if LONG else 3


def drawn(seed: int) -> dict[str, Any]:
    """One to three groups beside full attention, in blocks of two sizes where vLLM takes them, with pages of any; every
    fourth on two ranks."""
    rng, ranks = random.Random(seed), 2 if seed % 4 == 3 else 1
    kinds = rng.choices(["window", "chunks", "state", "full"], k=rng.choice([1, 2, 3]))
    block, heads = rng.choice([16, 16, 32, 48]), 2 // ranks
    is_one_size = block != 16 or {"state", "chunks"} & {*kinds} or ranks > 1
    sizes = [(block, heads)] if is_one_size else [(16, 2), (32, 1)]
    specs = [full(block, heads), *(one_of(kind, rng, *rng.choice(sizes)) for kind in kinds)]
    rng.shuffle(specs)
    return {
        "kv_spec": specs,
        "tp_size": ranks,
        "num_blocks": 8 + sum(-(-400 // spec.block_size) for spec in specs),
        "block_tokens": min(spec.block_size for spec in specs),
        "page_tokens": rng.choice([16, 32]),
        "retention_tokens": rng.choice([None, 0, 96]) if {"window", "state"} & {*kinds} else 0,  # or vLLM refuses it
        "extra": {"state_budget": 1024},
    }


def one_of(kind: str, rng: random.Random, block_tokens: int, heads: int) -> KVCacheSpec:
    if kind == "window":
        return window(rng.randrange(2, 100), block_tokens, heads)
    if kind == "chunks":
        return chunked(block_tokens * rng.randrange(1, 5), block_tokens, heads)
    return (state if kind == "state" else full)(block_tokens, heads)


SETTINGS |= {f"drawn {seed}": drawn(seed) for seed in range(DRAWN)}


@pytest.mark.long
@pytest.mark.parametrize(("name", "runner"), list(zip(SETTINGS, itertools.cycle(TURNS), strict=False)))
def test_random_walk(
    start: Start, faults, name: str, runner: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_plugin.prefix.lookups._STALL_PAUSE_S", 0.1)
    rng = random.Random(f"{runner}{name}")
    settings = SETTINGS[name]
    extra = {"load_deadline_s": 0.05, "save_deadline_s": 0.25} | settings.get("extra", {})
    engine = start(**runner | settings | {"max_num_batched_tokens": 96, "extra": extra})
    source = prompts(rng)
    interruption = Interruption(monkeypatch)
    faults.lose_reads = lambda keys: [rng.random() < 0.03 for _ in keys]
    walk(engine, faults, rng, source, interruption, monkeypatch, num_requests=NUM_REQUESTS)
    if not engine.prefix._geometry.zeroes_blocks:  # else what is not copied aside at once is read no more
        crowd_out(engine, interruption, monkeypatch)
        assert interruption.times > 0
    interruption.event.set()
    store_one(engine, monkeypatch)
    check_answers(engine)
    assert check_pool(engine) > 0
    if not faults.calls["read"]:  # in large units few prompts part where another is a hit; a busy machine saves late
        load_one(engine, faults)
    assert faults.calls["read"] > 0


def load_one(engine: Engine, faults) -> None:
    """Whatever was a hit until here: a prompt that the pool has is read, once a pause after a late load is over."""

    def is_read() -> bool:
        assert engine.scheduler.reset_prefix_cache()
        engine.check(CROWD[0], 60)
        return bool(faults.calls["read"])

    wait_for(is_read)


def store_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine was until here: pages and states of one prompt at least are stored, computed anew."""
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    monkeypatch.setattr(vllm_plugin.prefix.saver, "_ASIDE_NBYTES", 256 << 20)
    for worker in engine.workers:
        saver = worker.prefix._saver
        saver._deadline_s, saver._mover._paused_until_s = PATIENCE_S, 0.0
    engine.finish(engine.add(CROWD[0], 60))


@pytest.mark.parametrize("name", ["two windows, large pages", "states at many boundaries, and a window"])
@pytest.mark.parametrize("runner", [TURNS[0], TURNS[1]], ids=["v1", "v2-async-lazy"])
def test_random_walk_with_a_tier(
    host: Host, faults, name: str, runner: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool loses pages of one group or another all the time, which are in the folder behind it, or will be."""
    monkeypatch.setattr("vllm_plugin.prefix.lookups._STALL_PAUSE_S", 0.1)
    monkeypatch.setattr("vllm_plugin.prefix.lookups._NOT_LANDED_PAUSE_S", 0.1)
    monkeypatch.setattr("store_client.jobs._HEARING_S", 0.5)
    rng = random.Random(f"tier {runner}{name}")
    extra = {"load_deadline_s": 0.5, "save_deadline_s": 0.5, "state_budget": 1024}
    engine = host("walk", **runner | SETTINGS[name] | {"max_num_batched_tokens": 96, "extra": extra})
    known: list[list[int]] = []

    def forgotten() -> Iterator[list[int]]:
        for prompt in prompts(rng):
            known.append(prompt)
            for text in rng.sample(known, min(len(known), 3)):
                forget(engine, rng.randrange(len(engine.prefix._geometry.groups)), text)
            yield prompt

    interruption = Interruption(monkeypatch)
    faults.lose_reads = lambda keys: [rng.random() < 0.02 for _ in keys]
    walk(engine, faults, rng, forgotten(), interruption, monkeypatch, num_requests=NUM_REQUESTS // 2)
    interruption.event.set()
    store_one(engine, monkeypatch)
    check_answers(engine)
    assert check_pool(engine) > 0
    engine.shut_down()
    monkeypatch.setattr("store_client.agent.client._KEPT_S", 0.0)
    unhurried = {"extra": {"state_budget": 1024}}
    check_what_comes_back(host("walk", **runner | SETTINGS[name] | unhurried), CROWD[0])


def forget(engine: Engine, group: int, tokens: list[int]) -> None:
    """The pool loses a group's pages of a text; what is behind it keeps them."""
    for view in engine.prefix._views(group):
        view.own.remove(page_keys(tokens, engine.setup.page_tokens))


def check_what_comes_back(engine: Engine, prompt: list[int]) -> None:
    """However busy the machine was until here: what is in the folder alone is a hit."""
    keys = page_keys(prompt, engine.setup.page_tokens)
    engine.check(prompt)
    views = [view for group in range(len(engine.prefix._geometry.groups)) for view in engine.prefix._views(group)]
    wait_for(lambda: all(map(is_written, views, itertools.repeat(keys))))
    for view in views:
        assert view.own.remove(keys) > 0
    wait_for(lambda: not client(engine)._kept)  # what the folder did not have before it was written is asked again
    assert engine.scheduler.reset_prefix_cache()
    engine.check(prompt, computed=len(prompt) % 32 + 2)


def is_written(view: ShardView, keys: list[bytes]) -> bool:
    """Whether the folder has what the pool has of these pages."""
    return all(found or not here for here, found in zip(view.contains(keys), view.seek(keys).found, strict=True))
