"""Latent KV with an indexer beside it (DeepSeek V3.2): what vLLM keeps in one group is stored as two, and read as one.

vLLM's own classes describe the layers and lay out the tensors. Its CPU backend has no sparse attention, so the forward
pass is pretended, and looks at each row of both caches that a token attends to.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import PROMPT, Start, every_runner
from harness import Engine
from mixes import full, sparse
from pd import MakePair, every_granularity, every_order
from runner import WrongKV
from settings import Setup, indexer_names, kv_cache_config, layer_names, vllm_config, worker_kv_cache_config
from test_hybrid import spoil
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole, UniformTypeKVCacheSpecs

import transfer.serving
from mooncake_connector.kv.keys import page_keys
from vllm_plugin.blocks import KVBlocks
from vllm_plugin.geometry import Unsupported
from vllm_plugin.kv_groups import read_geometry


@pytest.fixture(autouse=True)
def _latent(base_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's configuration says what its latents are made of, which the namespace has."""
    hf = base_config.model_config.hf_text_config
    monkeypatch.setattr(hf, "kv_lora_rank", 3, raising=False)
    monkeypatch.setattr(hf, "qk_rope_head_dim", 1, raising=False)


def warmed(start: Start, **settings: Any) -> Engine:
    """An engine over a pool that another one has filled."""
    settings = {"kv_spec": sparse()} | settings
    engine = start(**settings)
    engine.check(PROMPT)
    engine.shut_down()
    return start(**settings)


@every_runner
def test_another_instance_goes_on_from_both(start: Start) -> None:
    engine = warmed(start)
    assert [group.kv_dtype for group in engine.prefix._geometry.groups] == ["float16", "indexer on cpu"]
    for group in (0, 1):
        assert all(engine.pages(PROMPT, group=group))
    engine.check([*PROMPT[:70], *range(200, 230)], 20, computed=6 + 30 + 19)


@pytest.mark.parametrize("changes", [{"tp_size": 2}, {"layout": "BLHNC"}, {"prefix_caching": False}], ids=str)
def test_with_ranks_layouts_and_settings(start: Start, changes: dict[str, Any]) -> None:
    """All TP ranks have the same latents and the same indexer: one of them stores them."""
    warmed(start).shut_down()
    engine = start(kv_spec=sparse(), **changes)
    engine.check(PROMPT, 20, computed=4 + 19)
    assert engine.num_pages() == 2 * 7, "with the 19 tokens of the answer one page more of each"


@pytest.mark.parametrize("group", [0, 1])
def test_one_without_the_other_is_no_hit(start: Start, group: int) -> None:
    """Latents without their indexer's rows gave garbled text elsewhere (sglang#31108)."""
    engine = warmed(start)
    (view,) = engine.prefix._views(group)
    assert view.clear() == 6
    engine.check(PROMPT, 20, computed=len(PROMPT) + 19)


@every_runner
@pytest.mark.parametrize("group", [0, 1])
def test_pages_of_one_that_go_while_a_load_runs_have_the_request_computed(start: Start, faults, group: int) -> None:
    engine = warmed(start)
    faults.hold_reads()
    name = engine.add(PROMPT, 20)
    engine.run(until=faults.reading.is_set)
    (view,) = engine.prefix._views(group)
    assert view.clear() > 0
    faults.release()
    engine.finish(name, computed=len(PROMPT) + 19)


def test_one_wrong_bit_in_an_indexers_page_is_a_miss(start: Start, pool: Path) -> None:
    engine = warmed(start)
    (view,) = engine.prefix._views(1)
    pages: list[bytes] = []
    last = page_keys(PROMPT, 16)[5:]
    getattr(view.own, "_space", view.own).read(last, lambda _, page: pages.append(bytes(page)), nbytes=view.nbytes)
    spoil(pool, pages[0])
    engine.check(PROMPT, 20, computed=len(PROMPT) + 19)


