"""Who holds and who stores what: shards over tensor- and pipeline-parallel ranks, MLA, dtypes, settings that matter."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import PROMPT, Start, warm_pool
from mixes import MIXES
from settings import Setup, kv_cache_config, layer_names, vllm_config
from vllm.config import ModelConfig, ParallelConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from models import checkpoint
from mooncake_connector.config.schema import Config
from mooncake_connector.kv.identity.shape import read_shape
from vllm_plugin.geometry import Group, Unsupported
from vllm_plugin.kv_groups import read_geometry
from vllm_plugin.kv_memory import KVMemory

MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=4, dtype=torch.float16)


def geometry(num_kv_heads: int, tp_size: int, pp_size: int = 1, num_layers: int = 12) -> Group:
    return Group(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        k_dim=8,
        v_dim=8,
        itemsize=2,
        kv_dtype="bfloat16",
        is_mla=False,
        block_tokens=16,
        layer_names=(),
        tp_size=tp_size,
        pp_size=pp_size,
    )


@pytest.mark.parametrize(("num_kv_heads", "tp_size"), [(1, 1), (8, 1), (8, 4), (8, 8), (2, 8), (1, 4), (4, 8)])
@pytest.mark.parametrize(("pp_size", "num_layers"), [(1, 12), (3, 12), (2, 13)])
def test_shards_cover_every_head_and_layer_once_and_each_has_one_writer(
    num_kv_heads: int, tp_size: int, pp_size: int, num_layers: int
) -> None:
    found = geometry(num_kv_heads, tp_size, pp_size, num_layers)
    cells = Counter(
        (layer, head)
        for shard in found.shards()
        for layer in range(shard.layer_start, shard.layer_stop)
        for head in range(shard.head_start, shard.head_stop)
    )
    assert cells == Counter((layer, head) for layer in range(num_layers) for head in range(num_kv_heads))
    writers = Counter(found.shard(pp, tp) for pp in range(pp_size) for tp in range(tp_size) if found.is_writer(tp))
    assert writers == Counter(found.shards())


def test_a_page_of_all_shards_together_is_as_large_as_one_of_a_single_rank() -> None:
    whole, split = geometry(8, 1), geometry(8, 4, 3)
    (only,) = whole.shards()
    sizes = [split.page_format(shard, 64).nbytes for shard in split.shards()]
    assert sum(sizes) == whole.page_format(only, 64).nbytes == 12 * 64 * 8 * 16 * 2


@pytest.fixture
def configs(base_config: Any, pool: Path) -> tuple[Any, KVCacheConfig]:
    setup = Setup()
    return vllm_config(setup, base_config, pool), kv_cache_config(setup)


def test_geometry_is_that_of_the_kv_cache(configs: tuple[Any, KVCacheConfig]) -> None:
    found = read_geometry(*configs).groups[0]
    assert (found.num_layers, found.num_kv_heads, found.k_dim, found.v_dim) == (2, 2, 2, 2)
    assert (found.itemsize, found.kv_dtype, found.block_tokens, found.is_mla) == (2, "float16", 16, False)


def test_layers_are_in_the_order_of_their_numbers_and_not_of_their_names(configs: tuple[Any, KVCacheConfig]) -> None:
    config, cache = configs
    names = [f"model.layers.{layer}.attn" for layer in (10, 2, 9, 1)]
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(names, cache.kv_cache_groups[0].kv_cache_spec)])
    (group,) = read_geometry(config, cache).groups
    assert group.layer_names == tuple(f"model.layers.{layer}.attn" for layer in (1, 2, 9, 10))


@pytest.mark.parametrize(
    ("cache_dtype", "dtype", "name", "itemsize"),
    [
        ("auto", torch.bfloat16, "bfloat16", 2),
        ("auto", torch.float32, "float32", 4),
        ("fp8", torch.uint8, "fp8_e4m3", 1),
        ("fp8_e5m2", torch.uint8, "fp8_e5m2", 1),
        ("fp8", torch.bfloat16, "bfloat16", 2),  # of a layer that is left out: `--kv-cache-dtype-skip-layers`
    ],
)
def test_the_kv_dtype_has_one_name(
    configs: tuple[Any, KVCacheConfig], cache_dtype: str, dtype: torch.dtype, name: str, itemsize: int
) -> None:
    config, _ = configs
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.cache_dtype = cache_dtype
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=2, dtype=dtype)
    found = read_geometry(config, KVCacheConfig(4, [], [KVCacheGroupSpec(["model.layers.0.attn"], spec)])).groups[0]
    assert (found.kv_dtype, found.itemsize) == (name, itemsize)


def test_amds_eight_bits_are_others(configs: tuple[Any, KVCacheConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an MI300: a pool or tier with instances on other GPUs as well would have numbers of half the size."""
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", lambda *_: True)
    test_the_kv_dtype_has_one_name(configs, "fp8", torch.uint8, "fp8_e4m3fnuz", 1)


