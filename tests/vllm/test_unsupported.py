"""Models and settings that the pool cannot serve: one line says so, and the engine works as without us."""

from __future__ import annotations

import logging
from typing import Any

import oracle
import pytest
import torch
from cases import PROMPT, Start, every_runner, warm_pool, warmed
from settings import layer_names
from vllm.config import PoolerConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{"block_size": 16, "num_kv_heads": 2, "head_size": 2, "dtype": torch.float16} | changes)


SLIDING = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=2, dtype=torch.float16, sliding_window=512)
MAMBA = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float16,))
CASES = {
    "states outside of prefix caching": ([full(), MAMBA], "mamba_cache_mode 'none'"),
    "sliding window alone": (SLIDING, "SlidingWindowSpec"),
    "chunked": (
        ChunkedLocalAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=2, dtype=torch.float16, attention_chunk_size=512
        ),
        "ChunkedLocalAttentionSpec",
    ),
    "packed": (full(state_content_bytes=8), "packed format"),
    "per-token scales": (full(kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD), "INT8_PER_TOKEN_HEAD"),
    "non-causal": (full(non_causal=True), "non-causal"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_connector_stays_inactive_and_says_why_once(
    start: Start, faults, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Traps 4 and 11 do not arise: a model of which one group is not understood is left alone altogether."""
    spec, reason = CASES[name]
    with caplog.at_level(logging.WARNING):
        engine = start(kv_spec=spec, prefix_caching=False)
    said = [r.getMessage() for r in caplog.records if r.name.startswith("mooncake_connector")]
    assert len(said) == 2, "one line a process: scheduler and worker"
    assert all("off" in line and reason in line for line in said)
    assert engine.ask(PROMPT, 20) == oracle.generate(PROMPT, 20)
    engine.abort(engine.add(PROMPT))
    engine.finish()
    assert not faults.calls


@pytest.mark.parametrize(("pooling", "serves"), [("LAST", True), ("MEAN", False), ("CLS", False)])
def test_pooling_that_takes_all_tokens_is_left_alone(
    start: Start, base_config: Any, monkeypatch: pytest.MonkeyPatch, pooling: str, serves: bool
) -> None:
    """With a hit vLLM's pooler would raise ("partial prefill is not supported"), and that ends the engine."""
    pooler = PoolerConfig(seq_pooling_type=pooling)
    monkeypatch.setattr(base_config.model_config, "pooler_config", pooler)
    engine = start(prefix_caching=False)
    assert (engine.prefix is not None) == serves


@every_runner
def test_loads_that_the_worker_alone_cannot_do_fail_at_once(
    start: Start, faults, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers of different shape in one group: the scheduler is shown the first layer's spec only, so it plans loads.

    Cure: `RefusingWorker`. Without it such a request waits for its load for ever.
    """
    warm_pool(start)
    specs = dict(zip(layer_names(), (full(), full(head_size=4)), strict=True))
    caplog.clear()
    engine = start(worker_kv_spec=UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))
    reads = faults.calls["read"]
    for prompt in (PROMPT, PROMPT[:96], list(range(200, 300))):
        assert engine.ask(prompt, 20) == oracle.generate(prompt, 20)
    assert faults.calls["read"] == reads
    engine.abort(engine.add([*PROMPT, 5]))
    engine.finish()
    assert engine.num_pages() == 6, "pages were stored from blocks that are not understood"


def test_kv_tensors_of_another_shape_than_announced_end_every_job_as_failed(
    start: Start, faults, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = warmed(start, prefix_caching=False)
    worker = engine.workers[0].connector._worker
    worker.memory.release()
    worker.register({name: torch.zeros(64, 2, 16, 6, dtype=torch.float16) for name in layer_names()})
    assert not worker.memory.registered
    assert sum("off" in r.getMessage() for r in caplog.records) == 1
    for prompt in (PROMPT, list(range(200, 300))):
        assert engine.ask(prompt, 20) == oracle.generate(prompt, 20)
    engine.check_at_rest()
    assert engine.num_pages() == 6
