"""The worker side of prefix reuse: moves pages between this rank's KV blocks and the pool.

Pages go through two movers (:mod:`store_client.mover`), one for loads and one for saves (:mod:`saver`), and the forward
pass waits for neither.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from mooncake_connector.config.schema import Config
from mooncake_connector.contain import contained, nothing
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, log_once
from store_client.base import Bytes
from store_client.jobs import LATE, NOT_LANDED, Job, Load
from store_client.mover import Mover
from store_client.open import open_in_background
from store_client.sharded import ShardView
from transfer.device_order import Wait
from vllm_plugin.kv_memory import DeviceMark, KVMemory
from vllm_plugin.messages import Ended, LoadJob, SaveResult, StepMetadata, Timing
from vllm_plugin.prefix.saver import Saver
from vllm_plugin.stats import ConnectorStats

logger = get_logger(__name__)

_CAUSES = {"busy": "pool_refused", "refused": "pool_refused"}
"""What the metrics call why a job ended, where it is not the job's own word."""
_IN_VAIN = "other_group"
"""Why a load was given up whose request lacks another group's pages; that failure is counted, and this is none."""
_STOP_S = 2.0
"""Longest wait for a running job at shutdown; the engine kills its processes after a few seconds."""


@dataclass(slots=True, kw_only=True, eq=False)
class BlockLoad(Load):
    """A load into the blocks of one request and group of layers."""

    plan: LoadJob