def test_layers_left_out_of_eight_bits_are_measured_as_they_are(
    configs: tuple[Any, KVCacheConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU packs each type in an order of its own."""
    config, cache = configs
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.cache_dtype = "fp8"
    measured: list[Any] = []
    monkeypatch.setattr("vllm_plugin.kv_memory.probe_cpu_order", lambda fmt, tokens, *of: measured.append(of))
    memory = KVMemory(config, read_geometry(config, cache), Config(page_tokens=16), 64)
    memory.register({name: torch.zeros(64, 2, 16, 4, dtype=torch.float16) for name in layer_names()})
    memory.release()
    assert measured == [("float16", torch.float16, "auto")]


def test_context_parallelism_is_refused(configs: tuple[Any, KVCacheConfig]) -> None:
    config, cache = configs
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(Unsupported, match="context parallelism"):
        read_geometry(config, cache)


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_that_schedule_by_themselves_are_refused(configs: tuple[Any, KVCacheConfig], world_size: int) -> None:
    """Pages arrive at each of them at another time, while vLLM takes it for granted that all schedule alike."""
    config, cache = configs
    config.parallel_config.distributed_executor_backend = "external_launcher"
    config.parallel_config.world_size = world_size
    with pytest.raises(Unsupported, match="external launcher") if world_size > 1 else nullcontext():
        read_geometry(config, cache)


@pytest.fixture
def hybrid(base_config: Any, pool: Path) -> tuple[Any, KVCacheConfig]:
    setup = Setup(kv_spec=MIXES["windows"])
    return vllm_config(setup, base_config, pool), kv_cache_config(setup)


def test_several_groups_are_refused_on_several_pipeline_ranks(hybrid: tuple[Any, KVCacheConfig]) -> None:
    config, cache = hybrid
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(Unsupported, match=r"3 KV-cache groups .* pipeline ranks"):
        read_geometry(config, cache)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_mla_is_one_head_that_every_rank_holds_and_one_stores(
    start: Start, faults, base_config: Any, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    hf = base_config.model_config.hf_text_config
    monkeypatch.setattr(hf, "kv_lora_rank", 2, raising=False)
    monkeypatch.setattr(hf, "qk_rope_head_dim", 2, raising=False)
    warm_pool(start, kv_spec=MLA, tp_size=tp_size)
    assert set(faults.written.values()) == {1}
    engine = start(kv_spec=MLA, tp_size=tp_size)
    engine.check(PROMPT, 20, computed=4 + 19)
    assert all(engine.pages(PROMPT))


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "deepseek-mla"])
def test_a_size_read_from_config_json_is_what_vllm_allocates(name: str) -> None:
    """`mooncake-connector size` reads what vLLM reads."""
    folder = checkpoint(name)
    model, shape = ModelConfig(model=str(folder)), read_shape(folder)
    parallel = ParallelConfig()
    heads = 1 if model.is_deepseek_mla else model.get_num_kv_heads(parallel)
    assert (model.get_num_layers(parallel), heads) == (shape.num_layers, shape.num_kv_heads)
    assert model.get_head_size() == shape.k_dim == (shape.v_dim or shape.k_dim)
    assert str(model.dtype).removeprefix("torch.") == shape.dtype
