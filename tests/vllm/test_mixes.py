"""The pretended model itself, with several KV-cache groups: vLLM's own managers let it find what it attends to."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import oracle
import pytest
from harness import Engine
from mixes import MIXES
from runner import WrongKV

Start = Callable[..., Engine]
every_mix = pytest.mark.parametrize("mix", MIXES)


@every_mix
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_texts_are_the_models(start: Start, mix: str, prefix_caching: bool) -> None:
    engine = start(kv_spec=MIXES[mix], prefix_caching=prefix_caching, max_num_batched_tokens=32, num_blocks=40)
    rng = random.Random(mix)
    prompts = [[rng.randrange(oracle.VOCAB) for _ in range(count)] for count in (5, 40, 84, 100, 160)]
    for _ in range(2):
        engine.check_all(prompts, 20)
        prompts = [[*prompt, 1, 2, 3] for prompt in prompts]


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_wrong_slot_of_any_group_is_noticed(start: Start, group: int) -> None:
    engine = start(kv_spec=MIXES["all"], max_num_batched_tokens=32)
    name = engine.add(list(range(84)), 20)
    engine.run(until=lambda: engine.computed(name) == 84)
    block = engine.scheduler.kv_cache_manager.get_block_ids(name)[group][-1]
    engine.workers[0].memory[0, block] ^= np.uint64(1)
    with pytest.raises(WrongKV):
        engine.run()
