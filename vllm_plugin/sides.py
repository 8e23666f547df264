"""The connector in the scheduler's process and in a worker: reuse from the pool beside transfers between instances.

The two know nothing of each other. What a request gets from both is divided, and put together again, here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from mooncake_connector.config.schema import Config
from mooncake_connector.log import get_logger
from transfer.control.connection import Access
from vllm_plugin.geometry import Geometry, Unsupported
from vllm_plugin.kv_memory import KVMemory
from vllm_plugin.messages import Ended, StepMetadata, WorkerReport
from vllm_plugin.pd.scheduler import PDScheduler
from vllm_plugin.pd.worker import PDWorker, open_worker
from vllm_plugin.prefix.scheduler import PrefixScheduler
from vllm_plugin.prefix.worker import PrefixWorker, RefusingWorker
from vllm_plugin.stats import ConnectorStats
from vllm_plugin.weights.reading import Reading
from vllm_plugin.weights.worker import WeightsReader

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)


class SchedulerSide:
    """See the module."""

    def __init__(
        self, vllm_config: VllmConfig, geometry: Geometry, config: Config, engine_id: str, access: Access
    ) -> None:
        self.stats = ConnectorStats()
        self.prefix = PrefixScheduler(vllm_config, geometry, config, self.stats)
        dp_rank = vllm_config.parallel_config.data_parallel_index
        self.pd = PDScheduler(geometry, config, engine_id, dp_rank, access, self.stats)
        self._has_one_source = geometry.is_hybrid
        """Where a transfer brings anything, it brings all: windows of two sources would have to meet."""
        self._granule = geometry.unit_tokens(int(config.page_tokens))
        """What the pool brings ends at a multiple of it, so that no block is filled from two sides."""

    def track(self, request: Request) -> None:
        tracked = self.prefix.track(request)
        self.pd.track(request, tracked.root, self.prefix.namespace())
        tracked.gives_away = self.pd.gives_away(request)
        if not self.pd.expects(request):
            self.prefix.announce(request)

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What a transfer will bring, all of the prompt (see `PDScheduler.brings`), or else what is in the pool."""
        expects = self.pd.expects(request)
        pooled = self.prefix.matched_tokens(request, num_computed_tokens, fetch=not expects)  # for `after_alloc` too
        self._forget_nameless()
        rest = self.pd.brings(request) - num_computed_tokens
        return (rest, True) if rest > 0 and self.pd.expects(request) else pooled

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Of what is loaded, pages that are in the pool come from there and the rest from the other instance."""
        self.prefix.give_away(request, blocks)
        num_pooled = num_external_tokens
        if self.pd.expects(request):
            stop = self.pd.brings(request)
            first = stop - num_external_tokens
            end = first if self._has_one_source else min(first + self.prefix.offered(request), stop)
            if end < stop:
                end = max(first, end // self._granule * self._granule)
            num_pooled = end - first
            self.pd.after_alloc(request, blocks, num_external_tokens, num_pooled)
        self.prefix.after_alloc(request, blocks, num_pooled, num_external_tokens - num_pooled)

    def build(self, scheduled: SchedulerOutput) -> StepMetadata:
        self._hear(None)
        step = self.prefix.build(scheduled)
        self._forget_nameless()
        step.pd = self.pd.build(scheduled)
        return step

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """vLLM is through with a request: whether its blocks are held for another instance, and what a router hears."""
        self.prefix.finished(request)
        self._forget_nameless()
        held, answer = self.pd.finished(request, block_ids)
        if not held:
            self.prefix.accounts.say(request.request_id)
        return held, answer

    def _forget_nameless(self) -> None:
        self.pd.forget(self.prefix.take_nameless(), "its KV may not be what its name says")

    def update(self, output: KVConnectorOutput) -> None:
        """Take in what the workers report."""
        self.prefix.update(output)
        self.pd.update(output)
        report = output.kv_connector_worker_meta
        self._hear(report.weights if isinstance(report, WorkerReport) else None)

    def _hear(self, reading: Reading | None) -> None:
        """What workers say of their weights, or that another step is planned meanwhile."""
        if self.prefix.weights.heard(reading):
            self.prefix.forget(computed=self.prefix.weights.taints)
            self.pd.reset()

    def weights_may_be_others(self) -> None:
        """Somebody has called into the workers. What is computed already keeps its name until it is known better."""
        if self.prefix.weights.watched:
            self.prefix.weights.may_be_others()
            self.prefix.saves.drop()

    def reset(self) -> bool:
        self.pd.reset()
        return self.prefix.reset()

    def close(self) -> None:
        self.pd.close()
        self.prefix.close()


class WorkerSide:
    """See the module.

    Args:
        memory: None where this instance's KV is not understood: then the worker refuses what it is asked for.
    """

    def __init__(
        self, config: Config, access: Access | None, memory: KVMemory | None, weights: WeightsReader
    ) -> None:
        self._config, self._access = config, access
        self.memory = memory
        self.weights = weights
        self.stats = ConnectorStats()
        self.prefix = RefusingWorker() if memory is None else PrefixWorker(memory, config, self.stats)
        self.pd: PDWorker | None = None
        """None where this rank takes part in no transfers."""
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._report = WorkerReport()
        self._failed_blocks: set[int] = set()
        self._arrived: set[str] = set()
        """Requests of which one source has brought its part."""

    @property
    def parts(self) -> tuple[PrefixWorker | RefusingWorker | PDWorker, ...]:
        return (self.prefix,) if self.pd is None else (self.prefix, self.pd)

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the engine's KV tensors; where they cannot be understood, every job ends as failed."""
        if self.memory is None or self._access is None:
            return
        self._kv_caches = kv_caches
        try:
            self.memory.register(kv_caches)
            self.prefix.registered()
            self.pd = open_worker(self.memory, self._config, self._access, self.stats)
        except Unsupported as error:
            logger.warning("prefix reuse from the pool is off: %s", error)
        except Exception as error:
            logger.warning("prefix reuse from the pool is off: %r", error, exc_info=True)

    def unregister(self) -> None:
        """The engine takes its KV memory away: nothing of ours touches it any more, and what was under way has ended.

        What vLLM waits for is reported at the next step, as failed.
        """
        if self.memory is None or not self.memory.registered:
            return
        try:
            self.prefix.stop("unregistered")
        finally:
            try:
                if self.pd is not None:
                    self.pd.stop("the engine took its KV memory away")
            finally:
                self.memory.release()

    def restore(self) -> None:
        """The memory is there again, at its addresses; other instances reach it after another handshake."""
        if self.memory is None or self.memory.registered or not self._kv_caches:
            return
        former = self.pd
        self.register(self._kv_caches)
        if self.pd is None:  # vLLM still waits for what ended, and may be told of more
            self.pd = former
        elif former is not None and former is not self.pd:
            self.pd.take_over(former)

    def transfer_results(self) -> KVConnectorTransferResults:
        """Loads and transfers that ended since the last step. A failed one is also in :meth:`take_failed_blocks`.

        A request that gets pages from the pool and the rest from another instance is reported when it has both.

        vLLM asks for this first, for statistics next and for the report last, so all that ended is collected here.
        """
        ended = Ended(self._arrived, self._failed_blocks, self._report)
        for part in self.parts:
            part.take_ended(ended)
        whole = {req_id for req_id in self._arrived if not any(part.fills(req_id) for part in self.parts)}
        self._arrived -= whole
        return KVConnectorTransferResults(ended.sent, whole, ended.refused)

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """Saves that ended and loads that failed since the last step; None where there is nothing to say."""
        report, self._report = self._report, WorkerReport()
        report.weights = self.weights.take()
        return None if report == WorkerReport() else report

    def close(self) -> None:
        """Finish what runs, drop the rest, release the node and the pool; idempotent."""
        try:
            if self.pd is not None:
                self.pd.stop("the instance is closed")
        finally:
            try:
                self.prefix.close()
            finally:
                if self.memory is not None:
                    self.memory.release()
