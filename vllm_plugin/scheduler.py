"""The scheduler half: which pages of a request are in the pool, and which full pages are to be stored.

Runs inside vLLM's scheduler step, so it only reads the pool's index (microseconds, no lock) and never waits. Source
blocks of a save are pinned by a reference count of vLLM's own block pool until every worker has reported the save, so
neither preemption nor an abort can give them to another request meanwhile.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockStored, KVCacheEvent

from mooncake_connector.config import Config
from mooncake_connector.contain import contained, nothing
from mooncake_connector.keys import page_keys
from mooncake_connector.log import get_logger
from mooncake_connector.namespace import Namespace
from store_client.pool import Pool
from store_client.shards import ShardView
from vllm_plugin.adapters import AdapterKeys
from vllm_plugin.geometry import Geometry
from vllm_plugin.messages import LoadJob, SaveJob, StepMetadata, WorkerReport
from vllm_plugin.naming import chain_root, named_tokens
from vllm_plugin.stats import ConnectorStats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_LOOKUP_REUSE_S = 0.05
"""A request that waits for blocks is asked about every step; its last lookup serves for so long."""
_WORTH_WAITING_S = 0.05
"""vLLM waits for pinned blocks instead of preempting only while the oldest pin is younger than this."""
_LOOKS_A_PAGE = 4
"""While all only decode, a request takes page_tokens steps to fill a page, and looking at every request in each of
them would cost 2% of the step: so many looks are enough. A request that ends in between is looked at then."""
_STALL_PAUSE_S = 30.0
"""After a load that was given up at its deadline the pool is not offered for so long: each further one would wait as
long for nothing."""
_PINNED_SHARE = 4
"""At most one block in so many is pinned by saves: a stuck pool must not take the engine's memory."""

logger = get_logger(__name__)


@dataclass(slots=True)
class Tracked:
    """What the scheduler half knows of one request.

    Args:
        root: chain root, or None for a request whose KV has no name (prompt embeddings, say).
        keys: page keys known so far.
        saved_pages: leading pages that are in the pool or on their way there.
        offer: (local tokens, tokens offered beyond them, when) of the last lookup.
        loading: (first token, end) of what the pool brings to blocks that no step has used yet; None once one has, or
            the load has ended. It may be nothing: another source brings more, or all, and does not say so here.
        refused: a load failed; the pool is not offered to this request again.
    """

    request: Request
    root: bytes | None
    keys: list[bytes] = field(default_factory=list)
    saved_pages: int = 0
    offer: tuple[int, int, float] | None = None
    loading: tuple[int, int] | None = None
    refused: bool = False


@dataclass(slots=True)
class PinnedSave:
    """A save in flight.

    Args:
        block_ids: blocks that it pins.
        workers: how many have yet to report it.
        pages: fewest pages that a worker has in the pool.
        event: what to publish when all pages are in the pool; None where nobody listens.
        since_s: when it was planned.
    """

    block_ids: list[int]
    workers: int
    pages: int
    event: BlockStored | None
    since_s: float


class SchedulerHalf:
    """See the module.

    Args:
        pool: whose `prepared` is this instance's namespace once the weights are known.
        publishes: whether vLLM publishes KV events.
        max_batches: steps that may be planned before the outcome of the first of them is known, and that one.
    """

    def __init__(
        self, geometry: Geometry, config: Config, pool: Pool, *, publishes: bool, max_batches: int
    ) -> None:
        self._geometry = geometry
        self._page_tokens = int(config.page_tokens)
        self._min_hit_tokens = config.effective_min_hit_tokens
        self._pool = pool
        self._shards = geometry.shards()
        self._unit_nbytes = geometry.unit_nbytes(self._page_tokens)
        self._world_size = geometry.tp_size * geometry.pp_size
        self._tracked: dict[str, Tracked] = {}
        self._metadata = StepMetadata()
        self._pinned: dict[int, PinnedSave] = {}
        self._num_pinned_blocks = 0
        self._decode_steps = 0
        self._backlog = False
        self._next_job_id = 0
        self._publishes = publishes
        self._events: list[KVCacheEvent] = []
        self._stats = ConnectorStats()
        self._adapters = AdapterKeys()
        self._manager: KVCacheManager | None = None
        self._reset_digest: str | None = None
        self._stalled_until_s = 0.0
        self._max_batches = max_batches
        self._doubtful_steps = 0

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    # Lookup and load

    def track(self, request: Request) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = Tracked(request, chain_root(request, self._adapters))
        return tracked

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens in the pool beyond the local hit, loaded asynchronously; (0, False) for none. No side effect."""
        page_tokens = self._page_tokens
        beyond = request.num_prompt_tokens // page_tokens * page_tokens - num_computed_tokens
        tracked = self.track(request)
        offer, tracked.offer = tracked.offer, None  # which may be of a shorter local hit
        views = self._views()
        if beyond < self._min_hit_tokens or tracked.root is None or tracked.refused or not views:
            return 0, False
        now_s = time.monotonic()
        if now_s < self._stalled_until_s:
            return 0, False
        if offer is None or offer[0] != num_computed_tokens or now_s - offer[2] > _LOOKUP_REUSE_S:
            first = num_computed_tokens // page_tokens
            keys = self._keys(tracked, request.num_prompt_tokens // page_tokens)[first:]
            pages = min(view.prefix(keys) for view in views)
            tokens = (first + pages) * page_tokens - num_computed_tokens
            offer = (num_computed_tokens, max(tokens, 0), now_s)
        tracked.offer = offer
        if offer[1] < self._min_hit_tokens:
            return 0, False
        return offer[1], True

    def offered(self, request: Request) -> int:
        """Tokens beyond the local hit that the last lookup of a request found in the pool."""
        tracked = self._tracked.get(request.request_id)
        return 0 if tracked is None or tracked.offer is None else tracked.offer[1]

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, num_from_pool: int) -> None:
        """Blocks were allocated: plan the load of the tokens that the pool is to bring.

        Args:
            num_from_pool: tokens beyond the local hit that vLLM waits for from here; others may bring more.
        """
        tracked = self.track(request)
        offer, tracked.offer = tracked.offer, None
        if not request.num_computed_tokens:  # vLLM will count what anybody loads before it is there
            tracked.loading = (0, 0)
        if offer is None:
            return
        num_local, offered, _ = offer
        if num_from_pool:
            self._plan_load(tracked, blocks, num_local, num_from_pool)
        self._stats.add("queried_tokens", request.num_prompt_tokens - num_local)
        self._record(num_local // self._page_tokens, offered // self._page_tokens, request.num_prompt_tokens)

    def _plan_load(self, tracked: Tracked, blocks: KVCacheBlocks, num_local: int, num_external_tokens: int) -> None:
        page_tokens = self._page_tokens
        first = num_local // page_tokens
        stop = (num_local + num_external_tokens) // page_tokens
        tracked.loading = (num_local, num_local + num_external_tokens)
        self._metadata.loads.append(
            LoadJob(
                req_id=tracked.request.request_id,
                keys=tracked.keys[first:stop],
                first_token=first * page_tokens,
                skip_tokens=num_local - first * page_tokens,
                block_ids=list(blocks.get_block_ids()[0]),
            )
        )

    # Save

    def build(self, scheduled: SchedulerOutput) -> StepMetadata:
        """The jobs of this step: loads planned above, and saves of the pages that this step completes."""
        self._start(scheduled)
        if self._completes_pages(scheduled):
            page_tokens = self._page_tokens
            for req_id, num_tokens in scheduled.num_scheduled_tokens.items():
                tracked = self._tracked.get(req_id)
                if tracked is None:
                    continue
                num_computed_tokens = tracked.request.num_computed_tokens + num_tokens
                if num_computed_tokens >= (tracked.saved_pages + 1) * page_tokens:
                    self._plan_save(tracked, num_computed_tokens)
        metadata, self._metadata = self._metadata, StepMetadata()
        if metadata.loads or metadata.saves:
            metadata.namespace = self.namespace()
        return metadata

    def _start(self, scheduled: SchedulerOutput) -> None:
        """Requests that start or resume in this step have their blocks filled up to where it computes.

        Unless another connector fills them in this very step. Which ones is not said here, vLLM gives them to others
        as a local hit from now on, and it hears of a failure after more was planned: whatever starts with tokens until
        then is left alone.
        """
        self._doubtful_steps = self._max_batches if scheduled.has_sync_kv_loads else max(0, self._doubtful_steps - 1)
        resumed = scheduled.scheduled_cached_reqs.resumed_req_ids
        for req_id in (*(new.req_id for new in scheduled.scheduled_new_reqs), *resumed):
            tracked = self._tracked.get(req_id)
            if tracked is None:
                continue
            tracked.loading = None
            if self._doubtful_steps and tracked.request.num_computed_tokens:
                tracked.root = None

    def _completes_pages(self, scheduled: SchedulerOutput) -> bool:
        """Whether to look for pages to save: after every prefill, and now and then while all only decode."""
        if self._backlog or scheduled.total_num_scheduled_tokens > len(scheduled.num_scheduled_tokens):
            self._backlog = False
            return True
        self._decode_steps += 1
        return self._decode_steps % (self._page_tokens // _LOOKS_A_PAGE) == 0

    def finished(self, request: Request) -> None:
        """Plan the save of pages that the last step completed; their blocks are pinned before vLLM frees them."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None and tracked.loading is None:
            self._plan_save(tracked, request.num_computed_tokens)

    @contained(nothing)
    def _plan_save(self, tracked: Tracked, num_computed_tokens: int) -> None:
        """Save the full pages among the first `num_computed_tokens`, as far as their tokens are known for good.

        Draft tokens and the placeholders of asynchronous scheduling are not among `num_tokens`.
        """
        request = tracked.request
        num_pages = min(num_computed_tokens, request.num_tokens) // self._page_tokens
        first = tracked.saved_pages
        if num_pages <= first or tracked.root is None or self._manager is None or not self._views():
            return
        page_tokens, block_tokens = self._page_tokens, self._geometry.block_tokens
        start = first * page_tokens // block_tokens
        pool = self._manager.block_pool
        room = (start + self._blocks_to_pin(pool.num_gpu_blocks)) * block_tokens // page_tokens
        if room < num_pages:
            self._stats.fail("save_backlog")
            self._backlog = True
            num_pages = room  # the rest at a later step, when saves have ended
        if num_pages <= first:
            return
        stop = -(-num_pages * page_tokens // block_tokens)
        block_ids = self._manager.get_block_ids(request.request_id)[0][start:stop]
        if len(block_ids) < stop - start or not all(block_ids):  # block 0 is vLLM's null block
            return
        keys = self._keys(tracked, num_pages)
        job = SaveJob(
            job_id=self._next_job_id,
            keys=keys[first:num_pages],
            parent=keys[first - 1] if first else None,
            first_token=first * page_tokens - start * block_tokens,
            block_ids=list(block_ids),
        )
        self._next_job_id += 1
        tracked.saved_pages = num_pages
        event = self._stored_event(request, job, first * page_tokens, num_pages * page_tokens)
        pool.touch([pool.blocks[block_id] for block_id in job.block_ids])
        self._pinned[job.job_id] = PinnedSave(job.block_ids, self._world_size, len(job.keys), event, time.monotonic())
        self._num_pinned_blocks += len(job.block_ids)
        self._metadata.saves.append(job)

    def _blocks_to_pin(self, num_blocks: int) -> int:
        """How many blocks further saves may pin; room for one page is always there when nothing is pinned."""
        one_page = -(-self._page_tokens // self._geometry.block_tokens) + 1
        return max(num_blocks // _PINNED_SHARE, one_page) - self._num_pinned_blocks

    def _stored_event(self, request: Request, job: SaveJob, start: int, stop: int) -> BlockStored | None:
        if not self._publishes:
            return None
        lora = request.lora_request
        return BlockStored(
            block_hashes=list(job.keys),
            parent_block_hash=job.parent,
            token_ids=list(request.all_token_ids[start:stop]),
            block_size=self._page_tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
        )

    def _unpin(self, job_id: int) -> None:
        save = self._pinned.pop(job_id)
        self._num_pinned_blocks -= len(save.block_ids)
        assert self._manager is not None
        pool = self._manager.block_pool
        pool.free_blocks(pool.blocks[block_id] for block_id in reversed(save.block_ids))

    # Results

    def update(self, output: KVConnectorOutput) -> None:
        """Take in what the workers report: saves that ended, loads that ended or failed."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            for job_id, (workers, pages) in report.saves.items():
                self._saved(job_id, workers, pages)
            if report.stalled:
                self._stalled_until_s = time.monotonic() + _STALL_PAUSE_S
            for req_id in report.failed_loads:
                if req_id in self._tracked:
                    self._tracked[req_id].refused = True
        for req_id in output.finished_recving or ():
            tracked = self._tracked.get(req_id)
            if tracked is not None and tracked.loading is not None:
                start, stop = tracked.loading
                tracked.loading = None
                if not tracked.refused:
                    self._stats.add("hit_tokens", stop - start)
                    tracked.saved_pages = max(tracked.saved_pages, stop // self._page_tokens)

    def _saved(self, job_id: int, workers: int, pages: int) -> None:
        save = self._pinned.get(job_id)
        if save is None:
            return
        save.workers -= workers
        save.pages = min(save.pages, pages)
        if save.workers <= 0:
            self._unpin(job_id)
            if save.event is not None and save.pages == len(save.event.block_hashes):
                self._events.append(save.event)

    def has_pinned_blocks(self) -> bool:
        """Saves hold blocks: the engine must go on stepping to get them back."""
        return bool(self._pinned)

    def frees_blocks_soon(self) -> bool:
        """Whether waiting for pinned blocks beats preempting a request: saves take milliseconds, unless stuck.

        Blocks that a request holds as well do not come back with the save.
        """
        oldest = next(iter(self._pinned.values()), None)
        if self._manager is None or oldest is None or time.monotonic() - oldest.since_s >= _WORTH_WAITING_S:
            return False
        blocks = self._manager.block_pool.blocks
        return any(blocks[block_id].ref_cnt == 1 for save in self._pinned.values() for block_id in save.block_ids)

    def take_events(self) -> Iterable[KVCacheEvent]:
        events, self._events = self._events, []
        return events

    def take_stats(self) -> ConnectorStats | None:
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, ConnectorStats()
        return stats

    def reset(self) -> bool:
        """Forget what the pool holds for this instance (vLLM's `reset_prefix_cache(reset_connector=True)`).

        It is called after weights were changed in memory, so the model's files no longer say what the KV was computed
        with: from now on pages go to a namespace of this instance's own. A request that goes on with KV of the old
        weights is left alone, and so are saves that no worker has been told of.
        """
        for view in self._views():  # it waits for the pool's lock, which the scheduler must not
            threading.Thread(target=view.clear, name="mooncake-connector-clear", daemon=True).start()
        self._reset_digest = f"reset-{uuid.uuid4().hex}"
        for job in self._metadata.saves:
            self._unpin(job.job_id)
        self._metadata.saves.clear()
        for tracked in self._tracked.values():
            tracked.saved_pages, tracked.offer = 0, None
            if tracked.request.num_computed_tokens:
                tracked.root = None
        if self._publishes:
            self._events.append(AllBlocksCleared())
        return True

    def close(self) -> None:
        self._adapters.close()
        self._pool.close()

    def namespace(self) -> Namespace | None:
        """This instance's namespace; None while the identity of the model is not there yet."""
        namespace = self._pool.prepared
        if namespace is not None and self._reset_digest not in (None, namespace.model_digest):
            namespace = self._pool.prepared = dataclasses.replace(namespace, model_digest=self._reset_digest)
        return namespace

    def _views(self) -> list[ShardView]:
        """What each rank sees of the pool; nothing while the pool or the identity of the model is not there yet."""
        namespace = self.namespace()
        if namespace is None:
            return []
        views = [self._pool.view(namespace, shard, self._unit_nbytes) for shard in self._shards]
        return [] if None in views else views  # type: ignore[return-value]

    def _keys(self, tracked: Tracked, num_pages: int) -> list[bytes]:
        keys, page_tokens = tracked.keys, self._page_tokens
        if len(keys) < num_pages:
            tokens = named_tokens(tracked.request, len(keys) * page_tokens, num_pages * page_tokens)
            parent = keys[-1] if keys else None
            keys += page_keys(tokens, page_tokens, root=tracked.root or b"", parent=parent)
        return keys

    def _record(self, num_local_pages: int, hit_pages: int, num_prompt_tokens: int) -> None:
        views = self._views()
        if views:
            missed = num_prompt_tokens // self._page_tokens - num_local_pages - hit_pages
            views[0].record_lookup(hit_pages=hit_pages, missed_pages=max(missed, 0), page_tokens=self._page_tokens)
