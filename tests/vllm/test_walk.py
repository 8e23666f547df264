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
from harness import Engine

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
    monkeypatch.setattr("vllm_plugin.prefix.scheduler._STALL_PAUSE_S", 0.1)  # one slow load ends few others
    rng = random.Random(f"{runner}{settings}")
    engine = start(**runner, **settings, extra={"load_deadline_s": 0.05, "save_deadline_s": 0.25})
    asked: dict[str, tuple[list[int], int]] = {}
    source = prompts(rng)
    interruption = Interruption(monkeypatch)
    faults.lose_reads = lambda keys: [rng.random() < 0.05 for _ in keys]
    while len(asked) < NUM_REQUESTS or engine.scheduler.has_unfinished_requests():
        if len(asked) < NUM_REQUESTS and rng.random() < 0.3:
            prompt, num_tokens = next(source), rng.choice([1, 2, 20, 60])
            asked[engine.add(prompt, num_tokens)] = (prompt, num_tokens)
        if rng.random() < 0.015 and engine.scheduler.requests:
            engine.abort(rng.choice(list(engine.scheduler.requests)))
        change_faults(rng, engine, faults)
        if rng.random() < 0.1:
            (interruption.event.set if rng.random() < 0.7 else interruption.event.clear)()
            monkeypatch.setattr(vllm_plugin.prefix.saver, "_ASIDE_NBYTES", rng.choice([0, 0, 2000, 256 << 20]))
        engine.step()
    interruption.event.set()
    faults.release()
    faults.lose_reads = None
    faults.refuse_writes = False
    asked |= {engine.add(prompt, 60): (prompt, 60) for prompt in CROWD}
    engine.run()
    check_answers(engine, asked)
    engine.check_at_rest()
    assert check_pool(engine, asked) > 0
    assert faults.calls["read"] > 0 and interruption.times > 0
    assert any(one.kv_connector_stats and one.kv_connector_stats.get("overtaken_pages") for one in engine.stats)
    assert any(request.num_preemptions for request in engine.requests.values())


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


def check_answers(engine: Engine, asked: dict[str, tuple[list[int], int]]) -> None:
    aborted = 0
    for name, (prompt, num_tokens) in asked.items():
        expected = oracle.generate(prompt, num_tokens)
        if engine.reasons[name] == "abort":
            aborted += 1
            expected = expected[: len(engine.texts[name])]
        else:
            assert engine.reasons[name] == "length"
        assert engine.texts[name] == expected
    assert 0 < aborted < len(asked)


def check_pool(engine: Engine, asked: dict[str, tuple[list[int], int]]) -> int:
    """Every page is that of some text, with the right bytes in every shard; how many there are."""
    known = set()
    for prompt, num_tokens in asked.values():
        text = [*prompt, *oracle.generate(prompt, num_tokens)]
        size = engine.setup.page_tokens
        for page, present in enumerate(engine.pages(text)):
            if present:
                known.add(tuple(text[: (page + 1) * size]))
    shards = len(engine.prefix._shards)
    assert len(known) * shards <= engine.num_pages()
    if shards == 1:
        assert len(known) == engine.num_pages()
    return len(known)
