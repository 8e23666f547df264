"""vLLM's own scheduler with the real connector, both sides, over a real pool; only the forward pass is pretended.

`Engine` does what vLLM's EngineCore, executor and model runner do around the connector, in their order: the worker
side is driven by vLLM's own code (the mixin of Model Runner V1, `ActiveKVConnector` of V2), the outputs of the ranks
are merged by vLLM's `KVOutputAggregator`, and what crosses processes in an engine is pickled here.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle
from settings import Setup, kv_cache_configs, vllm_config
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from worker import Worker, ours

from mooncake_connector.kv.keys import page_keys, root_digest
from vllm_plugin.messages import Ended, PDStep

PATIENCE_S = 60.0
"""An engine that has requests and does not get anywhere for so long fails its test."""
SHORTEST_S, LONGEST_S = 0.0005, 0.01
"""Of the pauses of an engine that waits: each step takes a core as long as a pause from those who are waited for."""

init_none_hash(sha256)


class Engine:
    """EngineCore's loop. One step at a time, or until nothing is left to do."""

    def __init__(self, setup: Setup, base: VllmConfig, pool: Path) -> None:
        self.setup = setup
        config = vllm_config(setup, base, pool)
        cache_config, worker_configs = kv_cache_configs(setup, config)
        block_tokens, hashed_tokens = resolve_kv_cache_block_sizes(cache_config, config)
        scheduler_class = AsyncScheduler if setup.async_scheduling else Scheduler
        self.scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_tokens,
            hash_block_size=hashed_tokens,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = setup.v2_runner
        self.connector = self.scheduler.connector
        self.workers = [
            Worker(setup, vllm_config(setup, base, pool, rank), worker_config, rank)
            for rank, worker_config in enumerate(worker_configs)
        ]
        self._shake_hands()
        self._aggregator = KVOutputAggregator.from_connector(self.connector, setup.num_ranks)
        self._hasher = get_request_block_hasher(hashed_tokens, sha256)
        self._queue: deque[tuple[SchedulerOutput, ModelRunnerOutput | None]] = deque()
        self._in_flight_limit = 2 if setup.async_scheduling else 1
        self.requests: dict[str, Request] = {}
        self.texts: dict[str, list[int]] = {}
        self.answers: dict[str, dict[str, Any] | None] = {}
        """`kv_transfer_params` of the last output of each request."""
        self.reasons: dict[str, str] = {}
        self.prefills: dict[str, Any] = {}
        """What vLLM says of each request's prompt: `PrefillStats`, of its first turn."""
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        """How often each request was reported as received or sent, by all workers together."""
        self.stats: list[Any] = []
        self.metadata: list[Any] = []
        self._pause_s = SHORTEST_S

    def _shake_hands(self) -> None:
        """What EngineCore does with what its workers say of themselves once their KV caches are registered."""
        metadata = {}
        for rank, worker in enumerate(self.workers):
            said = worker.connector.get_handshake_metadata()
            if said is not None:
                metadata[divmod(rank, self.setup.tp_size)] = pickle.loads(pickle.dumps(said))
        if metadata:
            self.connector.set_xfer_handshake_metadata_pp_aware(metadata)

    # Requests

    def add(self, prompt: Sequence[int], max_tokens: int = 3, *, name: str | None = None, **kwargs: Any) -> str:
        name = name or f"r{len(self.requests)}"
        stop = kwargs.pop("stop", ())
        extra = {key: kwargs.pop(key) for key in ("prompt_logprobs",) if key in kwargs}
        if "params" in kwargs:
            extra["extra_args"] = {"kv_transfer_params": copy.deepcopy(kwargs.pop("params"))}
        tokens = prompt if isinstance(prompt, list) else list(prompt)  # a list is the caller's, as inside its process
        request = Request(
            request_id=name,
            prompt_token_ids=None if "prompt_embeds" in kwargs else tokens,
            sampling_params=SamplingParams(max_tokens=max_tokens, stop_token_ids=list(stop), ignore_eos=True, **extra),
            pooling_params=None,
            block_hasher=self._hasher,
            **kwargs,
        )
        self.requests[name] = request
        self.texts[name], self.answers[name] = [], None
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        for request in self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED):
            self.reasons[request.request_id] = "abort"

    def answer(self, prompt: Sequence[int], max_tokens: int = 3, **kwargs: Any) -> str:
        """One request from its arrival to its answer; saves may go on. Its name."""
        name = self.add(prompt, max_tokens, **kwargs)
        self.run(until=lambda: name in self.reasons)
        return name

    def ask(self, prompt: Sequence[int], max_tokens: int = 3, **kwargs: Any) -> list[int]:
        """One request from its arrival to its end, all saves included."""
        name = self.add(prompt, max_tokens, **kwargs)
        self.run()
        return self.texts[name]

    def check(self, prompt: Sequence[int], max_tokens: int = 3, *, computed: int | None = None, **kwargs: Any) -> None:
        """As `ask`: the answer is the model's, so many tokens were computed for it (unless None), nothing is left."""
        self.finish(self.add(prompt, max_tokens, **kwargs), computed=computed)

    def check_all(self, prompts: Iterable[Sequence[int]], max_tokens: int = 3) -> list[str]:
        """The same for several at once; their names."""
        names = [self.add(prompt, max_tokens) for prompt in prompts]
        self.finish(*names)
        return names

    def finish(self, *names: str, computed: int | None = None) -> None:
        """Go on until nothing is left; these requests were answered as above."""
        self.run()
        for name in names:
            self.check_answer(name, computed)
        self.check_at_rest()

    def check_answer(self, name: str, computed: int | None = None) -> None:
        request = self.requests[name]
        weights = self.workers[0].runner.weights
        assert self.texts[name] == oracle.generate(request.prompt_token_ids, request.max_tokens, weights)
        assert computed in (None, self.computed(name)), f"computed {self.computed(name)} tokens"

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

    def pause(self, num_tokens: int) -> None:
        """Between steps: none where the last one did something, else longer each time."""
        if num_tokens:
            self._pause_s = SHORTEST_S
        else:
            time.sleep(self._pause_s)
            self._pause_s = min(1.5 * self._pause_s, LONGEST_S)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def drain(self) -> None:
        """Take the outputs of all steps under way."""
        while self._queue:
            self.end_step()

    def preempt(self) -> None:
        """All running requests, as vLLM does where weights change; with nothing in flight, which it asks for."""
        self.drain()
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def change_weights(self, *, start_over: bool = False) -> None:
        """As an RL loop does between two steps; requests that run start over, or go on with the KV that they have."""
        self.drain()
        for worker in self.workers:
            worker.runner.weights = 1
            for state in worker.runner.states.values() if start_over else ():
                state.seed, state.hashes = 1, []
        self.scheduler.reset_prefix_cache(reset_running_requests=start_over, reset_connector=True)

    def settle(self) -> None:
        """Wait until the connector's threads have nothing left to do."""
        end_s = time.monotonic() + PATIENCE_S
        while any(not job.over.is_set() for worker in self.workers for job in worker.jobs()):
            assert time.monotonic() < end_s, "a job of the connector hangs"
            time.sleep(0.0002)

    def begin_step(self) -> int | None:
        """Schedule and submit; None where nothing is left to do."""
        if not self.scheduler.has_requests():
            return None
        scheduled = self.scheduler.schedule()
        at_once = scheduled.has_sync_kv_loads and self.setup.transfer is None  # otherwise another connector may do so
        assert not at_once, "only asynchronous loads survive a failure with async scheduling"
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
                if one.prefill_stats is not None:
                    self.prefills[one.request_id] = one.prefill_stats
                if one.finish_reason is not None:
                    self.reasons[one.request_id] = str(one.finish_reason)
                    self.answers[one.request_id] = pickle.loads(pickle.dumps(one.kv_transfer_params))
            if core_outputs.scheduler_stats is not None:
                self.stats.append(core_outputs.scheduler_stats)
        if self.setup.drafts:
            self._propose(list(scheduled.num_scheduled_tokens))

    def _propose(self, names: list[str]) -> None:
        """Tokens for the next step of each of these, of which the first few are what the model will answer."""
        drafts = []
        for name in names:
            text = self.workers[0].runner.states[name].tokens
            drafts.append(oracle.generate(text, self.setup.drafts, self.workers[0].runner.weights))
            right = len(text) % (self.setup.drafts + 1)
            drafts[-1][right:] = [(token + 1) % oracle.VOCAB for token in drafts[-1][right:]]
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        sent = pickle.dumps(scheduled)
        outputs = [worker.execute(pickle.loads(sent)) for worker in self.workers]
        for output in outputs:
            if output.kv_connector_output is not None:
                self.received.update(output.kv_connector_output.finished_recving or ())
                self.sent.update(output.kv_connector_output.finished_sending or ())
                report = output.kv_connector_output.kv_connector_worker_meta
                output.kv_connector_output.kv_connector_worker_meta = pickle.loads(pickle.dumps(report))
        merged = self._aggregator.aggregate([copy.copy(output) for output in outputs])
        assert merged is not None
        return merged

    def run(self, until: Any = None) -> None:
        """Step until nothing is left to do (or until `until()`), saves of the idle engine included."""
        last_s, self._pause_s = time.monotonic(), SHORTEST_S
        while until is None or not until():
            num_tokens = self.step()
            if num_tokens < 0:
                assert until is None, "the engine went idle before what was waited for"
                return
            if num_tokens:
                last_s = time.monotonic()
            self.pause(num_tokens)
            assert time.monotonic() - last_s < PATIENCE_S, f"stuck: {self.scheduler.requests.keys()}"

    # What must hold afterwards

    @property
    def prefix(self) -> Any:
        """The scheduler side of prefix reuse in our connector, which may be one of several."""
        side = ours(self.connector)._scheduler
        return None if side is None else side.prefix

    @property
    def pd(self) -> Any:
        """The same of transfers between instances."""
        side = ours(self.connector)._scheduler
        return None if side is None else side.pd

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def check_at_rest(self) -> None:
        """No block, request or bookkeeping is left over."""
        assert not self.scheduler.has_requests()
        assert not self.scheduler.requests
        assert self.free_blocks() == self.setup.num_blocks - 1, "blocks leaked"
        if self.prefix is not None:
            assert not self.prefix._tracked and not self.prefix.accounts._unsaid
            saves = self.prefix.saves
            assert not (saves._under_way or saves._readers or saves._planned or saves._given_away)
        for worker in self.workers:
            assert not worker.connector.get_transfer_results(set()).finished_recving
        self._check_no_transfers()

    def _check_no_transfers(self) -> None:
        """Nothing is given away or awaited, and no memory is granted to anyone."""
        pd = self.pd
        if pd is None:
            return
        assert not pd._outgoing and not pd._incoming and pd._step == PDStep()
        end_s = time.monotonic() + PATIENCE_S
        for pd_worker in filter(None, (worker.pd for worker in self.workers)):
            node = pd_worker._node
            while True:
                held = node._serving.producer.held or node._serving._completions or node._fetching.consumer.held
                ended = Ended()
                pd_worker.take_ended(ended)
                assert ended == Ended(), f"reported with nobody waiting: {ended}"
                if not held and not pd_worker._transfers:
                    break
                assert time.monotonic() < end_s, "a node holds a transfer that the engine knows nothing of"
                time.sleep(0.001)
            assert not node._fetching._memory._grants

    def wait_until_forgotten(self) -> None:
        """The nodes know of no transfer any more: the time is over in which peers may ask for what became of one."""
        end_s = time.monotonic() + PATIENCE_S
        for worker in self.workers:
            node = worker.pd._node
            while node._serving.producer._transfers or node._fetching.consumer._transfers:
                assert time.monotonic() < end_s, "a node remembers a transfer"
                time.sleep(0.01)

    def shut_down(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.connector.shutdown()

    # The pool

    def pages(
        self, tokens: Sequence[int], *, salt: str | None = None, weights: int = 0, group: int | None = None
    ) -> list[bool]:
        """Which full pages of these tokens are in the pool, whole: in every rank's shard, with the right bytes.

        Args:
            group: position among the connector's groups; all of full attention by default.

        Raises:
            AssertionError: a page of the pool does not hold the KV of its key.
        """
        prefix, size = self.prefix, self.setup.page_tokens
        if group is None:
            every = [self.pages(tokens, salt=salt, weights=weights, group=one) for one in prefix._full]
            return [all(groups) for groups in zip(*every, strict=True)]
        keys = page_keys(tokens, size, root=root_digest(None, salt))
        hashes = oracle.chain(tokens, seed=weights)
        present = [True] * len(keys)
        numbers = prefix._geometry.groups[group].layers if prefix._geometry.is_hybrid else ()
        for view in prefix._views(group):
            layers = view.shard.layers if not numbers else numbers[view.shard.layer_start : view.shard.layer_stop]
            heads = range(view.shard.head_start, view.shard.head_stop)
            if prefix._geometry.groups[group].in_whole_blocks:
                heads = oracle.INDEXER
            if prefix._geometry.groups[group].kind == "state":
                num_slots = prefix._geometry.groups[group].k_dim // oracle.SLOT_NBYTES
                places = range(64 * heads.start, 64 * heads.start + num_slots)
                ends = oracle.slots(hashes[size - 1 :: size], layers, places)
                expected = [end.view(np.uint8).ravel() for end in np.ascontiguousarray(ends)]
            else:
                expected = [
                    oracle.canonical_page(hashes[i * size : (i + 1) * size], layers, heads, mla=self.setup.mla)
                    for i in range(len(keys))
                ]

            def check(index: int, page: Any, expected: list[Any] = expected) -> None:
                assert bytes(page) == bytes(expected[index]), f"page {index} of {len(keys)} holds other KV"

            if keys:
                found = getattr(view.own, "_inner", view.own).read(keys, check, nbytes=expected[0].nbytes)
                present = [a and b for a, b in zip(present, found, strict=True)]
        return present

    def num_pages(self) -> int:
        """Pages in the pool, of all namespaces and shards."""
        return int(self.prefix._store.store.stats().pages)