class PrefixWorker:
    """See the module; `stats` takes what is counted."""

    def __init__(self, memory: KVMemory, config: Config, stats: ConnectorStats) -> None:
        self._memory, self._config, self._stats = memory, config, stats
        self._store = open_in_background(config)
        self._loads: Mover[BlockLoad] = Mover("load")
        self._saver = Saver(self._view, memory, deadline_s=config.save_deadline_s)
        self._loading: Counter[str] = Counter()
        """Request -> its groups with pages on their way from the pool."""
        self._idle: set[str] = set()
        """Those of which this rank loads nothing: it has no layers of the groups that their pages are of."""
        self._failed: set[str] = set()
        """Those that are loading, of models with several groups, of which one could not be loaded."""
        self._store.wait(1.0)

    def registered(self) -> None:
        """The engine's memory is there: what lies in the pool may be copied by its device."""
        if (locks := self._memory.locks) is not None:
            self._store.lock_memory(locks)

    def stop(self, cause: str) -> None:
        """Touch no KV memory any more when this returns."""
        for load in self._loads.pending:
            load.give_up(cause)
        self._saver.give_away(None)
        if (wait := self._memory.record()) is not None:
            wait()

    @contained(nothing)
    def start(self, metadata: StepMetadata) -> None:
        """Queue this step's loads; a forward pass under way may still write to their blocks for whom they were."""
        if not metadata.loads:
            return
        assert metadata.namespace is not None
        fence = self._memory.record()
        for plan in metadata.loads:
            if plan.group in self._memory.groups:
                self._loading[plan.req_id] += 1
                self._loads.submit(self._load(plan, metadata.namespace, fence))
        self._idle.update(plan.req_id for plan in metadata.loads if plan.req_id not in self._loading)

    def _load(self, plan: LoadJob, namespace: Namespace, fence: Wait | None) -> BlockLoad:
        memory = self._memory.groups[plan.group]
        pages, page_tokens = memory.device_pages, memory.fmt.page_tokens
        blocks = pages or memory.blocks

        def copy(number: int, part: Shard, page: Bytes) -> None:
            assert blocks is not None
            skip = plan.skip_tokens if number == 0 else 0
            blocks.load_page(part, plan.block_ids, plan.first_token + number * page_tokens, page, skip)

        return BlockLoad(
            keys=plan.keys,
            view=partial(self._view, namespace, plan.group),
            deadline_s=self._config.load_deadline_s,
            fence=fence,
            passed=fence.passed if isinstance(fence, DeviceMark) else None,
            copy=copy if blocks is not None else None,
            settle=None if pages is None else pages.settle_loads,
            plan=plan,
            num_coming=plan.num_coming,
        )

    @contained(nothing)
    def before_step(self, metadata: StepMetadata) -> None:
        """Called before a step writes to any block: what saves read in those that it writes to is theirs no longer."""
        self._saver.before_step(metadata)

    @contained(nothing)
    def step_computed(self, metadata: StepMetadata) -> None:
        """Queue this step's saves; the forward pass that computes their pages has been launched."""
        jobs = [job for job in metadata.saves if not job.computed]
        if jobs:
            assert metadata.namespace is not None
            self._saver.submit(jobs, metadata.namespace)

    def take_ended(self, ended: Ended) -> None:
        """Enter loads and saves that ended since the last call."""
        ended.arrived |= self._idle
        self._idle = set()
        ended.report.saves |= self._saver.take_idle()
        for save in self._saver.take_ended():
            self._count("save", save)
            self._stats.add("saved_pages", save.stored)
            self._stats.add("save_bytes", save.stored * save.memory.fmt.nbytes)
            if save.lost:
                self._stats.add("overtaken_pages", len(save.lost))
            ended.report.saves[save.plan.job_id] = save.result()
        loads = self._loads.take_ended()
        if self._loads.stuck:
            ended.report.stalled = True
            said = "a load is long past its deadline, and its device may still write: its request waits, others compute"
            log_once("load.stuck", said, logger=logger)
        failed = {load.plan.req_id for load in loads if load.cause}
        if failed and self._memory.geometry.is_hybrid:  # the other groups of a request are loaded in vain
            for load in self._loads.pending:
                if load.plan.req_id in failed:
                    load.give_up(_IN_VAIN, wait=False)  # one that moves pages comes to its own end
            loads += self._loads.take_ended()
        for load in loads:
            self._take_load(load, ended)

    def _take_load(self, load: BlockLoad, ended: Ended) -> None:
        plan, req_id = load.plan, load.plan.req_id
        self._count("load", load)
        self._stats.add("load_bytes", load.pages * self._memory.groups[plan.group].fmt.nbytes)
        self._count_promised(load)
        if self._config.log_requests:
            ended.report.took(req_id, Timing(load_s=load.seconds))
        if load.cause:
            ended.report.failed_load(req_id, self._kept(plan, load.pages))
            refused = load.cause in ("copy", "paused") and self._loads.paused
            ended.report.stalled |= refused or load.cause == "deadline"
            ended.report.not_landed |= load.cause == NOT_LANDED
            if load.cause in LATE:
                ended.report.late.add(req_id)
            if self._memory.geometry.is_hybrid:
                self._failed.add(req_id)
            else:
                ended.failed_blocks |= self._blocks_from(plan, load.pages)
        self._loading[req_id] -= 1
        if not self._loading[req_id]:
            del self._loading[req_id]
            ended.arrived.add(req_id)
            if req_id in self._failed:
                self._failed.remove(req_id)
                ended.refused.add(req_id)

    def fills(self, req_id: str) -> bool:
        """Whether blocks of a request may still be written to by a load."""
        return req_id in self._loading

    def count_failures(self) -> None:
        """Enter what this process did not get from behind the pool, and what its device was refused."""
        self._stats.fail_each(self._store.take_failures())
        if (locks := self._memory.locks) is not None:
            self._stats.fail_each(locks.take_failures())

    def close(self) -> None:
        """Finish what runs, drop the rest, release the pool; idempotent."""
        self._saver.stop(_STOP_S)
        self._loads.stop(_STOP_S)
        self._store.close()

    def _view(self, namespace: Namespace, group: int) -> ShardView | None:
        memory = self._memory.groups[group]
        own = self._memory.geometry.group_namespace(namespace, group)
        return self._store.view(own, memory.shard, memory.fmt.unit_nbytes)

    def _count_promised(self, load: BlockLoad) -> None:
        """What became of the pages that were on their way when the load was planned."""
        if load.num_coming:
            landed = max(0, load.pages - (len(load.keys) - load.num_coming))
            self._stats.add("tier_promised_pages", load.num_coming)
            self._stats.add("tier_landed_pages", landed)
            self._stats.add("tier_lost_pages", load.num_coming - landed)

    def _count(self, kind: str, job: Job) -> None:
        self._stats.add(f"{kind}s")
        self._stats.add(f"{kind}_seconds", job.seconds)
        self._stats.took(f"{kind}_duration_seconds", job.seconds)
        if job.cause and job.cause != _IN_VAIN:
            self._stats.fail(f"{kind}_{_CAUSES.get(job.cause, job.cause)}")

    def _blocks_from(self, job: LoadJob, pages: int) -> set[int]:
        """The blocks of a load from the first page on that did not arrive; never those of a local hit."""
        block_tokens = self._memory.geometry.groups[job.group].block_tokens
        stop = job.first_token + len(job.keys) * self._memory.page_tokens
        return set(job.block_ids[self._first_lost(job, pages) // block_tokens : -(-stop // block_tokens)])

    def _first_lost(self, job: LoadJob, pages: int) -> int:
        """The first token that a load did not bring of which so many pages arrived."""
        return job.first_token + (pages * self._memory.page_tokens if pages else job.skip_tokens)

    def _kept(self, job: LoadJob, pages: int) -> int:
        """The token up to which vLLM goes on with what such a load brought: of several groups with nothing of it."""
        if self._memory.geometry.is_hybrid:
            return 0
        block_tokens = self._memory.geometry.groups[job.group].block_tokens
        return self._first_lost(job, pages) // block_tokens * block_tokens


class RefusingWorker:
    """In place of :class:`PrefixWorker` where only the worker knows that this instance's KV cannot be used.

    The scheduler sees a simplified description of the KV cache (one spec a group where the worker has one a layer), so
    it may plan loads and saves all the same. Each of them ends here at once, as failed: a load that nobody answers
    would keep its request waiting for ever.
    """

    def __init__(self) -> None:
        self._loads: set[str] = set()
        self._saves: dict[int, SaveResult] = {}

    def before_step(self, metadata: StepMetadata) -> None:
        """No save reads a block."""

    def start(self, metadata: StepMetadata) -> None:
        self._loads.update(job.req_id for job in metadata.loads)

    def count_failures(self) -> None:
        """No store is open."""

    def step_computed(self, metadata: StepMetadata) -> None:
        self._saves.update({job.job_id: SaveResult(1, 0) for job in metadata.saves})

    def take_ended(self, ended: Ended) -> None:
        for refused in (ended.arrived, ended.refused):
            refused |= self._loads
        ended.report.failed_loads.update(dict.fromkeys(self._loads, 0))
        ended.report.saves.update(self._saves)
        self._loads, self._saves = set(), {}

    def fills(self, req_id: str) -> bool:
        return False

    def registered(self) -> None:
        """No store is open."""

    def stop(self, cause: str) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing was opened."""
