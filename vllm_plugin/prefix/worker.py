"""The worker half: moves pages between this rank's KV blocks and the pool, and KV between instances.

Pages go through two movers (:mod:`store_client.mover`), one for loads and one for saves (:mod:`saver`), and the forward
pass waits for neither; KV of other instances goes through the transfer node (:mod:`vllm_plugin.pd.worker`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from mooncake_connector.config.schema import Config
from mooncake_connector.contain import contained, nothing
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger
from store_client.base import Bytes
from store_client.jobs import Job, Load
from store_client.mover import Mover
from store_client.open import open_in_background
from store_client.sharded import ShardView
from transfer.control.connection import Access
from transfer.plan.layout import RankLayout, Section
from transfer.session import Node
from transfer.transports.base import TransferError
from vllm_plugin.blocks import KVBlocks, probe_cpu_order, register_tensors
from vllm_plugin.device_order import DeviceOrder, Wait, recorder
from vllm_plugin.geometry import Geometry, Unsupported
from vllm_plugin.messages import LoadJob, StepMetadata, WorkerReport
from vllm_plugin.pd.options import make_options, memory_of
from vllm_plugin.pd.worker import PDWorker
from vllm_plugin.prefix.saver import Saver
from vllm_plugin.stats import ConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CAUSES = {"busy": "pool_refused", "refused": "pool_refused"}
"""What the metrics call why a job ended, where it is not the job's own word."""
_STOP_S = 2.0
"""Longest wait for a running job at shutdown; the engine kills its processes after a few seconds."""

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class BlockLoad(Load):
    """A load into the blocks of one request."""

    plan: LoadJob


