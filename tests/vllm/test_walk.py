"""Random requests, aborts, stalls and lost pages over a tiny KV cache, for both runners and asynchronous scheduling.

No exception, every request answered like the model alone would, no block lost, and every page of the pool right,
although saves go on at any time later, from blocks that are others' by then.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import oracle
import pytest
from cases import RUNNERS, Interruption, Start
from harness import PATIENCE_S, Engine
from pd import figures
from simulated.waiting import wait_for

import vllm_plugin.prefix.saver

NUM_REQUESTS = 120
CROWD = [[number] * 100 for number in range(4)]
"""Prompts that do not fit into any of these caches together, with 60 tokens more each: some are preempted."""
SETTINGS = [
    {"num_blocks": 28, "prefix_caching": False},
    {"num_blocks": 28, "page_tokens": 64, "prefix_caching": True},
    {"num_blocks": 12, "block_tokens": 48, "page_tokens": 32},
    {"num_blocks": 30, "tp_size": 2, "page_tokens": 32, "max_num_batched_tokens": 48},
]


def prompts(rng: random.Random) -> Iterator[list[int]]:
    """Prompts that share beginnings: each goes on from a random point of an earlier one."""
    known: list[list[int]] = [[rng.randrange(oracle.VOCAB) for _ in range(200)] for _ in range(3)]
    while True:
        base = rng.choice(known)
        cut = rng.choice([rng.randrange(1, len(base) + 1), -(-len(base) // 16) * 16])
        prompt = (base[:cut] + [rng.randrange(oracle.VOCAB) for _ in range(rng.choice([0, 1, 15, 16, 40, 90]))])[:230]
        known.append(prompt)
        yield prompt


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())))
@pytest.mark.parametrize("runner", RUNNERS)
def test_random_walk(
    start: Start, faults, runner: dict[str, bool], settings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_plugin.prefix.lookups._STALL_PAUSE_S", 0.1)  # one slow load ends few others
    rng = random.Random(f"{runner}{settings}")
    engine = start(**runner, **settings, extra={"load_deadline_s": 0.05, "save_deadline_s": 0.25})
    source = prompts(rng)
    interruption = Interruption(monkeypatch)
    faults.lose_reads = lambda keys: [rng.random() < 0.05 for _ in keys]
    walk(engine, faults, rng, source, interruption, monkeypatch, num_requests=NUM_REQUESTS)
    crowd_out(engine, interruption, monkeypatch)
    check_answers(engine)
    assert check_pool(engine) > 0
    counted = figures(engine)
    assert sum(counted["miss_tokens"].values()) + counted.get("hit_tokens", 0) == counted["queried_tokens"]
    assert faults.calls["read"] > 0 and interruption.times > 0
    assert any(one.kv_connector_stats and one.kv_connector_stats.get("overtaken_pages") for one in engine.stats)
    assert any(request.num_preemptions for request in engine.requests.values())


def walk(
    engine: Engine, faults, rng: random.Random, source: Iterator[list[int]], interruption: Interruption,
    monkeypatch: pytest.MonkeyPatch, *, num_requests: int,
) -> None:  # fmt: skip
    """Requests that come and are aborted, faults that come and go, and none at the end."""
    while len(engine.requests) < num_requests or engine.scheduler.has_unfinished_requests():
        if len(engine.requests) < num_requests and rng.random() < 0.3:
            engine.add(next(source), rng.choice([1, 2, 20, 60]))
        if rng.random() < 0.015 and engine.scheduler.requests:
            engine.abort(rng.choice(list(engine.scheduler.requests)))
        change_faults(rng, engine, faults)
        if rng.random() < 0.1:
            (interruption.event.set if rng.random() < 0.7 else interruption.event.clear)()
            monkeypatch.setattr(vllm_plugin.prefix.saver, "_ASIDE_NBYTES", rng.choice([0, 0, 2000, 256 << 20]))
        engine.step()
    if "abort" not in engine.reasons.values():  # by chance, nobody was
        name = engine.add(next(source), 60)
        engine.step()
        engine.abort(name)
    faults.release()
    faults.lose_reads = None
    faults.refuse_writes = False


def crowd_out(engine: Engine, interruption: Interruption, monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine was until here: pages are overtaken, one in the middle of its copy, and others saved."""
    monkeypatch.setattr(vllm_plugin.prefix.saver, "_ASIDE_NBYTES", 0)
    for worker in engine.workers:
        saver = worker.prefix._saver
        saver._deadline_s, saver._mover._paused_until_s = PATIENCE_S, 0.0
    interruption.event.clear()
    names = {engine.add(prompt, 60) for prompt in CROWD}
    engine.run(until=lambda: names <= engine.reasons.keys())
    wait_for(lambda: interruption.times)
    interruption.event.set()
    engine.finish(*names)


def change_faults(rng: random.Random, engine: Engine, faults) -> None:
    """Now and then the pool hangs, refuses, or works again; an abort may come between forward and update."""
    dice = rng.random()
    if dice < 0.02:
        faults.hold_reads()
    elif dice < 0.04:
        faults.hold_writes()
    elif dice < 0.05:
        faults.refuse_writes = True
    elif dice < 0.15:
        faults.release()
        faults.refuse_writes = False
    elif dice < 0.17 and engine.begin_step() is not None:
        if rng.random() < 0.5 and engine.scheduler.requests:
            engine.abort(rng.choice(list(engine.scheduler.requests)))
        engine.drain()


def check_answers(*engines: Engine) -> None:
    """Each request of these was answered in full, or aborted after a part of the answer; there are both kinds."""
    reasons = [(engine, name, reason) for engine in engines for name, reason in engine.reasons.items()]
    for engine, name, reason in reasons:
        if reason == "length":
            engine.check_answer(name)
        else:
            request, text = engine.requests[name], engine.texts[name]
            assert reason == "abort" and text == oracle.generate(request.prompt_token_ids, len(text))
    assert len(reasons) == sum(len(engine.requests) for engine in engines)
    assert {reason for *_, reason in reasons} == {"length", "abort"}


def texts(engine: Engine) -> list[list[int]]:
    """Prompts with their whole answers, also where they were aborted."""
    asked = [(request.prompt_token_ids, request.max_tokens) for request in engine.requests.values()]
    return [[*prompt, *oracle.generate(prompt, num_tokens)] for prompt, num_tokens in asked]


def check_pool(engine: Engine) -> int:
    """Every page is that of some text, with the right bytes in every shard; how many there are."""
    size, total, all_shards = engine.setup.page_tokens, 0, 0
    groups = range(len(engine.prefix._geometry.groups))
    for group in groups:
        known = set()
        for text in texts(engine):
            for page, present in enumerate(engine.pages(text, group=group)):
                if present:
                    known.add(tuple(text[: (page + 1) * size]))
        shards = len(engine.prefix._views(group))
        total, all_shards = total + len(known) * shards, all_shards + shards
        assert known, f"nothing of group {group} was stored"
    assert total <= engine.num_pages()
    if all_shards == len(groups):
        assert total == engine.num_pages()
    return total
