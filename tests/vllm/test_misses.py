"""Each prompt token that the pool did not bring is counted once, by its reason; hits and misses add up.

Reasons are provoked on vLLM's own scheduler. Those that only people are told of are no engine's (`why`, `doctor`).
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import oracle
import pytest
from cases import PROMPT, Start, begin_load, every_runner, steady_runners, warm_pool, warmed
from faults import Arrivals, Faults, never
from harness import Engine
from mixes import full, window
from pd import MakePair, figures

from mooncake_connector.kv.keys import page_keys
from mooncake_connector.misses import Miss
from store_client.base import Lookup
from store_client.testing import namespace
from vllm_plugin.prefix.account import Account

FULL, TAIL = 96, 4
"""Of PROMPT: tokens in full pages, and what is left."""
OTHER = list(range(200, 300))


def missed(engine: Engine) -> dict[str, float]:
    """Tokens by reason; and that they make up, with the hits, what was queried."""
    counted = figures(engine)
    misses = dict(counted.get("miss_tokens", {}))
    assert sum(misses.values()) + counted.get("hit_tokens", 0) == counted.get("queried_tokens", 0)
    return misses


def asked(engine: Engine, prompt: list[int] = PROMPT, **kwargs: Any) -> dict[str, float]:
    """What a request adds to the misses."""
    before = missed(engine)
    engine.ask(prompt, **kwargs)
    after = missed(engine)
    return {why: tokens - before.get(why, 0) for why, tokens in after.items() if tokens != before.get(why, 0)}


def crowd_out(engine: Engine) -> None:
    """Fill the pool with pages of another model."""
    store = engine.prefix._store.store
    space = store.space(namespace("crowd"), engine.prefix._views()[0].shard)
    keys = [hashlib.sha256(bytes([number])).digest() for number in range(16)]
    fill = lambda number, page: page.fill(number)  # noqa: E731
    space.write(keys, fill, nbytes=1 << 20, parents=[None] * len(keys), deadline_s=60.0)


@every_runner
def test_what_was_never_stored_and_what_is_left_behind_the_last_page(start: Start) -> None:
    engine = start()
    assert asked(engine) == {"never_stored": FULL, "short": TAIL}
    assert figures(engine)["queried_tokens"] == len(PROMPT) and "hit_tokens" not in figures(engine)


@every_runner
def test_a_hit_leaves_the_tail(start: Start) -> None:
    engine = warmed(start)
    assert asked(engine) == {"short": TAIL}
    assert figures(engine)["hit_tokens"] == FULL


def test_pages_that_were_evicted_cleared_or_refused(start: Start, faults: Faults) -> None:
    warm_pool(start)
    engine = start(prefix_caching=False)
    (view,) = engine.prefix._views()
    assert view.clear() == FULL // 16
    assert asked(engine, max_tokens=1) == {"cleared": FULL, "short": TAIL}
    assert "evicted_requests" not in figures(engine)
    crowd_out(engine)
    assert not any(engine.pages(PROMPT))
    assert asked(engine, max_tokens=1) == {"evicted": FULL, "short": TAIL}
    counted = figures(engine)
    assert counted["evicted_requests"] == 1
    assert counted["evicted_reuse_seconds"] >= counted["evicted_unused_seconds"] >= 0


def test_what_the_engine_has_itself_is_not_queried(start: Start) -> None:
    engine = start()
    engine.ask(PROMPT)
    before = figures(engine)["queried_tokens"]
    assert asked(engine, name="again") == {"short": TAIL}
    assert figures(engine)["queried_tokens"] == before + TAIL


def test_a_prompt_shorter_than_a_page(start: Start) -> None:
    assert asked(start(), PROMPT[:15]) == {"short": 15}


def test_hits_and_prompts_below_the_shortest_that_is_loaded(start: Start) -> None:
    warm_pool(start, PROMPT[:32])
    engine = start(extra={"min_hit_tokens": 48})
    assert asked(engine, PROMPT[:40], name="prompt") == {"below_min_hit": 32, "short": 8}
    assert engine.scheduler.reset_prefix_cache()
    assert asked(engine, [*PROMPT[:32], *OTHER[:48]], name="hit") == {"below_min_hit": 32, "never_stored": 48}


def test_a_request_whose_tokens_are_to_be_computed(start: Start) -> None:
    assert asked(warmed(start), prompt_logprobs=1) == {"not_cached": FULL, "short": TAIL}


def test_a_request_whose_tokens_name_nothing(start: Start) -> None:
    assert asked(start(), resumable=False, cache_salt="salt") == {"never_stored": FULL, "short": TAIL}
    engine = start()
    engine.prefix._adapters = None  # asked for by none of these
    name = engine.add(PROMPT)
    engine.prefix._tracked[name].root = None
    engine.run()
    assert missed(engine) == {"not_cached": FULL, "short": TAIL}


def test_a_pool_that_is_not_open(start: Start) -> None:
    engine = start(extra={"capacity": "16TiB"})
    assert asked(engine) == {"unavailable": FULL, "short": TAIL}


def test_a_lookup_that_fails(start: Start, faults: Faults) -> None:
    engine = warmed(start)
    faults.raise_in = {"lookup"}
    assert asked(engine) == {"unavailable": FULL, "short": TAIL}


def test_a_pool_that_is_left_alone_after_it_hung(start: Start, faults: Faults) -> None:
    engine = warmed(start)
    engine.prefix._lookups.loads_failed(stalled=True, not_landed=False)
    assert asked(engine) == {"stalled": FULL, "short": TAIL}


def test_an_answer_that_does_not_come_in_time(start: Start, faults: Faults) -> None:
    engine = warmed(start, extra={"lookup_wait_s": 0.01})
    faults.answer = never
    assert asked(engine) == {"late": FULL, "short": TAIL}
    faults.answer = lambda keys, found: Lookup(min(2, found.pages), pending=True)
    assert engine.scheduler.reset_prefix_cache()
    assert asked(engine, name="partly") == {"late": FULL - 32, "short": TAIL}


@every_runner
@pytest.mark.parametrize("kept", [0, 3])
def test_a_load_that_fails_is_a_hit_as_far_as_it_came(start: Start, faults: Faults, kept: int) -> None:
    engine = warmed(start)
    faults.lose_reads = lambda keys: [number >= kept for number in range(len(keys))]
    expected = {"load_failed": FULL - 16 * kept, "short": TAIL}
    assert asked(engine, max_tokens=1, name="lost") == expected
    assert figures(engine).get("hit_tokens", 0) == 16 * kept
    assert engine.computed("lost") == len(PROMPT) - 16 * kept


@steady_runners
def test_of_what_was_promised_and_not_heard_of_any_more_all_is_late_and_the_next_is_promised(
    start: Start, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store_client.jobs._HEARING_S", 0.0)
    warm_pool(start, PROMPT, OTHER)
    engine = start(extra={"tiers": ["mooncake"], "agent": "external", "lookup_wait_s": 60.0})
    faults.answer = arrivals = Arrivals([*page_keys(PROMPT, 16), *page_keys(OTHER, 16)], deaf=1)
    name = engine.add(PROMPT, 1)
    engine.finish(name)
    assert missed(engine) == {"late": FULL, "short": TAIL} and not arrivals.deaf
    assert figures(engine)["failures"]["load_not_heard"] == 1
    name = engine.add(OTHER, 1)
    loads = engine.workers[0].prefix._loads
    engine.run(until=lambda: loads.pending and loads.pending[0].awaits)
    arrivals.land(page_keys(OTHER, 16))
    engine.finish(name)
    assert figures(engine)["hit_tokens"] == FULL


@steady_runners
@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_was_promised_and_did_not_come_is_late_and_what_failed_beside_it_is_not(
    start: Start, faults: Faults, tp_size: int
) -> None:
    """Both loads end in the same step."""
    warm_pool(start, PROMPT, OTHER, tp_size=tp_size)
    engine = start(tp_size=tp_size, extra={"tiers": ["mooncake"], "agent": "external", "lookup_wait_s": 60.0})
    keys, others = page_keys(PROMPT, 16), page_keys(OTHER, 16)
    faults.answer = arrivals = Arrivals(keys)
    arrivals.land([*keys[:2], *others])
    faults.lose_reads = lambda asked: [key in others for key in asked]
    late = engine.add(PROMPT, 1)
    loads = [worker.prefix._loads for worker in engine.workers]
    engine.run(until=lambda: all(one.pending and one.pending[0].awaits for one in loads))
    lost = engine.add(OTHER, 1)
    engine.run(until=lambda: lost in engine.prefix._tracked and engine.prefix._tracked[lost].loading)
    for one in loads:
        one.pending[0].deadline_s = 0.0
    engine.settle()
    engine.finish(late, lost)
    assert missed(engine) == {"late": FULL - 32, "load_failed": FULL, "short": 2 * TAIL}
    assert figures(engine)["hit_tokens"] == 32


def test_an_account_that_fails_costs_no_request_and_no_transfer(
    start: Start, pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_pool(start)

    def broken(*arguments: object, **more: object) -> None:
        raise RuntimeError("injected")

    for name in ("miss", "lose", "enter", "line"):
        monkeypatch.setattr(Account, name, broken)
    engine = start(extra={"log_requests": True})
    engine.check(PROMPT, computed=TAIL + 2)
    both = pair(pool=True, log_requests=True)
    both.ask(OTHER, computed=1 + 2)
    assert not both.failures()


def test_pages_of_which_windows_are_missing(start: Start) -> None:
    warm_pool(start, kv_spec=[full(), window(20)])
    engine = start(kv_spec=[full(), window(20)])
    assert asked(engine, [*PROMPT[:48], *OTHER[:60]]) == {"groups_disagree": 96, "short": 12}


def test_a_request_that_is_aborted_while_it_loads_counts_for_nothing(start: Start, faults: Faults) -> None:
    engine = warmed(start)
    name = begin_load(engine, faults)
    engine.abort(name)
    faults.release()
    engine.run()
    assert missed(engine) == {} and "queried_tokens" not in figures(engine)


@steady_runners
def test_what_another_instance_brings_is_no_miss_of_the_pool(pair: MakePair) -> None:
    both = pair(pool=True)
    both.ask(PROMPT)
    assert missed(both.prefill) == {"never_stored": FULL, "short": TAIL}
    counted = missed(both.decode)
    assert set(counted) <= {"elsewhere", "short"}
    fetched = figures(both.decode)["fetched_tokens"]
    assert counted["elsewhere"] == fetched and figures(both.decode)["queried_tokens"] == len(PROMPT)


def test_tokens_of_several_ranks_count_once(pair: MakePair) -> None:
    both = pair({"tp_size": 2}, {"tp_size": 2})
    both.ask(PROMPT)
    counted = figures(both.decode)
    assert (counted["fetched_tokens"], counted["fetches"]) == (len(PROMPT), 2)


def test_without_prefix_reuse_nothing_is_queried(start: Start) -> None:
    engine = start(extra={"prefix_reuse": False})
    assert asked(engine) == {} and "queried_tokens" not in figures(engine)


@every_runner
@pytest.mark.parametrize("lossy", [False, True], ids=["", "lossy"])
def test_every_token_of_every_prompt_is_in_one_place(
    start: Start, faults: Faults, runner: dict[str, bool], lossy: bool
) -> None:
    """Whatever is asked, in any order, with requests that are preempted, and pages that are lost."""
    rng = random.Random(f"misses{runner}{lossy}")
    engine = start(**runner, num_blocks=24, max_num_batched_tokens=48, extra={"min_hit_tokens": 32})
    if lossy:
        faults.lose_reads = lambda keys: [rng.random() < 0.1 for _ in keys]
    texts = [[rng.randrange(oracle.VOCAB) for _ in range(150)] for _ in range(3)]
    for number in range(30):
        known = rng.choice(texts)[: rng.randrange(1, 150)]
        engine.add([*known, *(rng.randrange(oracle.VOCAB) for _ in range(20))], rng.choice([1, 30]))
        if number % 5 == 4:
            engine.run()
            engine.scheduler.reset_prefix_cache()
    misses, counted = missed(engine), figures(engine)
    assert {"never_stored", "short"} <= set(misses) <= {miss.value for miss in Miss}
    assert counted["hit_tokens"] > 0
    assert len(engine.prefills) == len(engine.requests)
    if not lossy:  # vLLM counts a request anew whose load has failed
        said = engine.prefills.values()
        assert counted["queried_tokens"] == sum(one.num_prompt_tokens - one.num_local_cached_tokens for one in said)
        assert counted["hit_tokens"] == sum(one.num_external_cached_tokens for one in said)
