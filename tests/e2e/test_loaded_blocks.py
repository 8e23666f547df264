"""What a hit puts into the engine's KV blocks is, byte for byte, what the engine had computed itself.

The engine runs inside this process, so that its KV memory can be read and spoilt.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from e2e.inside import drain, scheduler, vllm_inside
from models import checkpoint

pytestmark = pytest.mark.engine

PAGE_TOKENS = 64
NUM_TOKENS = 500
SPOILT = 0x5A


@dataclass
class Inside:
    """An engine in this process, and the block table of each request that it finished."""

    llm: Any
    tables: list[list[int]] = field(default_factory=list)

    @property
    def scheduler(self) -> Any:
        return scheduler(self.llm)

    @property
    def kv_blocks(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker.memory.groups[0].blocks

    def generate(self, tokens: list[int], num_outputs: int = 1) -> Any:
        from vllm import SamplingParams, TokensPrompt

        greedy = SamplingParams(temperature=0, max_tokens=num_outputs, ignore_eos=True)
        output = self.llm.generate(TokensPrompt(prompt_token_ids=tokens), greedy, use_tqdm=False)[0]
        drain(self.llm)
        return output

    def blocks(self, block_ids: list[int]) -> list[bytes]:
        """Raw bytes of some blocks, of every layer."""
        return [tensor[block_ids].numpy().tobytes() for tensor in self.kv_blocks._tensors]

    def spoil(self) -> None:
        for tensor in self.kv_blocks._tensors:
            tensor.fill_(SPOILT)


@pytest.fixture(scope="module", params=["qwen3", "deepseek-mla"])
def inside(request: pytest.FixtureRequest) -> Iterator[Inside]:
    pool = Path(tempfile.mkdtemp(prefix="mooncake-connector-test-", dir="/dev/shm"))
    settings = {"pool": str(pool), "capacity": "64MiB", "page_tokens": PAGE_TOKENS}
    with vllm_inside(checkpoint(request.param), "bfloat16", settings) as llm:
        engine = Inside(llm)
        connector = engine.scheduler.connector
        finished = connector.request_finished_all_groups

        def record(request: Any, block_ids: tuple[list[int], ...]) -> Any:
            engine.tables.append(list(block_ids[0]))
            return finished(request, block_ids)

        connector.request_finished_all_groups = record
        yield engine
    shutil.rmtree(pool, ignore_errors=True)


def test_loaded_blocks_equal_computed_ones(inside: Inside) -> None:
    tokens = [random.Random(7).randrange(3, 250) for _ in range(NUM_TOKENS)]
    block_tokens = inside.kv_blocks.block_tokens
    whole_blocks = NUM_TOKENS // PAGE_TOKENS * PAGE_TOKENS // block_tokens

    cold = inside.generate(tokens)
    computed = inside.blocks(inside.tables[-1][:whole_blocks])
    assert inside.llm.reset_prefix_cache()
    inside.spoil()
    warm = inside.generate(tokens)
    loaded = inside.blocks(inside.tables[-1][:whole_blocks])

    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == NUM_TOKENS // PAGE_TOKENS * PAGE_TOKENS
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert len(set(computed)) == len(computed), "layers hold different bytes, so that a mixed-up layer would show"
    assert loaded == computed


def test_a_spoilt_block_would_show(inside: Inside) -> None:
    """The negative control: the comparison above sees one wrong byte."""
    tokens = [random.Random(8).randrange(3, 250) for _ in range(NUM_TOKENS)]
    inside.generate(tokens)
    table = inside.tables[-1][:2]
    computed = inside.blocks(table)
    inside.kv_blocks._tensors[0][table[1]].flatten()[-1] ^= 1
    assert inside.blocks(table) != computed


def test_a_reset_is_refused_while_a_load_is_under_way_and_not_after(inside: Inside) -> None:
    """By vLLM, before it asks the connector: a request that waits for its KV holds blocks."""
    from vllm import SamplingParams, TokensPrompt

    tokens = [random.Random(9).randrange(3, 250) for _ in range(NUM_TOKENS)]
    inside.generate(tokens)
    assert inside.llm.reset_prefix_cache()
    engine = inside.llm.llm_engine
    engine.add_request("waits", TokensPrompt(prompt_token_ids=tokens), SamplingParams(temperature=0, max_tokens=1))
    engine.step()
    assert not inside.llm.reset_prefix_cache()
    since_s = time.monotonic()
    while engine.has_unfinished_requests():
        engine.step()
    assert inside.llm.reset_prefix_cache()
    print(f"a load of {NUM_TOKENS} tokens and the answer: a reset was refused for {time.monotonic() - since_s:.3f} s")
