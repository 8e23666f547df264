"""LoRA adapters whose files change: what vLLM holds in memory has the name of what it has loaded, or none.

The engine runs inside this process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.inside import drain, vllm_inside
from e2e.pages import wait_for
from e2e.process import pool_folder
from models import checkpoint
from store_client import EmbeddedStore

pytestmark = pytest.mark.engine

NUM_PAGES, PAGE_TOKENS, RANK = 4, 64, 8
PROMPT = [number % 251 for number in range(NUM_PAGES * PAGE_TOKENS + 10)]


@pytest.fixture(scope="module")
def pool() -> Iterator[Path]:
    with pool_folder() as path:
        yield path


@pytest.fixture(scope="module")
def llm(pool: Path) -> Iterator[Any]:
    settings = {"pool": str(pool), "capacity": "64MiB", "page_tokens": PAGE_TOKENS}
    with vllm_inside(checkpoint("qwen3"), "float32", settings, enable_lora=True, max_lora_rank=RANK) as llm:
        yield llm


def write(folder: Path, seed: int) -> None:
    """An adapter of the attention's first layer."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((checkpoint("qwen3") / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    source = torch.Generator().manual_seed(seed)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {f"{layer}.lora_A.weight": (RANK, hidden), f"{layer}.lora_B.weight": (heads, RANK)}
    save_file(
        {name: torch.randn(shape, generator=source) for name, shape in shapes.items()},
        str(folder / "adapter_model.safetensors"),
    )
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def pages_after(llm: Any, pool: Path, adapter: Any, pages: int) -> int:
    """Pages in the pool after the prompt was asked with an adapter; `pages` are waited for."""
    from vllm import SamplingParams, TokensPrompt

    once = SamplingParams(temperature=0, max_tokens=1)
    llm.generate(TokensPrompt(prompt_token_ids=PROMPT), once, lora_request=adapter, use_tqdm=False)
    drain(llm)
    with EmbeddedStore(pool) as store:
        wait_for(lambda: store.stats().pages >= pages, f"{pages} pages in the pool")
        return store.stats().pages


def test_an_adapter_is_named_by_the_files_that_were_loaded(llm: Any, pool: Path, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    def adapter(**options: Any) -> LoRARequest:
        return LoRARequest("a", 1, str(tmp_path), **options)

    write(tmp_path, 1)
    assert llm.llm_engine.add_lora(adapter())
    write(tmp_path, 2)
    assert pages_after(llm, pool, adapter(), 0) == 0, "in memory are the former weights"
    assert llm.llm_engine.add_lora(adapter(load_inplace=True))
    assert pages_after(llm, pool, adapter(), 0) == 0, "vLLM's own cache has their KV"
    assert llm.reset_prefix_cache()
    assert pages_after(llm, pool, adapter(), NUM_PAGES) == NUM_PAGES