@pytest.mark.parametrize("group", [0, 1])
def test_wrong_bytes_of_either_are_attended_to(start: Start, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what is loaded matters, with a right checksum too."""
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


@pytest.mark.parametrize(("page_tokens", "is_served"), [(64, True), (128, True), (32, False), (16, False)])
def test_pages_are_whole_blocks(
    start: Start, page_tokens: int, is_served: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """In a block an indexer's values come first and all scales behind them: half of it is no tokens'."""
    with caplog.at_level(logging.WARNING):
        engine = start(kv_spec=sparse(64), block_tokens=64, page_tokens=page_tokens)
    assert (engine.prefix is not None) == is_served
    assert ("set page_tokens to a multiple of 64" in caplog.text) != is_served
    engine.check(PROMPT, 20, computed=len(PROMPT) + 19)


@every_order
@every_granularity
def test_decode_goes_on_from_both(
    pair: MakePair, order: str, granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer.serving, "_MIN_BATCH_NBYTES", 1)
    settings = {"kv_spec": sparse(), "max_num_batched_tokens": 48}
    both = pair(prefill=settings, decode=settings, granularity=granularity)
    for length in (2, 16, 35, 84):
        both.ask(PROMPT[:length], 20, order=order, computed=20)
    assert not both.failures()


def test_blocks_of_another_size_are_refused(pair: MakePair, caplog: pytest.LogCaptureFixture) -> None:
    """What a token's rows are depends on the whole of its block."""
    both = pair({"kv_spec": sparse(32), "block_tokens": 32}, {"kv_spec": sparse()}, page_tokens=32, transfer_lease_s=1)
    both.ask(PROMPT, 20, computed=len(PROMPT) + 19)
    assert "compatibility: digest" in caplog.text


def published(packed: bool) -> UniformTypeKVCacheSpecs:
    """As `MLAAttention` and `DeepseekV32IndexerCache` describe themselves with the published model's configuration."""
    rows = {"block_size": 64, "num_kv_heads": 1, "max_tp_shards": 1}
    latent = MLAAttentionSpec(
        **rows, head_size=576, is_index_group_leader=True, state_content_bytes=656 if packed else None,
        dtype=torch.uint8 if packed else torch.bfloat16, cache_dtype_str="fp8_ds_mla" if packed else "auto",
    )  # fmt: skip
    indexer = MLAAttentionSpec(**rows, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER)
    layers = zip(indexer_names(), layer_names(), strict=True)
    return UniformTypeKVCacheSpecs(64, {name: spec for a, b in layers for name, spec in ((a, indexer), (b, latent))})


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize(("packed", "nbytes"), [(False, 1152), (True, 656)])
def test_both_processes_see_the_same_of_the_published_model(
    base_config: VllmConfig, pool: Path, packed: bool, nbytes: int, layout: str
) -> None:
    """Workers have a description a layer, the scheduler the first layer's alone, which is an indexer's."""
    setup = Setup(kv_spec=published(packed), block_tokens=64, layout=layout)
    config = vllm_config(setup, base_config, pool)
    described = kv_cache_config(setup), worker_kv_cache_config(setup, 0)
    said = [read_geometry(config, one) for one in described]
    assert said[0] == said[1]
    assert [(group.k_dim, group.layers) for group in said[0].groups] == [(nbytes, (0, 1)), (132, (0, 1))]
    assert "block_tokens" in said[0].groups[1].identity, "another instance may have blocks of another size"


SPOILT: dict[str, tuple[dict[str, Any], str]] = {
    "one that has another role": ({"cache_role": SparseCacheRole.SPARSE}, "beside an indexer is MLAAttentionSpec"),
    "one that is padded": ({"page_size_padded": 256}, "has 16 bytes a token for blocks of 128"),
    "one with a row for several tokens": ({"tokens_per_state": 4}, "beside an indexer is MLAAttentionSpec"),
    "one with keys and values": ({}, "beside an indexer is FullAttentionSpec"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_layer_that_is_not_understood_leaves_the_model_alone(base_config: VllmConfig, pool: Path, name: str) -> None:
    changes, said = SPOILT[name]
    specs = dict(sparse().kv_cache_specs)
    layer = layer_names()[0] if not changes else indexer_names()[0]
    specs[layer] = full() if not changes else MLAAttentionSpec(**vars(specs[layer]) | changes)
    setup = Setup(kv_spec=UniformTypeKVCacheSpecs(16, specs))
    with pytest.raises(Unsupported, match=said):
        read_geometry(vllm_config(setup, base_config, pool), worker_kv_cache_config(setup, 0))


def test_where_vllm_does_not_tell_of_other_pipeline_ranks_the_model_is_left_alone(
    base_config: VllmConfig, pool: Path
) -> None:
    setup = Setup(kv_spec=sparse(), pp_size=2)
    with pytest.raises(Unsupported, match="the model has an indexer, and vLLM did not say which layers"):
        read_geometry(vllm_config(setup, base_config, pool), kv_cache_config(setup))


@pytest.mark.parametrize(("wrote", "reads"), [(2, 2), (1, 2), (2, 1)])
def test_any_numbers_of_pipeline_ranks_share_both(start: Start, faults, wrote: int, reads: int) -> None:
    engine = start(kv_spec=sparse(), pp_size=wrote)
    engine.check(PROMPT)
    assert all(all(engine.pages(PROMPT, group=group)) for group in (0, 1))
    engine.shut_down()
    num_pages = sum(faults.written.values())
    engine = start(kv_spec=sparse(), pp_size=reads)
    engine.check(PROMPT, 10, computed=4 + 9)
    assert engine.num_pages() == num_pages == 2 * 6 * wrote, "pages that other stages cover were stored again"


@pytest.mark.parametrize("stages", [(2, 2), (1, 2), (2, 1)])
def test_decode_goes_on_from_both_with_any_numbers_of_pipeline_ranks(pair: MakePair, stages: tuple[int, int]) -> None:
    both = pair(*({"kv_spec": sparse(), "pp_size": count} for count in stages), granularity="layer")
    both.ask(PROMPT, 20, computed=1 + 19)
    assert not both.failures()


def test_a_wrong_row_of_the_pretended_indexer_is_noticed(start: Start) -> None:
    engine = start(kv_spec=sparse())
    name = engine.add(PROMPT, 20)
    engine.run(until=lambda: engine.computed(name) == len(PROMPT))
    block = engine.scheduler.kv_cache_manager.get_block_ids(name)[0][-1]
    (indexer,) = (group for group in engine.workers[0].runner._groups if group.is_indexer)
    indexer.memory[0, block] ^= np.uint64(1)
    with pytest.raises(WrongKV):
        engine.run()
