"""Which pages are saved from which blocks, and which of these blocks vLLM has given to somebody else since.

A save holds no block. Whoever gets one that a save still reads is found in what vLLM says of each step: the workers are
told before anything is written to it, and do not store what they copied later (:mod:`vllm_plugin.prefix.saver`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockStored, KVCacheEvent

from mooncake_connector.contain import contained, nothing
from vllm_plugin.geometry import Geometry, Group
from vllm_plugin.messages import SaveJob, SaveResult
from vllm_plugin.prefix.groups_hit import GroupsHit
from vllm_plugin.prefix.tracked import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_COLLECT_S = 1.0
"""An engine that ran out of requests goes on stepping for so long, to hear how its last saves ended."""


@dataclass(slots=True)
class _Plan:
    """Saves of the same pages of a request, of all its groups.

    Args:
        first_page: number of the first of these pages in the request.
        saves: those that not all workers have reported.
        whole: whether all that ended have all their pages in the pool.
        event: what to publish when all pages are there; None where nobody listens.
    """

    tracked: Tracked
    first_page: int
    event: BlockStored | None
    saves: int = 0
    whole: bool = True


@dataclass(slots=True)
class _Save:
    """A save that not all workers have reported.

    Args:
        first_page: number of its first page in the request.
        workers: how many have yet to report it.
        result: what those that have say together.
    """

    plan: _Plan
    job: SaveJob
    first_page: int
    workers: int
    result: SaveResult | None = None


class SavePlanner:
    """See the module.

    Args:
        hit: what of groups that keep a part of a text only is of use later.
        num_workers: that report each save.
        publishes: whether vLLM publishes KV events.
    """

    def __init__(
        self, geometry: Geometry, hit: GroupsHit | None, page_tokens: int, *, num_workers: int, publishes: bool
    ) -> None:
        self._page_tokens, self._groups, self._hit = page_tokens, geometry.groups, hit
        self._num_workers, self._publishes = num_workers, publishes
        self._zeroes_blocks = geometry.zeroes_blocks
        self._manager: KVCacheManager | None = None
        self._planned: list[SaveJob] = []
        self._under_way: dict[int, _Save] = {}
        self._readers: Counter[int] = Counter()
        """Block -> how many of these saves read it."""
        self._given_away: set[int] = set()
        self._next_job_id = 0
        self._idle_since_s: float | None = None
        self._events: list[KVCacheEvent] = []

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    @contained(nothing)
    def plan(self, tracked: Tracked, num_computed_tokens: int, *, computed: bool = False) -> None:
        """Save the full pages among the first `num_computed_tokens`, as far as their tokens are known for good.

        Draft tokens and the placeholders of asynchronous scheduling are not among `num_tokens`.

        Args:
            computed: the steps planned so far compute them; otherwise the one that is being planned does.
        """
        request, first = tracked.request, tracked.saved_pages
        num_pages = min(num_computed_tokens, request.num_tokens) // self._page_tokens
        if num_pages <= first or tracked.root is None or self._manager is None:
            return
        tables = self._manager.get_block_ids(request.request_id)
        keys = tracked.page_keys(num_pages, self._page_tokens)
        jobs = []
        for position, group in enumerate(self._groups):
            table = tables[group.index]
            if group.kind == "state":  # vLLM says which block holds one (`StatePlanner`)
                continue
            if group.kind == "full":
                if not self._is_whole(table, group, first, num_pages):
                    return
                runs = [(first, num_pages)]
            else:
                runs = self._needed(tracked, position, table, first, num_pages)
            jobs += [(start, self._job(keys, position, table, start, stop, computed)) for start, stop in runs]
        plan = _Plan(tracked, first, self._stored_event(request, keys, first, num_pages))
        for start, job in jobs:
            self._submit(plan, job, start)
        tracked.saved_pages = num_pages
        self._idle_since_s = None

    def plan_state(self, tracked: Tracked, position: int, page: int, block_id: int) -> None:
        """Save the state behind a page of a request, from the block that this step leaves it in."""
        key = tracked.page_keys(page + 1, self._page_tokens)[page]
        self._next_job_id += 1
        job = SaveJob(
            job_id=self._next_job_id,
            keys=[key],
            parent=None,  # the page before has no state
            first_token=0,
            block_ids=[block_id],
            computed=False,
            group=position,
        )
        self._submit(_Plan(tracked, page + 1, None), job, page + 1)  # pages are not saved again for its sake
        self._idle_since_s = None

    def _submit(self, plan: _Plan, job: SaveJob, first_page: int) -> None:
        plan.saves += 1
        self._planned.append(job)
        self._under_way[job.job_id] = _Save(plan, job, first_page, self._num_workers)
        self._readers.update(job.block_ids)

    def _is_whole(self, table: Sequence[int], group: Group, first: int, stop: int) -> bool:
        """Whether a block table has the blocks of pages `[first, stop)`; block 0 is vLLM's null block."""
        start, end = self._blocks_of(group, first, stop)
        return len(table) >= end and all(table[start:end])

    def _blocks_of(self, group: Group, first: int, stop: int) -> tuple[int, int]:
        page_tokens, block_tokens = self._page_tokens, group.block_tokens
        return first * page_tokens // block_tokens, -(-stop * page_tokens // block_tokens)

    def _needed(
        self, tracked: Tracked, position: int, table: Sequence[int], first: int, stop: int
    ) -> list[tuple[int, int]]:
        """Runs of pages of a group that keeps a part of a text only: those that somebody may go on from, where there.

        What a window has left behind was computed all the same, but its blocks are others' by now.
        """
        assert self._hit is not None
        request, group = tracked.request, self._groups[position]
        parted = [*tracked.junctions, *filter(None, [request.shared_prefix_boundary])]
        kept = self._hit.kept(position, first, stop, self._hit.boundaries(request.num_prompt_tokens, parted))
        runs: list[tuple[int, int]] = []
        for page in range(first, stop):
            if (kept is None or kept[page - first]) and self._is_whole(table, group, page, page + 1):
                if runs and runs[-1][1] == page:
                    runs[-1] = (runs[-1][0], page + 1)
                else:
                    runs.append((page, page + 1))
        return runs

    def _job(
        self, keys: list[bytes], position: int, table: Sequence[int], first: int, stop: int, computed: bool
    ) -> SaveJob:
        """Save pages `[first, stop)` of a group."""
        group = self._groups[position]
        start, end = self._blocks_of(group, first, stop)
        self._next_job_id += 1
        return SaveJob(
            job_id=self._next_job_id,
            keys=keys[first:stop],
            parent=keys[first - 1] if first and group.kind == "full" else None,
            first_token=first * self._page_tokens - start * group.block_tokens,
            block_ids=list(table[start:end]),
            computed=computed,
            group=position,
        )

    def _stored_event(self, request: Request, keys: list[bytes], first: int, stop: int) -> BlockStored | None:
        if not self._publishes:
            return None
        lora = request.lora_request
        return BlockStored(
            block_hashes=keys[first:stop],
            parent_block_hash=keys[first - 1] if first else None,
            token_ids=list(request.all_token_ids[first * self._page_tokens : stop * self._page_tokens]),
            block_size=self._page_tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
        )

    # Blocks that are given away

    def give_away(self, block_ids: Sequence[Sequence[int]], num_tokens: int) -> None:
        """These blocks are a request's from the coming step on, which writes to those beyond so many tokens, or loads
        into them."""
        if self._readers:
            beyond = self._beyond(block_ids, num_tokens)
            self._given_away.update(block_id for block_id in beyond if block_id in self._readers)

    def look_at(self, scheduled: SchedulerOutput) -> None:
        """Note what the requests of a step write to: their own new blocks, never those of a local hit.

        What a block is copied to (where a request goes on inside a shared one) may be in nobody's new blocks.
        """
        if scheduled.total_num_scheduled_tokens:
            self._idle_since_s = None
        if not self._readers:
            return
        for new in scheduled.scheduled_new_reqs:
            self.give_away(new.block_ids, new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for req_id, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if block_ids is not None:  # all of a request that resumes, or those that one that runs gets in addition
                self.give_away(block_ids, num_computed if req_id in cached.resumed_req_ids else 0)
        targets = (copied.dst_block_id for copied in scheduled.kv_cache_block_copies or ())
        self._given_away.update(block_id for block_id in targets if block_id in self._readers)

    def _beyond(self, block_ids: Sequence[Sequence[int]], num_tokens: int) -> Iterator[int]:
        for group in self._groups:
            yield from block_ids[group.index][num_tokens // group.block_tokens :]

    def take(self) -> tuple[list[SaveJob], frozenset[int]]:
        """What was planned since the last step, and the blocks that saves of steps before it must not read any more."""
        planned, self._planned = self._planned, []
        given_away, self._given_away = self._given_away, set()
        if self._zeroes_blocks:  # before the workers could read them
            late = [job for job in planned if job.computed and not given_away.isdisjoint(job.block_ids)]
            planned = [job for job in planned if job not in late]
            for job in late:
                self.ended(job.job_id, SaveResult(self._num_workers, 0))
        return planned, frozenset(given_away)

    def drop(self) -> None:
        """Forget what was planned since the last step: no worker is told of it."""
        for job in self._planned:
            self._forget(job.job_id)
        self._planned.clear()

    # Results

    def ended(self, job_id: int, result: SaveResult) -> None:
        """Some workers are through with a save. Pages that were overtaken may be planned again, where there is KV."""
        save = self._under_way.get(job_id)
        if save is None:
            return
        save.workers -= result.workers
        save.result = result = result if save.result is None else save.result.merge(result)
        if save.workers > 0:
            return
        self._forget(job_id)
        plan = save.plan
        plan.saves -= 1
        plan.whole &= result.pages == len(save.job.keys)
        if plan.event is not None and plan.whole and not plan.saves:
            self._events.append(plan.event)
        if result.overtaken is not None:  # an event that is due names all pages
            again = plan.first_page if plan.event is not None else save.first_page + result.overtaken
            plan.tracked.saved_pages = min(plan.tracked.saved_pages, again)

    def _forget(self, job_id: int) -> None:
        for block_id in self._under_way.pop(job_id).job.block_ids:
            self._readers[block_id] -= 1
            if not self._readers[block_id]:
                del self._readers[block_id]

    def wants_steps(self) -> bool:
        """Whether an engine without requests is to go on: reports and events are collected by steps only.

        Not for long, since nothing waits for them. The last step with requests may have taken any time.
        """
        if not (self._under_way or self._events):
            return False
        if self._idle_since_s is None:
            self._idle_since_s = time.monotonic()
        return time.monotonic() - self._idle_since_s < _COLLECT_S

    def take_events(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Forget what no worker has been told of: it would be saved in the namespace of other weights.

        What they save just now belongs to the namespace that it was planned in, which nobody here reads any more.
        """
        self.drop()
        for save in self._under_way.values():
            save.plan.event = None
        if self._publishes:
            self._events.append(AllBlocksCleared())
            self._idle_since_s = None
