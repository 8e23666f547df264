"""vLLM's own scheduler with the real connector, both halves, over a real pool; only the forward pass is pretended.

`Engine` does what vLLM's EngineCore, executor and model runner do around the connector, in their order: the worker
side is driven by vLLM's own code (the mixin of Model Runner V1, `ActiveKVConnector` of V2), the outputs of the ranks
are merged by vLLM's `KVOutputAggregator`, and what crosses processes in an engine is pickled here.
"""

from __future__ import annotations

import copy
import json
import pickle
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import torch
from runner import Runner, as_kv_caches, kv_memory
from vllm.config import CacheConfig, KVEventsConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from mooncake_connector.keys import page_keys, root_digest
from vllm_plugin.worker import WorkerHalf

NUM_LAYERS = 2
NUM_KV_HEADS = 2
MAX_MODEL_LEN = 2048
PATIENCE_S = 60.0
"""An engine that has requests and does not get anywhere for so long fails its test."""

init_none_hash(sha256)


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
    num_blocks: int = 64
    block_tokens: int = 16
    page_tokens: int = 16
    layout: str = "LBHNC"
    kernel_tokens: int | None = None
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
    """Instead of full attention of `NUM_KV_HEADS`; a list of specs makes as many groups."""
    worker_kv_spec: Any = None
    """What the worker's configuration says where it says more than the scheduler's."""

    @property
    def mla(self) -> bool:
        return isinstance(self.kv_spec, MLAAttentionSpec)

    @property
    def heads_a_rank(self) -> int:
        return 1 if self.mla else max(NUM_KV_HEADS // self.tp_size, 1)

    def heads(self, rank: int) -> range:
        if self.mla:
            return range(1)
        first = rank * self.heads_a_rank if self.tp_size <= NUM_KV_HEADS else rank * NUM_KV_HEADS // self.tp_size
        return range(first, first + self.heads_a_rank)


def layer_names() -> list[str]:
    return [f"model.layers.{layer}.self_attn.attn" for layer in range(NUM_LAYERS)]


def kv_cache_config(setup: Setup) -> KVCacheConfig:
    spec = setup.kv_spec or FullAttentionSpec(
        block_size=setup.block_tokens,
        num_kv_heads=setup.heads_a_rank,
        head_size=oracle.HEAD_SIZE,
        dtype=torch.float16,
    )
    specs = spec if isinstance(spec, list) else [spec]
    names = layer_names()
    groups = [KVCacheGroupSpec(names if len(specs) == 1 else [names[i]], one) for i, one in enumerate(specs)]
    return KVCacheConfig(num_blocks=setup.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def worker_kv_cache_config(setup: Setup) -> KVCacheConfig:
    config = kv_cache_config(setup)
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
    config.parallel_config = copy.copy(base.parallel_config)
    config.parallel_config.tensor_parallel_size = setup.tp_size
    config.parallel_config.rank = rank
    if setup.events:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config.kv_transfer_config = KVTransferConfig(**(setup.transfer or transfer_config(setup, pool)))
    return config


def transfer_config(setup: Setup, pool: Path) -> dict[str, Any]:
    """What a person writes after `--kv-transfer-config`."""
    extra = {"pool": str(pool), "capacity": "8MiB", "page_tokens": setup.page_tokens, "model_id": setup.model_id}
    return {
        "kv_connector": "MooncakeKVConnector",
        "kv_role": setup.kv_role,
        "kv_connector_extra_config": extra | setup.extra,
    }


class Worker:
    """One rank: a pretended model runner and the connector's worker half, driven by vLLM's own code."""

    def __init__(self, setup: Setup, config: VllmConfig, cache_config: KVCacheConfig, rank: int) -> None:
        self._config = config
        heads = setup.heads(rank)
        self.memory = kv_memory(NUM_LAYERS, setup.num_blocks, len(heads), setup.block_tokens, setup.layout)
        self.runner = Runner(self.memory, heads)
        caches = as_kv_caches(self.memory, layer_names(), kernel_tokens=setup.kernel_tokens)
        self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config)
        self.loads_started_after_forward: list[bool] = []
        self._active: ActiveKVConnector | None = None
        with self._as_this_worker():
            if setup.v2_runner:
                self._active = ActiveKVConnector(config, caches)
            else:
                self.connector.register_kv_caches(caches)
                self.connector.set_host_xfer_buffer_ops(lambda *args: None)

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        with self._as_this_worker(), set_forward_context(None, self._config):
            if self._active is not None:
                return self._execute_v2(self._active, scheduled)
            self.connector.handle_preemptions(scheduled.kv_connector_metadata)
            if not scheduled.total_num_scheduled_tokens:
                self.runner.forward(scheduled)
                return KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduled, self._config)
            with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled) as connector_output:
                output = self.runner.forward(scheduled)
            output.kv_connector_output = connector_output
            return output

    def _execute_v2(self, active: ActiveKVConnector, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        if not scheduled.total_num_scheduled_tokens:
            self.runner.forward(scheduled)
            return active.no_forward(scheduled)
        batch = SimpleNamespace(idx_mapping=None, req_ids=list(scheduled.num_scheduled_tokens), num_tokens=0)
        active.pre_forward(scheduled, batch)
        output = self.runner.forward(scheduled)
        active.finish_forward()
        output.kv_connector_output = active.post_forward(scheduled.finished_req_ids)
        return output

    def tasks(self) -> list[Any]:
        """Jobs of the connector that it has not reported yet."""
        half = self.connector._worker
        return [*half._loader._pending, *half._saver._pending] if isinstance(half, WorkerHalf) else []

    def _as_this_worker(self) -> _Agent:
        return _Agent(self.connector)


class _Agent:
    """vLLM finds a worker's connector in a global of its process; here all ranks share one."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector

    def __enter__(self) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = self._connector

    def __exit__(self, *exc_info: object) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = None


class Engine:
    """EngineCore's loop. One step at a time, or until nothing is left to do."""

    def __init__(self, setup: Setup, base: VllmConfig, pool: Path) -> None:
        self.setup = setup
        config = vllm_config(setup, base, pool)
        cache_config = kv_cache_config(setup)
        scheduler_class = AsyncScheduler if setup.async_scheduling else Scheduler
        self.scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=setup.block_tokens,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = setup.v2_runner
        self.connector = self.scheduler.connector
        self.workers = [
            Worker(setup, vllm_config(setup, base, pool, rank), worker_kv_cache_config(setup), rank)
            for rank in range(setup.tp_size)
        ]
        self._aggregator = KVOutputAggregator.from_connector(self.connector, setup.tp_size)
        self._hasher = get_request_block_hasher(setup.block_tokens, sha256)
        self._queue: deque[tuple[SchedulerOutput, ModelRunnerOutput | None]] = deque()
        self._in_flight_limit = 2 if setup.async_scheduling else 1
        self.requests: dict[str, Request] = {}
        self.texts: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.stats: list[Any] = []
        self.metadata: list[Any] = []

    # Requests

    def add(self, prompt: Sequence[int], max_tokens: int = 3, *, name: str | None = None, **kwargs: Any) -> str:
        name = name or f"r{len(self.requests)}"
        stop = kwargs.pop("stop", ())
        extra = {key: kwargs.pop(key) for key in ("prompt_logprobs",) if key in kwargs}
        request = Request(
            request_id=name,
            prompt_token_ids=None if "prompt_embeds" in kwargs else list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, stop_token_ids=list(stop), ignore_eos=True, **extra),
            pooling_params=None,
            block_hasher=self._hasher,
            **kwargs,
        )
        self.requests[name] = request
        self.texts[name] = []
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        for request in self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED):
            self.reasons[request.request_id] = "abort"

    def ask(self, prompt: Sequence[int], max_tokens: int = 3, **kwargs: Any) -> list[int]:
        """One request from its arrival to its end, all saves included."""
        name = self.add(prompt, max_tokens, **kwargs)
        self.run()
        return self.texts[name]

    def ask_all(self, prompts: Iterable[Sequence[int]], max_tokens: int = 3, **kwargs: Any) -> list[list[int]]:
        names = [self.add(prompt, max_tokens, **kwargs) for prompt in prompts]
        self.run()
        return [self.texts[name] for name in names]

    def computed(self, name: str) -> int:
        """Tokens of a request that went through the forward pass."""
        return self.workers[0].runner.num_computed.get(name, 0)

    # Steps

    def step(self) -> int:
        """One step of the engine's loop; the number of tokens scheduled, -1 where there was nothing to do."""
        num_tokens = self.begin_step()
        if num_tokens is not None and len(self._queue) < self._in_flight_limit:
            if num_tokens or self.scheduler.has_requests():
                return num_tokens
        elif num_tokens is None and not self._queue:
            return -1
        self.end_step()
        if self.setup.keep_pace:
            self.settle()
        return num_tokens or 0

    def settle(self) -> None:
        """Wait until the connector's threads have nothing left to do."""
        end_s = time.monotonic() + PATIENCE_S
        while any(not task.ended_s for worker in self.workers for task in worker.tasks()):
            assert time.monotonic() < end_s, "a job of the connector hangs"
            time.sleep(0.0002)

    def begin_step(self) -> int | None:
        """Schedule and submit; None where nothing is left to do."""
        if not self.scheduler.has_requests():
            return None
        scheduled = self.scheduler.schedule()
        assert not scheduled.has_sync_kv_loads, "only asynchronous loads survive a failure with async scheduling"
        self.metadata.append(scheduled.kv_connector_metadata)
        sent = pickle.loads(pickle.dumps(scheduled))
        self._queue.append((sent, None if self.setup.lazy else self._execute(sent)))
        return int(scheduled.total_num_scheduled_tokens)

    def end_step(self) -> None:
        """Take the oldest step's output."""
        scheduled, output = self._queue.popleft()
        outputs = self.scheduler.update_from_output(scheduled, output or self._execute(scheduled))
        for core_outputs in outputs.values():
            for one in core_outputs.outputs:
                self.texts[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.reasons[one.request_id] = str(one.finish_reason)
            if core_outputs.scheduler_stats is not None:
                self.stats.append(core_outputs.scheduler_stats)

    def _execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        outputs = [worker.execute(copy.deepcopy(scheduled)) for worker in self.workers]
        for output in outputs:
            if output.kv_connector_output is not None:
                report = output.kv_connector_output.kv_connector_worker_meta
                output.kv_connector_output.kv_connector_worker_meta = pickle.loads(pickle.dumps(report))
        merged = self._aggregator.aggregate([copy.copy(output) for output in outputs])
        assert merged is not None
        return merged

    def run(self, until: Any = None) -> None:
        """Step until nothing is left to do (or until `until()`), saves of the idle engine included."""
        last_s = time.monotonic()
        while until is None or not until():
            num_tokens = self.step()
            if num_tokens < 0:
                assert until is None, "the engine went idle before what was waited for"
                return
            if num_tokens:
                last_s = time.monotonic()
            else:
                time.sleep(0.0005)
            assert time.monotonic() - last_s < PATIENCE_S, f"stuck: {self.scheduler.requests.keys()}"

    # What must hold afterwards

    @property
    def half(self) -> Any:
        """The scheduler half of our connector, which may be one of several."""
        ours = getattr(self.connector, "sub_connectors", [self.connector])[0]
        return ours._scheduler

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def check_at_rest(self) -> None:
        """No block, request or bookkeeping is left over."""
        assert not self.scheduler.has_requests()
        assert not self.scheduler.requests
        assert self.free_blocks() == self.setup.num_blocks - 1, "blocks leaked"
        if self.half is not None:
            assert not self.half._tracked and not self.half._pinned and self.half._num_pinned_blocks == 0
        for worker in self.workers:
            assert not worker.connector.get_transfer_results(set()).finished_recving

    def shut_down(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.connector.shutdown()

    # The pool

    def pages(self, tokens: Sequence[int], *, salt: str | None = None, weights: int = 0) -> list[bool]:
        """Which full pages of these tokens are in the pool, whole: in every rank's shard, with the right bytes.

        Raises:
            AssertionError: a page of the pool does not hold the KV of its key.
        """
        size = self.setup.page_tokens
        keys = page_keys(tokens, size, root=root_digest(None, salt))
        hashes = oracle.chain(tokens, seed=weights)
        present = [True] * len(keys)
        for shard, space in zip(self.half._shards, self.half._spaces(), strict=True):
            heads = range(shard.head_start, shard.head_stop)
            expected = [
                oracle.canonical_page(hashes[i * size : (i + 1) * size], NUM_LAYERS, heads, mla=self.setup.mla)
                for i in range(len(keys))
            ]

            def check(index: int, page: Any, expected: list[Any] = expected) -> None:
                assert bytes(page) == bytes(expected[index]), f"page {index} of {len(keys)} holds other KV"

            if keys:
                found = getattr(space, "_space", space).read(keys, check, nbytes=expected[0].nbytes)
                present = [a and b for a, b in zip(present, found, strict=True)]
        return present

    def num_pages(self) -> int:
        """Pages in the pool, of all namespaces and shards."""
        return int(self.half._pool.store.stats().pages)
