"""Random requests of all kinds between two instances with tiny caches: ordinary ones, legs in both orders, aborts.

Every request is answered as the model alone would, and at the end neither side holds or knows anything.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from cases import RUNNERS
from harness import Engine
from pd import MakePair, Pair, decode_params, prefill_params, run_all
from test_walk import check_answers, prompts, texts

import transfer.serving

NUM_REQUESTS = 40
SETTINGS: list[dict[str, Any]] = [
    {"prefill": {"num_blocks": 30}, "decode": {"num_blocks": 26, "prefix_caching": False}, "granularity": "layer"},
    {"prefill": {"num_blocks": 30, "tp_size": 2}, "decode": {"num_blocks": 12, "block_tokens": 48}},
    {"prefill": {"num_blocks": 28, "layout": "LBNHC"}, "decode": {"num_blocks": 30, "pp_size": 2}, "pool": True},
]  # fmt: skip


class Walk:
    """Requests of all kinds, one after the other."""

    def __init__(self, both: Pair, rng: random.Random) -> None:
        self.both, self.rng, self.source = both, rng, prompts(rng)
        self.waiting: dict[str, tuple[list[int], int]] = {}
        """Prefill legs whose answer goes to the decode instance."""
        self.count = 0

    def ask(self) -> None:
        self.count += 1
        prompt, num_tokens = next(self.source), self.rng.choice([1, 2, 20, 60])
        kind = self.rng.choice(["ordinary", "sequential", "sequential", "concurrent", "concurrent", "lost"])
        name, (prefill, decode) = f"n{self.count}", self.both.both
        if kind == "ordinary":
            self.rng.choice([prefill, decode]).add(prompt, num_tokens, name=name)
        elif kind == "sequential":
            prefill.add(prompt, 1, name=name, params=prefill_params())
            self.waiting[name] = (prompt, num_tokens)
        else:
            decode.add(prompt, num_tokens, name=f"{name}d", params=decode_params(prefill, name))
            if kind == "concurrent":
                prefill.add(prompt, self.rng.choice([1, 1, 1, 5]), name=name, params=prefill_params(name))

    def hand_over(self) -> None:
        for name in [name for name in self.waiting if name in self.both.prefill.reasons]:
            prompt, num_tokens = self.waiting.pop(name)
            if self.rng.random() < 0.9:  # otherwise the proxy died
                self.both.decode.add(prompt, num_tokens, name=f"{name}d", params=self.both.prefill.answers[name])

    def abort_one(self, engine: Engine) -> None:
        if engine.scheduler.requests:
            engine.abort(self.rng.choice(list(engine.scheduler.requests)))

    def step(self) -> None:
        for engine in self.both.both:
            dice = self.rng.random()
            if dice < 0.01:
                self.abort_one(engine)
            elif dice < 0.02 and engine.begin_step() is not None:  # between a forward pass and its results
                self.abort_one(engine)
                engine.drain()
            if self.rng.random() < 0.9:
                engine.step()


@pytest.mark.parametrize("settings", SETTINGS, ids=["layer", "tp", "pp-pool"])
@pytest.mark.parametrize("runner", [RUNNERS[0], *RUNNERS[3:]])
def test_random_walk(
    pair: MakePair, runner: dict[str, bool], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer.serving, "_MIN_BATCH_NBYTES", 1)
    rng = random.Random(f"{runner}{settings}")
    sides = {side: runner | {"max_num_batched_tokens": 64} | settings[side] for side in ("prefill", "decode")}
    extra = {key: value for key, value in settings.items() if key not in sides}
    both = pair(**sides, **{"granularity": "chunk"} | extra, transfer_lease_s=1, transfer_deadline_s=1.0)
    walk = Walk(both, rng)
    while (
        walk.count < NUM_REQUESTS or walk.waiting or any(one.scheduler.has_unfinished_requests() for one in both.both)
    ):
        if walk.count < NUM_REQUESTS and rng.random() < 0.2:
            walk.ask()
            if walk.count == NUM_REQUESTS // 2:  # however few steps there are
                for engine in both.both:
                    walk.abort_one(engine)
        walk.step()
        walk.hand_over()
    run_all(*both.both)
    check_answers(*both.both)
    both.check_at_rest()
    for engine in both.both:
        engine.wait_until_forgotten()
    if settings.get("pool"):
        asked = [*texts(both.prefill), *texts(both.decode)]
        assert sum(sum(engine.pages(text)) for engine in both.both for text in asked) > 0
