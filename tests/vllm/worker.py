"""One rank: a pretended model runner, and the connector's worker side, driven by vLLM's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from runner import Group, Runner, as_kv_caches, as_states, kv_memory, memory_of, shared_memory
from settings import Setup, indexer_names, layer_names
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from vllm_plugin.connector import MooncakeKVConnector
from vllm_plugin.prefix.worker import PrefixWorker


def ours(connector: Any) -> Any:
    """Our connector, which may be one of several."""
    return next(one for one in getattr(connector, "sub_connectors", [connector]) if type(one) is MooncakeKVConnector)


class Worker:
    def __init__(self, setup: Setup, config: VllmConfig, cache_config: KVCacheConfig, rank: int) -> None:
        self._config = config
        heads = setup.heads(rank)
        specs = setup.groups(rank)
        if setup.is_hybrid:
            page_nbytes, num_layers = specs[0][0].page_size_bytes, max(len(layers) for _, layers in specs)
            self.memory = shared_memory(num_layers, setup.num_blocks, page_nbytes)
            groups = [Group(spec, memory_of(self.memory, spec), layers, at) for at, (spec, layers) in enumerate(specs)]
        elif setup.is_sparse:
            size = setup.num_blocks, 1, setup.block_tokens, setup.layout
            each = [kv_memory(len(layers), *size) for _, layers in specs]
            self.memory = each[0]
            groups = [Group(spec, memory, layers) for (spec, layers), memory in zip(specs, each, strict=True)]
        else:
            ((spec, layers),) = specs
            self.memory = kv_memory(len(layers), setup.num_blocks, len(heads), setup.block_tokens, setup.layout)
            groups = [Group(spec, self.memory, layers)]
        self.runner = Runner(self.memory, groups, heads)
        self._names = {layer: layer_names(range(layer, layer + 1))[0] for group in groups for layer in group.layers}
        self.layer_computed: Callable[[int], None] = lambda number: None
        """Called after each layer of attention of a forward pass, with its number in the model."""
        self._caches: dict[str, Any] = {}
        for group in groups:
            names = (indexer_names if group.is_indexer else layer_names)(group.layers)
            if isinstance(group.spec, MambaSpec):
                self._caches |= as_states(group.memory, names)
            else:
                self._caches |= as_kv_caches(group.memory, names, kernel_tokens=setup.kernel_tokens)
        caches = self._caches
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
        self.runner.end_step()
        with self._as_this_worker(), set_forward_context(None, self._config):
            if self._active is not None:
                return self._execute_v2(self._active, scheduled)
            self.connector.handle_preemptions(scheduled.kv_connector_metadata)
            self.runner.update(scheduled)
            if not scheduled.total_num_scheduled_tokens:
                return KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduled, self._config)
            with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled) as connector_output:
                output = self.runner.forward(scheduled, self._around_layer)
            output.kv_connector_output = connector_output
            return output

    def _execute_v2(self, active: ActiveKVConnector, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """As `execute_model` of V2, which zeroes and copies blocks before the connector hears of the step."""
        self.runner.update(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            return active.no_forward(scheduled)
        batch = SimpleNamespace(idx_mapping=None, req_ids=list(scheduled.num_scheduled_tokens), num_tokens=0)
        active.pre_forward(scheduled, batch)
        output = self.runner.forward(scheduled, self._around_layer)
        active.finish_forward()
        output.kv_connector_output = active.post_forward(scheduled.finished_req_ids)
        return output

    @contextmanager
    def _around_layer(self, layer: int) -> Iterator[None]:
        """What vLLM's decorator of attention (`maybe_transfer_kv_layer`) does."""
        name = self._names[layer]
        connector = kv_transfer_state.get_kv_transfer_group()
        assert connector.has_connector_metadata()
        connector.wait_for_layer_load(name)
        yield
        connector.save_kv_layer(name, self._caches[name], None)
        self.layer_computed(layer)

    def get_model(self) -> torch.nn.Module:
        """What vLLM's workers give to those who ask for the model: here all that its weights are is a number."""
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.tensor([float(self.runner.weights)]), requires_grad=False)
        return model

    def jobs(self) -> list[Any]:
        """Jobs of the connector that it has not reported yet."""
        prefix = self.prefix
        return [*prefix._loads.pending, *prefix._saver.pending] if isinstance(prefix, PrefixWorker) else []

    @property
    def side(self) -> Any:
        return ours(self.connector)._worker

    @property
    def prefix(self) -> Any:
        return self.side.prefix

    @property
    def pd(self) -> Any:
        return self.side.pd

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
