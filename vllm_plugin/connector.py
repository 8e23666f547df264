"""`MooncakeKVConnector`: vLLM's KVConnectorBase_V1, which hands vLLM's calls to the side of its process.

vLLM constructs it once in the scheduler's process and once in each worker. A model or setting that the pool cannot
serve leaves both sides out: every call then does nothing, after one log line that says why. Where only the worker
finds that out, it refuses what the scheduler plans.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import vllm_plugin
from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import load_config, load_settings, page_tokens_set
from mooncake_connector.config.values import PageTokens
from mooncake_connector.contain import contained, nothing
from mooncake_connector.log import ROOT_LOGGER, get_logger, log_once, set_log_level
from mooncake_connector.threads import done_apart
from transfer.control.connection import Access
from transfer.transports.registry import check_configured
from vllm_plugin.geometry import Geometry, Unsupported
from vllm_plugin.kv_groups import read_geometry
from vllm_plugin.kv_memory import KVMemory
from vllm_plugin.messages import StepMetadata, WorkerReport
from vllm_plugin.sides import SchedulerSide, WorkerSide
from vllm_plugin.stats import ConnectorPromMetrics, ConnectorStats
from vllm_plugin.weights import calls
from vllm_plugin.weights.worker import WeightsReader

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

vllm_plugin.register()  # also when loaded by kv_connector_module_path: MultiConnector looks the class up by name
logger = get_logger(__name__)

_CLOSE_S = 30.0
"""Longest wait at an engine's end: all that is waited for there together, each with a deadline of its own."""


class MooncakeKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefix reuse from the shared pool of this host, and KV that another instance computed (PD disaggregation).

    Raises:
        ConfigError: `kv_connector_extra_config`, the environment or the configuration file is wrong.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        config = load_config(transfer.kv_connector_extra_config)
        check_configured(config.transports, config.transfer_hosts)
        _log_like_vllm(config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        try:
            geometry = read_geometry(vllm_config, kv_cache_config)
            config = _with_fitting_pages(config, geometry, transfer.kv_connector_extra_config)
            geometry.check_page(int(config.page_tokens))
        except Unsupported as reason:
            logger.warning("prefix reuse from the pool is off: %s", reason)
            if role is KVConnectorRole.WORKER:
                self._worker = WorkerSide(config, None, None, WeightsReader(vllm_config))
            return
        access = Access.configured(config, geometry.compatibility())
        if role is KVConnectorRole.SCHEDULER:
            _replace_policy(transfer, config.transfer_failure)
            self._scheduler = SchedulerSide(vllm_config, geometry, config, str(transfer.engine_id), access)
            calls.watch()
        else:
            memory = KVMemory(vllm_config, geometry, config, kv_cache_config.num_blocks)
            self._worker = WorkerSide(config, access, memory, WeightsReader(vllm_config))

    # Worker side

    @contained(nothing)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    @contained(nothing)
    def unregister_kv_caches(self) -> None:
        """Called by vLLM 0.33 and later before it sleeps; 0.32 keeps the addresses and says nothing."""
        if self._worker is not None:
            self._worker.unregister()

    @contained(nothing)
    def restore_kv_caches(self) -> None:
        """Called after it has woken; then it asks for another handshake."""
        if self._worker is not None:
            self._worker.restore()

    @contained(nothing)
    def get_handshake_metadata(self) -> PDHandshake | None:
        card = None if self._worker is None or self._worker.pd is None else self._worker.pd.card
        return None if card is None else PDHandshake(card)

    @contained(nothing)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """vLLM calls it at every step, before the forward pass, and before any block goes to another request."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._worker.weights.before_step(kv_connector_metadata)
            for part in self._worker.parts:
                part.before_step(kv_connector_metadata)

    @contained(nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            for part in self._worker.parts:
                part.start(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled only after its load has ended."""

    @contained(nothing)
    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer may travel while the next one is computed. Pages are saved whole, after the forward pass."""
        if self._worker is not None and self._worker.pd is not None:
            self._worker.pd.layer_computed(layer_name)

    @contained(nothing)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            for part in self._worker.parts:
                part.step_computed(self._step())

    @contained(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults() if self._worker is None else self._worker.transfer_results()

    @contained(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_failed_blocks()

    @contained(nothing)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        return None if self._worker is None else self._worker.take_report()

    # Scheduler side

    @contained(nothing)
    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.prefix.saves.bind(kv_cache_manager)
            self._scheduler.pd.bind(kv_cache_manager)

    @contained(nothing)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if self._scheduler is not None:
            cards = {rank: card.card for rank, card in metadata.items() if isinstance(card, PDHandshake)}
            self._scheduler.pd.set_ranks(cards)

    @contained(nothing)
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.track(request)

    @contained(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return (0, False) if self._scheduler is None else self._scheduler.matched_tokens(request, num_computed_tokens)

    @contained(nothing)
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.after_alloc(request, blocks, num_external_tokens)

    @contained(StepMetadata)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return StepMetadata() if self._scheduler is None else self._scheduler.build(scheduler_output)

    @contained(nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            self._scheduler.update(connector_output)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All groups: what is loaded fills what a request has of each."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @contained(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are held for another instance that wants them, never for a save."""
        return (False, None) if self._scheduler is None else self._scheduler.finished(request, block_ids)

    @contained(bool)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.prefix.saves.wants_steps()

    @contained(tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self._scheduler is None else self._scheduler.prefix.take_events()

    @contained(bool)
    def reset_cache(self) -> bool | None:
        return None if self._scheduler is None else self._scheduler.reset()

    # Both sides

    @contained(nothing)
    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Called on either side once for each step, when its output is there."""
        if self._scheduler is not None:
            self._scheduler.prefix.speed.computed()
        side = self._worker or self._scheduler
        if side is None:
            return None
        side.prefix.count_failures()
        return side.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats.for_log(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @contained(nothing)
    def shutdown(self) -> None:
        side, self._worker, self._scheduler = self._worker or self._scheduler, None, None
        # vLLM also calls this where the collector of cycles meets an engine of its user's process (`InprocClient`).
        if side is not None:
            said = "an engine's end takes longer than %d s, and goes on"
            done_apart(contained(nothing)(side.close), _CLOSE_S, "shutdown", said, logger)

    def _step(self) -> StepMetadata:
        metadata = self._connector_metadata
        return metadata if isinstance(metadata, StepMetadata) else StepMetadata()


def ours(connector: Any) -> Iterator[MooncakeKVConnector]:
    """Our connector, or each of ours within vLLM's MultiConnector."""
    if isinstance(connector, MooncakeKVConnector):
        yield connector
    for child in getattr(connector, "sub_connectors", ()):
        yield from ours(child)


@dataclass(frozen=True, slots=True)
class PDHandshake(KVConnectorHandshakeMetadata):
    """A worker's `transfer.control.directory.RankCard`, on its way to the scheduler's process."""

    card: bytes


def _with_fitting_pages(config: Config, geometry: Geometry, extra: dict[str, Any]) -> Config:
    """The configuration with pages that divide the blocks of a hybrid model, unless their size was set."""
    asked, fitting = int(config.page_tokens), geometry.fitting_page(int(config.page_tokens))
    if fitting == asked:
        return config
    unit, blocks = geometry.unit_tokens(asked), geometry.unit_tokens(1)
    if page_tokens_set(load_settings(extra)) is not None:
        said = "page_tokens %d does not divide this model's blocks of %d tokens: only every %d tokens may a hit end; "
        said += "leave page_tokens out for pages of %d"
        log_once("page.set", said, asked, blocks, unit, fitting, logger=logger)
        return config
    said = "pages have %d tokens in place of %d, since they divide this model's blocks of %d"
    log_once("page.fitting", said, fitting, asked, blocks, level=logging.INFO, logger=logger)
    return msgspec.structs.replace(config, page_tokens=PageTokens(fitting))


def _replace_policy(transfer: KVTransferConfig, ours: str) -> None:
    """Set what becomes of a request whose KV could not be loaded; vLLM reads it after the connector was made.

    A page that the pool lost is a miss, never a failed request, unless the user asks for that. Whether "fail" was
    written or is vLLM's default cannot be told.
    """
    theirs, transfer.kv_load_failure_policy = transfer.kv_load_failure_policy, ours
    if theirs != ours:
        log_once(
            f"policy.{theirs}",
            "kv_load_failure_policy is %r, not %r%s: transfer_failure in kv_connector_extra_config decides "
            "instead (inside MultiConnector vLLM reads the outer kv_load_failure_policy alone)",
            *(ours, theirs, " as written or by vLLM's default" if theirs == "fail" else ""),
            level=logging.INFO,
            logger=logger,
        )


def _log_like_vllm(config: Config) -> None:
    """Send this package's log lines where vLLM's go; vLLM configures only its own logger.

    Its handlers have a level of their own (VLLM_LOGGING_LEVEL), which is none of `log_level`.
    """
    ours = logging.getLogger(ROOT_LOGGER)
    if not ours.handlers:
        for handler in map(copy.copy, logging.getLogger("vllm").handlers):
            handler.setLevel(logging.NOTSET)
            ours.addHandler(handler)
        ours.propagate = not ours.handlers
    set_log_level(config.log_level)
