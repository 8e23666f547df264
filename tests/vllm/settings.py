"""Settings of an engine under test, and the configuration objects that vLLM makes of such settings."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import oracle
import torch
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_plugin import stages

NUM_LAYERS = 2
NUM_KV_HEADS = 2
MAX_MODEL_LEN = 2048


@lru_cache(maxsize=1)
def base_config(folder: Path) -> VllmConfig:
    """A small Llama's configuration; its weights do not exist, since nothing here reads them."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": 8,
        "vocab_size": oracle.VOCAB,
        "max_position_embeddings": MAX_MODEL_LEN,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), dtype="float16", skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN
        ),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=256, max_num_seqs=64, max_model_len=MAX_MODEL_LEN, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
    )


@dataclass(frozen=True, kw_only=True)
class Setup:
    """An engine's settings; the defaults are small, so that every border is met."""

    v2_runner: bool = False
    async_scheduling: bool = False
    lazy: bool = False
    """With async scheduling: a step's forward runs only after the next step was scheduled."""
    tp_size: int = 1
    pp_size: int = 1
    num_blocks: int = 64
    block_tokens: int = 16
    page_tokens: int = 16
    """0: not set."""
    layout: str = "LBHNC"
    kernel_tokens: int | None = None
    dual_batch_overlap: bool = False
    """`--enable-dbo`: vLLM computes a large batch in two parts, one half a layer ahead of the other."""
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 64
    prefix_caching: bool = True
    kv_role: str = "kv_both"
    events: bool = False
    model_id: str = "test"
    extra: dict[str, Any] = field(default_factory=dict)
    transfer: dict[str, Any] | None = None
    """The whole of `--kv-transfer-config`, in place of the one made of the fields above."""
    hybrid_manager_off: bool = False
    """`--disable-hybrid-kv-cache-manager`, which some other connectors need."""
    keep_pace: bool = False
    """After every step the connector's threads finish what they have; a real step takes far longer than a page."""
    kv_spec: Any = None
    """Instead of full attention of `NUM_KV_HEADS`; a list of specs makes as many groups, of pages of as many bytes."""
    retention_tokens: int | None = 0
    """`--prefix-cache-retention-interval`, of groups with a window or a state."""
    layers_a_group: int = 1
    """Of several groups, whose layers take turns in the model."""
    worker_kv_spec: Any = None
    """What the worker's configuration says where it says more than the scheduler's."""
    drafts: int = 0
    """So many tokens are proposed in each step, right for a while at best; without a model unless `proposer` is one."""
    proposer: str = "ngram"
    """"eagle" with layers in the last group, "mtp" with such in the first, or "draft_model", in every group."""

    @property
    def mla(self) -> bool:
        return isinstance(self.kv_spec, MLAAttentionSpec) or self.is_sparse

    @property
    def is_sparse(self) -> bool:
        """Latents with an indexer beside them, in one group of vLLM's: `mixes.sparse`."""
        return isinstance(self.kv_spec, UniformTypeKVCacheSpecs)

    @property
    def heads_a_rank(self) -> int:
        return 1 if self.mla else max(NUM_KV_HEADS // self.tp_size, 1)

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def is_hybrid(self) -> bool:
        return isinstance(self.kv_spec, list)

    def groups(self, rank: int) -> list[tuple[KVCacheSpec, range]]:
        """The KV-cache groups of a rank, each with the numbers of its layers in the model."""
        if self.is_sparse:
            latent, indexer = (self.kv_spec.kv_cache_specs[names[0]] for names in (layer_names(), indexer_names()))
            return [(latent, self.layers(rank)), (indexer, self.layers(rank))]
        if self.is_hybrid:
            count = len(self.kv_spec)
            every = range(count * self.layers_a_group)
            stage = range(*get_pp_indices(len(every), rank // self.tp_size, self.pp_size))
            return [(spec, _common(every[at::count], stage)) for at, spec in enumerate(self.kv_spec)]
        full = {"num_kv_heads": self.heads_a_rank, "head_size": oracle.HEAD_SIZE, "dtype": torch.float16}
        spec = self.kv_spec or FullAttentionSpec(block_size=self.block_tokens, **full)
        return [(spec, self.layers(rank))]

    def layers(self, rank: int) -> range:
        count = NUM_LAYERS // self.pp_size
        first = rank // self.tp_size * count
        return range(first, first + count)

    def heads(self, rank: int) -> range:
        if self.mla:
            return range(1)
        rank %= self.tp_size
        first = rank * self.heads_a_rank if self.tp_size <= NUM_KV_HEADS else rank * NUM_KV_HEADS // self.tp_size
        return range(first, first + self.heads_a_rank)


def _common(layers: range, stage: range) -> range:
    """Those of a group that a stage has, which may be none."""
    before = sum(layer < stage.start for layer in layers)
    return layers[before : sum(layer < stage.stop for layer in layers)]


def layer_names(layers: range = range(NUM_LAYERS)) -> list[str]:
    return [f"model.layers.{layer}.self_attn.attn" for layer in layers]


def indexer_names(layers: range = range(NUM_LAYERS)) -> list[str]:
    return [f"model.layers.{layer}.self_attn.indexer.k_cache" for layer in layers]


def kv_cache_config(setup: Setup, rank: int = 0) -> KVCacheConfig:
    """Of one worker; vLLM gives its scheduler the first worker's."""
    if setup.is_sparse:
        return generate_scheduler_kv_cache_config([_sparse_config(setup, rank)])
    groups = [KVCacheGroupSpec(layer_names(layers), spec) for spec, layers in setup.groups(rank)]
    drafting = {"eagle": -1, "mtp": 0}.get(setup.proposer)
    if drafting is not None:
        groups[drafting].is_eagle_group = True
    return KVCacheConfig(
        num_blocks=setup.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=setup.retention_tokens,
    )


def _sparse_config(setup: Setup, rank: int) -> KVCacheConfig:
    """What vLLM itself makes of the layers of a worker."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups  # not in 0.33

    engine = VllmConfig(cache_config=CacheConfig(block_size=setup.block_tokens))
    engine.cache_config.kv_cache_layout = setup.layout
    own = {*layer_names(setup.layers(rank)), *indexer_names(setup.layers(rank))}
    specs = {name: spec for name, spec in setup.kv_spec.kv_cache_specs.items() if name in own}
    groups = get_kv_cache_groups(engine, specs)
    nbytes = setup.num_blocks * sum(group.kv_cache_spec.page_size_bytes for group in groups)
    return get_kv_cache_config_from_groups(engine, groups, nbytes)


def kv_cache_configs(setup: Setup, config: VllmConfig) -> tuple[KVCacheConfig, list[KVCacheConfig]]:
    """The scheduler's and the workers', as EngineCore makes them and has them sent."""
    workers = [worker_kv_cache_config(setup, rank) for rank in range(setup.num_ranks)]
    stages.tell(config, workers)
    is_whole = setup.is_hybrid or setup.is_sparse
    scheduler = generate_scheduler_kv_cache_config(workers) if is_whole else kv_cache_config(setup)
    return scheduler, pickle.loads(pickle.dumps(workers))


def worker_kv_cache_config(setup: Setup, rank: int) -> KVCacheConfig:
    if setup.is_sparse:
        return _sparse_config(setup, rank)
    config = kv_cache_config(setup, rank)
    if setup.worker_kv_spec is not None:
        config.kv_cache_groups[0].kv_cache_spec = setup.worker_kv_spec
    return config


def vllm_config(setup: Setup, base: VllmConfig, pool: Path, rank: int = 0) -> VllmConfig:
    config = copy.copy(base)
    config.scheduler_config = copy.copy(base.scheduler_config)
    config.scheduler_config.max_num_batched_tokens = setup.max_num_batched_tokens
    config.scheduler_config.max_num_seqs = setup.max_num_seqs
    config.scheduler_config.async_scheduling = setup.async_scheduling
    config.scheduler_config.disable_hybrid_kv_cache_manager = setup.hybrid_manager_off
    config.cache_config = copy.copy(base.cache_config)
    config.cache_config.block_size = setup.block_tokens
    config.cache_config.num_gpu_blocks = setup.num_blocks
    config.cache_config.enable_prefix_caching = setup.prefix_caching
    modes = [spec.mamba_cache_mode for spec, _ in setup.groups(rank) if isinstance(spec, MambaSpec)]
    config.cache_config.mamba_cache_mode = next(iter(modes), "none")
    config.parallel_config = copy.copy(base.parallel_config)
    config.parallel_config.tensor_parallel_size = setup.tp_size
    config.parallel_config.pipeline_parallel_size = setup.pp_size
    config.parallel_config.rank = rank
    config.parallel_config.enable_dbo = setup.dual_batch_overlap
    if setup.drafts:
        assert not setup.async_scheduling, "vLLM proposes n-grams after the step"
        is_model = setup.proposer != "ngram"
        config.speculative_config = SpeculativeConfig(
            method="draft_model" if is_model else "ngram",
            model=str(config.model_config.model) if is_model else None,
            num_speculative_tokens=setup.drafts,
            prompt_lookup_max=None if is_model else 2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        config.speculative_config.method = setup.proposer
    if setup.events:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config.kv_transfer_config = KVTransferConfig(**(setup.transfer or transfer_config(setup, pool)))
    return config


def transfer_config(setup: Setup, pool: Path) -> dict[str, Any]:
    """What a person writes after `--kv-transfer-config`."""
    extra = {"pool": str(pool), "capacity": "8MiB", "model_id": setup.model_id}
    if setup.page_tokens:
        extra["page_tokens"] = setup.page_tokens
    unhurried = {"load_deadline_s": 40.0, "save_deadline_s": 40.0}  # a busy machine leaves a thread waiting for seconds
    return {
        "kv_connector": "MooncakeKVConnector",
        "kv_role": setup.kv_role,
        "kv_connector_extra_config": unhurried | extra | setup.extra,
    }


def multi_connector(*children: dict[str, Any], role: str = "kv_both") -> dict[str, Any]:
    """The same for several connectors. vLLM reads the failure policy of the outer configuration alone."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }
