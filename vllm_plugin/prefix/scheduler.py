"""The scheduler side of prefix reuse: which pages of a request are in the pool, and when to look for pages to store.

Runs inside vLLM's scheduler step, so it only reads the pool's index (microseconds, no lock) and never waits
while anything is computed. Where the pool has tiers behind it, a request's pages are asked for as soon as it arrives;
those that are coming are promised to vLLM like those that are there, and the load waits for them. Saves are planned
in :mod:`vllm_plugin.prefix.save_planner`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING

from mooncake_connector.config.schema import Config
from mooncake_connector.contain import contained, nothing
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.misses import Miss
from mooncake_connector.prefill_speed import PrefillSpeed
from store_client.base import Store
from store_client.missing import fate_of
from store_client.open import open_in_background
from store_client.sharded import ShardView
from vllm_plugin.adapter_files import Signature
from vllm_plugin.geometry import Geometry
from vllm_plugin.identity import config_digest, instance_namespace
from vllm_plugin.messages import LoadJob, StepMetadata, WorkerReport
from vllm_plugin.naming import AdapterKeys, chain_root, names_media
from vllm_plugin.prefix.account import Accounts
from vllm_plugin.prefix.announced import AnnouncedPages
from vllm_plugin.prefix.groups_hit import GroupsHit
from vllm_plugin.prefix.kept import Keeper
from vllm_plugin.prefix.lookups import Lookups
from vllm_plugin.prefix.save_planner import SavePlanner
from vllm_plugin.prefix.sizes import log_sizes
from vllm_plugin.prefix.states import StatePlanner
from vllm_plugin.prefix.tracked import Offer, Tracked
from vllm_plugin.stats import ConnectorStats
from vllm_plugin.weights.scheduler import WeightsInMemory

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_IDENTITY_WAIT_S = 2.0
"""How long start-up waits for the model's fingerprint; a large model is hashed on in the background."""
_LOOKS_A_PAGE = 4
"""While all only decode, a request takes page_tokens steps to fill a page, and looking at every request in each of
them would cost 2% of the step: so many looks are enough. A request that ends in between is looked at then."""


class PrefixScheduler:
    """See the module; `stats` takes what is counted."""

    def __init__(self, vllm_config: VllmConfig, geometry: Geometry, config: Config, stats: ConnectorStats) -> None:
        self._geometry = geometry
        self._page_tokens = int(config.page_tokens)
        self._tiered = bool(config.tiers)
        self._min_hit_tokens = config.effective_min_hit_tokens
        self._shards = [group.shards() for group in geometry.groups]
        self._full = [position for position, group in enumerate(geometry.groups) if group.kind == "full"]
        self._unit_nbytes = [
            group.page_format(shards[0], self._page_tokens).unit_nbytes
            for group, shards in zip(geometry.groups, self._shards, strict=True)
        ]
        self._tracked: dict[str, Tracked] = {}
        self._metadata = StepMetadata()
        events = vllm_config.kv_events_config
        publishes = events is not None and events.enable_kv_cache_events
        groups = GroupsHit(geometry, self._page_tokens) if geometry.is_hybrid else None
        self.saves = SavePlanner(
            geometry, groups, self._page_tokens, num_workers=geometry.num_ranks, publishes=publishes
        )
        self._states = StatePlanner(geometry, config, proposes=vllm_config.speculative_config is not None)
        self._announced = AnnouncedPages() if publishes else None
        self._decode_steps = 0
        self._stats = stats
        self._lookups = Lookups(config, stats, groups)
        lora = vllm_config.lora_config
        self._adapters = AdapterKeys(lora and lora.target_modules)
        self._names_media = names_media(vllm_config)
        self._nameless = set[str]()
        self.weights = WeightsInMemory(
            geometry.num_ranks,
            lambda read: read.digest(config_digest(vllm_config), geometry.tp_size, geometry.pp_size),
        )
        self._max_batches = vllm_config.max_concurrent_batches
        """Steps that may be planned before the outcome of the first of them is known, and that one."""
        self.speed = PrefillSpeed(self._page_tokens, self._max_batches)
        self._doubtful_steps = 0
        self._begins = False
        """Whether a request has been given its turn since the last step was planned."""
        parallel = vllm_config.parallel_config
        self._is_alone = parallel.data_parallel_size == parallel.pipeline_parallel_size == 1
        """Nobody else waits for this instance's steps, and none is under way that the last one does not show."""
        self._listened = False
        """Whether a word of the agent was waited for since the last step was planned."""
        self._computing: Collection[str] = ()
        """What the last step computes."""
        self._namespace: Namespace | None = None
        """By the model's files."""
        self._renamed: Namespace | None = None
        """By the weights in memory, where they are others."""

        def identify() -> None:  # may read all weights
            self._namespace = instance_namespace(vllm_config, geometry, config)

        @contained(nothing)
        def opened(store: Store) -> None:
            num_blocks = vllm_config.cache_config.num_gpu_blocks or 0
            log_sizes(store.stats().capacity_nbytes, geometry, self._page_tokens, num_blocks)
            if (namespace := self.namespace()) is not None:  # asks which shards tiers have, before the first request
                store.shards_elsewhere(self._geometry.group_namespace(namespace, 0))

        self._store = open_in_background(config, identify, opened)
        self._keeper = Keeper(self._store, self._page_tokens)
        self._keeps = config.log_requests
        self.accounts = Accounts(config, stats, self.speed, self._keeper)
        self._store.wait(_IDENTITY_WAIT_S)

    # Lookup and load

    def track(self, request: Request) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            lora = request.lora_request
            if lora is not None and self._adapters.used(lora):
                self._adapter_replaced(lora)
            named = self._names_media or not request.mm_features
            root = chain_root(request, self._adapters) if named else None
            tracked = self._tracked[request.request_id] = Tracked(request, root)
        return tracked

    def adapter_files(self, lora: LoRARequest) -> Signature | None:
        """What an adapter's files say, which the workers are about to load."""
        return self._adapters.look(lora)

    def adapter_loaded(self, lora: LoRARequest, signature: Signature | None) -> None:
        """The workers have loaded an adapter, if they did not have it; `signature`: what its files said before."""
        if self._adapters.loaded(lora, signature):
            self._adapter_replaced(lora)

    def _adapter_replaced(self, lora: LoRARequest) -> None:
        """Who began with the one whose place it takes goes on with this one, and then has KV of both."""
        for tracked in self._tracked.values():
            former = tracked.request.lora_request
            if former is not None and former.lora_int_id == lora.lora_int_id:
                self._lose_name(tracked)

    def _lose_name(self, tracked: Tracked) -> None:
        tracked.root = None
        self._nameless.add(tracked.request.request_id)

    def take_nameless(self) -> Collection[str]:
        """Requests whose KV turned out not to be what their name says, since the last call."""
        nameless, self._nameless = self._nameless, set()
        return nameless

    def own_cache_emptied(self) -> None:
        """vLLM has forgotten all KV of its own."""
        self.weights.own_cache_emptied()
        self._adapters.own_cache_emptied()

    def announce(self, request: Request) -> None:
        """Have the tiers bring what the pool lacks of a prompt, long before the request's turn.

        What vLLM's own cache has of it is not known yet; the pool has that too, as a rule.
        """
        num_pages = request.num_prompt_tokens // self._page_tokens
        if not self._tiered or num_pages * self._page_tokens < max(1, self._min_hit_tokens):
            return
        tracked = self.track(request)
        views = self._views()
        if tracked.root is None or not views or self._lookups.stalled:
            return
        keys = tracked.page_keys(num_pages, self._page_tokens)
        for view in views:
            view.prefetch(keys, prefill_tokens_s=self.speed.tokens_s)
        if not self._geometry.is_hybrid:
            tracked.known_pages = self._lookups.leading(keys, views).pages
            return
        here = self._lookups.offer(tracked, None, 0, self._views, fetch=False)
        tracked.known_pages = here.tokens // self._page_tokens
        self._lookups.offer(tracked, None, 0, self._views, fetch=True, tokens_s=self.speed.tokens_s)

    def matched_tokens(
        self, request: Request, num_computed_tokens: int, *, fetch: bool = True
    ) -> tuple[int | None, bool]:
        """Tokens in the pool or on their way there beyond the local hit, loaded asynchronously; (0, False) for none.

        (None, False) while more may come, which makes vLLM put the request aside until its next step: for at most
        `lookup_wait_s` in the life of a request. No side effect, but that the tiers are asked for what is missing;
        where not `fetch` they are not, and only what is there counts.
        """
        beyond = request.num_prompt_tokens // self._page_tokens * self._page_tokens - num_computed_tokens
        if (tracked := self._tracked.get(request.request_id)) is None:
            tracked = self.track(request)
        else:
            self._check_adapter(tracked, {})  # it may have waited for long
        tracked.local_tokens = num_computed_tokens
        former, tracked.offer = tracked.offer, None  # which may be of a shorter local hit
        tracked.unasked = self._unasked(tracked, beyond)
        if tracked.unasked is not None:
            return (None if tracked.unasked is Miss.UNAVAILABLE and self.weights.is_worth_a_wait() else 0), False
        computes = self._computes()

        def look(former: Offer | None) -> tuple[Offer, bool]:
            offer = tracked.offer = self._lookups.offer(
                tracked, former, num_computed_tokens, self._views,
                fetch=fetch or not self._tiered, tokens_s=self.speed.tokens_s,
            )  # fmt: skip
            return offer, self._lookups.is_worth_a_wait(tracked, offer, self.speed.step_s if computes else 0.0)

        offer, waits = look(former)
        if waits and not computes and self._listens():
            offer, waits = look(None)
        if waits:
            return None, False
        self._states.ask_for(tracked)
        if offer.tokens < self._min_hit_tokens:
            return 0, False
        return offer.tokens, True

    def _unasked(self, tracked: Tracked, beyond: int) -> Miss | None:
        """Why the pool is not asked for a request with so many tokens in full pages `beyond` the local hit."""
        if tracked.root is None:
            return Miss.NOT_CACHED
        if tracked.refused:
            return Miss.LOAD_FAILED
        if beyond < self._min_hit_tokens:
            return Miss.SHORT if beyond < self._page_tokens else Miss.BELOW_MIN_HIT
        if not self._views():
            return Miss.UNAVAILABLE
        return Miss.STALLED if self._lookups.stalled else None

    def _computes(self) -> bool:
        """Whether the step that is being planned computes anything, as far as can be told: something that the last one
        computed goes on, or something new has its turn."""
        return self._begins or any(req_id in self._tracked for req_id in self._computing)

    def _listens(self) -> bool:
        """Wait for the agent's word, once in a step that computes nothing: vLLM would sleep for as long before it asks
        again. False where that must not be."""
        if self._listened or not (self._tiered and self._is_alone) or self._lookups.stalled:
            return False
        self._listened = True
        self._store.await_word()
        return True

    def offered(self, request: Request) -> int:
        """Tokens beyond the local hit that the last lookup of a request found in the pool."""
        tracked = self._tracked.get(request.request_id)
        return 0 if tracked is None or tracked.offer is None else tracked.offer.tokens

    def give_away(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Blocks beyond the local hit may be written from now on, by a load that no step's output will show."""
        tracked = self._tracked.get(request.request_id)
        num_local = 0 if tracked is None else request.num_computed_tokens or tracked.local_tokens
        self.saves.give_away(blocks.get_block_ids(), num_local)

    def after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_from_pool: int, num_elsewhere: int = 0
    ) -> None:
        """Blocks were allocated: plan the load of the tokens that the pool is to bring.

        Args:
            num_from_pool: tokens beyond the local hit that vLLM waits for from here.
            num_elsewhere: those behind them that another instance brings.
        """
        tracked = self.track(request)
        offer, tracked.offer = tracked.offer, None
        self._begins = self._begins or not num_from_pool
        if not request.num_computed_tokens:  # vLLM will count what anybody loads before it is there
            tracked.loading = (0, 0)
        if offer is not None:
            if num_from_pool:
                self._plan_load(tracked, blocks, offer, num_from_pool)
            if offer.unheard:
                self._stats.add("tier_unheard")
            num_local_pages = offer.local_tokens // self._page_tokens
            self._record(num_local_pages, offer.tokens // self._page_tokens, request.num_prompt_tokens)
        if self._keeps and not tracked.counted:
            self._keeper.look(tracked, self.namespace(), self._views())
        self.accounts.open(
            tracked, offer, num_from_pool, num_elsewhere, lambda page: fate_of(self._views(), tracked.keys[page])
        )

    def _plan_load(self, tracked: Tracked, blocks: KVCacheBlocks, offer: Offer, num_external_tokens: int) -> None:
        page_tokens, num_local = self._page_tokens, offer.local_tokens
        stop = (num_local + num_external_tokens) // page_tokens
        end = (num_local + offer.tokens) // page_tokens
        tracked.loading = (num_local, num_local + num_external_tokens)
        tables = blocks.get_block_ids()
        for position, group in enumerate(self._geometry.groups):
            table = tables[group.index]
            start = num_local
            if group.kind != "full":  # the null block stands where nothing is attended to any more
                nulls = next((number for number, block_id in enumerate(table) if block_id), len(table))
                start = max(start, nulls * group.block_tokens)
            if group.kind == "state":  # the one at the end of the hit
                start = max(start, group.first_kept(stop * page_tokens))
            first = start // page_tokens
            if first >= stop:
                continue
            here = end - offer.coming.get(position, 0)
            self._metadata.loads.append(
                LoadJob(
                    req_id=tracked.request.request_id,
                    keys=tracked.keys[first:stop],
                    first_token=first * page_tokens,
                    skip_tokens=start - first * page_tokens,
                    block_ids=list(table),
                    num_coming=max(0, stop - max(here, first)),
                    group=position,
                )
            )

    # Save

    def build(self, scheduled: SchedulerOutput) -> StepMetadata:
        """The jobs of this step: loads planned above, and saves of the pages that this step completes."""
        metadata, self._metadata = self._metadata, StepMetadata()
        self._begins, self._listened, self._computing = False, False, scheduled.num_scheduled_tokens
        self._add_saves(scheduled, metadata)
        metadata.read_weights = self.weights.ask(computes=bool(scheduled.total_num_scheduled_tokens))
        if metadata.loads or metadata.saves:
            metadata.namespace = self.namespace()
        return metadata

    @contained(nothing)
    def _add_saves(self, scheduled: SchedulerOutput, metadata: StepMetadata) -> None:
        """A failure costs the saves planned so far, whose blocks may be others' by the next step, and no load."""
        try:
            self._start(scheduled)
            self.speed.planned(scheduled.total_num_scheduled_tokens, len(scheduled.num_scheduled_tokens))
            self.saves.look_at(scheduled)
            if self._completes_pages(scheduled):
                self._plan_saves(scheduled)
            if self._states.any and self._views():
                for tracked, position, page, block_id in self._states.completed(scheduled, self._tracked):
                    self.saves.plan_state(tracked, position, page, block_id)
            metadata.saves, metadata.given_away = self.saves.take()
        except BaseException:
            self.saves.drop()
            raise

    def _plan_saves(self, scheduled: SchedulerOutput) -> None:
        named = dict[int, bool]()
        for req_id, num_tokens in scheduled.num_scheduled_tokens.items():
            tracked = self._tracked.get(req_id)
            if tracked is None:
                continue
            num_computed_tokens = tracked.request.num_computed_tokens + num_tokens
            if num_computed_tokens >= (tracked.saved_pages + 1) * self._page_tokens and self._views():
                self._check_adapter(tracked, named)
                self.saves.plan(tracked, num_computed_tokens)

    def _check_adapter(self, tracked: Tracked, named: dict[int, bool]) -> None:
        """Workers may have read an adapter's files again since; `named`: those that have been looked at now."""
        lora = tracked.request.lora_request
        if lora is None or tracked.root is None:
            return
        if lora.lora_int_id not in named:
            named[lora.lora_int_id] = self._adapters.key(lora) is not None
        if not named[lora.lora_int_id]:
            self._lose_name(tracked)

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
                self._lose_name(tracked)
            lora = tracked.request.lora_request
            stale = self.weights.taints or (lora is not None and self._adapters.is_stale(lora))
            if stale and tracked.local_tokens:
                self._lose_name(tracked)

    def _completes_pages(self, scheduled: SchedulerOutput) -> bool:
        """Whether to look for pages to save: after every prefill, and now and then while all only decode."""
        if scheduled.total_num_scheduled_tokens > len(scheduled.num_scheduled_tokens):
            return True
        self._decode_steps += 1
        return self._decode_steps % (self._page_tokens // _LOOKS_A_PAGE) == 0

    def finished(self, request: Request) -> None:
        """Plan the save of what is complete and was not looked at yet; vLLM frees the blocks after this."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self._check_adapter(tracked, {})
        if tracked.loading is None and self._views():
            self.saves.plan(tracked, request.num_computed_tokens, computed=True)

    # Results

    def update(self, output: KVConnectorOutput) -> None:
        """Take in what the workers report: saves that ended, loads that ended or failed."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            for job_id, result in report.saves.items():
                self.saves.ended(job_id, result)
            self._lookups.loads_failed(stalled=report.stalled, not_landed=report.not_landed)
            for req_id in report.failed_loads.keys() & self._tracked.keys():
                self._tracked[req_id].refused = True
            self.accounts.reported(report, self._tracked)
        for req_id in output.finished_recving or ():
            tracked = self._tracked.get(req_id)
            if tracked is not None and tracked.loading is not None:
                _, stop = tracked.loading
                tracked.loading = None
                if not tracked.refused:
                    tracked.saved_pages = max(tracked.saved_pages, stop // self._page_tokens)
                self.accounts.close(tracked)
        for req_id in output.finished_sending or ():
            self.accounts.say(req_id)

    def count_failures(self) -> None:
        """Enter what this process did not get from behind the pool."""
        self._stats.fail_each(self._store.take_failures())

    def take_events(self) -> list[KVCacheEvent]:
        """What to publish: pages that all workers have stored, and announced pages that are gone."""
        if self._announced is None or self.weights.unknown:  # what is due waits for the name of its pages
            return []
        events, namespace = self.saves.take_events(), self.namespace()
        digest = b"" if namespace is None else self._geometry.group_namespace(namespace, 0).digest
        return events + self._announced.follow(self._store.store, digest, self._views(), events)

    def reset(self) -> bool:
        """Read nothing any more that is in the pool (vLLM's `reset_prefix_cache(reset_connector=True)`).

        It is called where weights are changed in memory, before or after, so the model's files may no longer say what
        KV is computed with. The pool keeps its pages, which are right for whoever has those weights.
        """
        if self.weights.watched:
            self.weights.may_be_others()
        else:
            self.weights.make_private()
        self.forget(computed=True)
        return True

    def forget(self, *, computed: bool) -> None:
        """Other weights have another namespace.

        Args:
            computed: with the former ones, so far: a request that goes on with it is left alone.
        """
        self.saves.reset()
        for tracked in self._tracked.values():
            tracked.saved_pages, tracked.offer = 0, None
            if computed and tracked.request.num_computed_tokens:
                tracked.root = None

    def close(self) -> None:
        self._adapters.close()
        self._store.close()

    def namespace(self) -> Namespace | None:
        """This instance's namespace; None while it is not known who the model is, or which weights are in memory."""
        if self._namespace is None or self.weights.unknown:
            return None
        name = self.weights.name
        if name is None:
            return self._namespace
        if self._renamed is None or self._renamed.model_digest != name:
            self._renamed = dataclasses.replace(self._namespace, model_digest=name)
        return self._renamed

    def _views(self, group: int | None = None) -> list[ShardView]:
        """What each rank sees of a group in the pool, or (None) of all of full attention: a page is there if it is in
        all of them. Nothing while the pool or the identity of the model is not there yet.
        """
        namespace = self.namespace()
        if namespace is None:
            return []
        views = []
        for position in self._full if group is None else (group,):
            own, nbytes = self._geometry.group_namespace(namespace, position), self._unit_nbytes[position]
            views += [self._store.view(own, shard, nbytes) for shard in self._shards[position]]
        return [] if None in views else views  # type: ignore[return-value]

    def _record(self, num_local_pages: int, hit_pages: int, num_prompt_tokens: int) -> None:
        views = self._views()
        if views:
            missed = num_prompt_tokens // self._page_tokens - num_local_pages - hit_pages
            views[0].record_lookup(hit_pages=hit_pages, missed_pages=max(missed, 0), page_tokens=self._page_tokens)