class WorkerHalf:
    """See the module.

    Args:
        geometry: of the instance; `tp_rank`, `pp_rank` say which shard is this worker's.
    """

    def __init__(
        self, vllm_config: VllmConfig, geometry: Geometry, config: Config, access: Access, num_blocks: int
    ) -> None:
        parallel = vllm_config.parallel_config
        rank = parallel.rank % (geometry.tp_size * geometry.pp_size)
        pp_rank, tp_rank = divmod(rank, geometry.tp_size)
        self._vllm_config = vllm_config
        self._geometry = geometry
        self._config = config
        self._access = access
        self._num_blocks = num_blocks
        self._shard = geometry.shard(pp_rank, tp_rank)
        self._fmt = geometry.page_format(self._shard, int(config.page_tokens))
        self._blocks: KVBlocks | None = None
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._record: Callable[[], Wait | None] = lambda: None
        self._store = open_in_background(config)
        self._stats = ConnectorStats()
        self._failed_blocks: set[int] = set()
        self._report = WorkerReport()
        self._loads: Mover[BlockLoad] = Mover("load")
        self._saver = Saver(
            self._view, self._fmt, writes=geometry.is_writer(tp_rank), deadline_s=config.save_deadline_s
        )
        self.pd: PDWorker | None = None
        """None where this rank takes part in no transfers."""
        self._loading: set[str] = set()
        """Requests with pages on their way from the pool."""
        self._arrived: set[str] = set()
        """Requests of which one source has brought its part."""
        self._store.wait(1.0)

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the engine's KV tensors; where they cannot be understood, every job ends as failed."""
        geometry = self._geometry
        self._kv_caches = kv_caches
        try:
            tensors = register_tensors(kv_caches, geometry.layer_names, self._num_blocks, geometry.block_tokens)
            order = None
            if tensors[0].device.type == "cpu" and not geometry.is_mla:
                order = probe_cpu_order(
                    self._fmt,
                    int(tensors[0].shape[2]),
                    geometry.kv_dtype,
                    self._vllm_config.model_config.dtype,
                    self._vllm_config.cache_config.cache_dtype,
                )
            self._blocks = blocks = KVBlocks(tensors, self._shard, self._fmt, order)
            self._record = recorder(tensors[0].device)
            # Asleep, vLLM takes a device's memory away, and a read of it would be the end of the process.
            sleeps = tensors[0].device.type != "cpu" and self._vllm_config.model_config.enable_sleep_mode
            self._saver.register(blocks, self._record, copies_at_once=sleeps)
            self.pd = self._make_node(tensors, blocks)
        except Unsupported as error:
            logger.warning("prefix reuse from the pool is off: %s", error)
        except Exception as error:
            logger.warning("prefix reuse from the pool is off: %r", error, exc_info=True)

    def unregister(self) -> None:
        """The engine takes its KV memory away: nothing of ours touches it any more, and what was under way has ended.

        What vLLM waits for is reported at the next step, as failed.
        """
        if self._blocks is None:
            return
        for load in self._loads.pending:
            load.give_up("unregistered")
        try:
            self._saver.give_away(None)
            if (wait := self._record()) is not None:
                wait()
        finally:
            if self.pd is not None:
                self.pd.stop("the engine took its KV memory away")
            self._blocks = None

    def restore(self) -> None:
        """The memory is there again, at its addresses; other instances reach it after another handshake."""
        if self._blocks is not None or not self._kv_caches:
            return
        former = self.pd
        self.register(self._kv_caches)
        if self.pd is not None and former is not None:
            self.pd.take_over(former)

    def _make_node(self, tensors: list[torch.Tensor], blocks: KVBlocks) -> PDWorker | None:
        geometry, shard = self._geometry, self._shard
        device = tensors[0].device
        if device.type not in ("cpu", "cuda"):
            logger.warning("KV transfers are off: no transport can move KV blocks in %s memory", device.type)
            return None
        section = Section(
            name="kv",
            model_layers=geometry.num_layers,
            model_heads=geometry.num_kv_heads,
            shard=shard,
            k_dim=geometry.k_dim,
            v_dim=geometry.v_dim,
            itemsize=geometry.itemsize,
            blocks=blocks.layout,
        )
        options = make_options(self._config)
        try:
            node = Node(RankLayout((section,)), memory_of(tensors), self._access, options, device.index)
        except (TransferError, ValueError, OSError) as error:
            logger.error("KV transfers are off: %s", error)
            return None
        # A batch in parts runs through the layers once for each: a layer is named when one part of it is computed.
        in_parts = self._vllm_config.parallel_config.use_ubatching
        layers = () if in_parts else geometry.layer_names
        return PDWorker(node, section, layers, options.bounds, DeviceOrder(self._record))

    @contained(nothing)
    def start_loads(self, metadata: StepMetadata) -> None:
        """Queue this step's loads; a forward pass under way may still write to their blocks for whom they were."""
        if not metadata.loads:
            return
        assert metadata.namespace is not None
        fence = self._record()
        for plan in metadata.loads:
            self._loading.add(plan.req_id)
            self._loads.submit(self._load(plan, metadata.namespace, fence))

    def _load(self, plan: LoadJob, namespace: Namespace, fence: Wait | None) -> BlockLoad:
        blocks, page_tokens = self._blocks, self._fmt.page_tokens

        def copy(number: int, part: Shard, page: Bytes) -> None:
            assert blocks is not None
            skip = plan.skip_tokens if number == 0 else 0
            blocks.load_page(part, plan.block_ids, plan.first_token + number * page_tokens, page, skip)

        return BlockLoad(
            keys=plan.keys,
            view=partial(self._view, namespace),
            deadline_s=self._config.load_deadline_s,
            fence=fence,
            copy=copy if blocks is not None else None,
            plan=plan,
        )

    @contained(nothing)
    def before_step(self, metadata: StepMetadata) -> None:
        """Called before a step writes to any block: what saves read in those that it writes to is theirs no longer."""
        self._saver.before_step(metadata)

    @contained(nothing)
    def start_saves(self, metadata: StepMetadata) -> None:
        """Queue this step's saves; the forward pass that computes their pages has been launched."""
        jobs = [job for job in metadata.saves if not job.computed]
        if jobs:
            assert metadata.namespace is not None
            self._saver.submit(jobs, metadata.namespace)

    def transfer_results(self) -> KVConnectorTransferResults:
        """Loads and transfers that ended since the last step. A failed one is also in :meth:`take_failed_blocks`.

        A request that gets pages from the pool and the rest from another instance is reported when it has both.

        vLLM asks for this first, for statistics next and for the report last, so all that ended is collected here.
        """
        self._collect_saves()
        results = KVConnectorTransferResults()
        for load in self._loads.collect():
            req_id = load.plan.req_id
            self._loading.discard(req_id)
            self._arrived.add(req_id)
            self._count("load", load)
            self._stats.add("load_bytes", load.pages * self._fmt.nbytes)
            if load.cause:
                self._failed_blocks |= self._blocks_from(load.plan, load.pages)
                self._report.failed_loads.add(req_id)
                self._report.stalled |= load.cause == "deadline"
        if self.pd is not None:
            transfers = self.pd.take_ended(self._stats)
            results.finished_sending.update(transfers.sent)
            self._arrived |= transfers.fetched
            self._failed_blocks |= transfers.failed_blocks
            self._report.failed_transfers |= transfers.failed
        for req_id in self._arrived - self._loading:
            if self.pd is None or not self.pd.fetching(req_id):
                results.finished_recving.add(req_id)
        self._arrived -= results.finished_recving
        return results

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """Saves that ended and loads that failed since the last step; None where there is nothing to say."""
        if self._report.is_empty:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def _collect_saves(self) -> None:
        for save in self._saver.collect():
            self._count("save", save)
            self._stats.add("saved_pages", save.stored)
            self._stats.add("save_bytes", save.stored * self._fmt.nbytes)
            if save.lost:
                self._stats.add("overtaken_pages", len(save.lost))
            self._report.saves[save.plan.job_id] = save.result()

    def take_stats(self) -> ConnectorStats | None:
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, ConnectorStats()
        return stats

    def close(self) -> None:
        """Finish what runs, drop the rest, release the pool and the node; idempotent."""
        if self.pd is not None:
            self.pd.close()
        self._saver.stop(_STOP_S)
        self._loads.stop(_STOP_S)
        self._store.close()

    def _view(self, namespace: Namespace) -> ShardView | None:
        return self._store.view(namespace, self._shard, self._fmt.unit_nbytes)

    def _count(self, kind: str, job: Job) -> None:
        self._stats.add(f"{kind}s")
        self._stats.add(f"{kind}_seconds", job.seconds)
        if job.cause:
            self._stats.fail(f"{kind}_{_CAUSES.get(job.cause, job.cause)}")

    def _blocks_from(self, job: LoadJob, pages: int) -> set[int]:
        """The blocks of a load from the first page on that did not arrive; never those of a local hit."""
        page_tokens, block_tokens = self._fmt.page_tokens, self._geometry.block_tokens
        first = job.first_token + (pages * page_tokens if pages else job.skip_tokens)
        stop = job.first_token + len(job.keys) * page_tokens
        return set(job.block_ids[first // block_tokens : -(-stop // block_tokens)])
