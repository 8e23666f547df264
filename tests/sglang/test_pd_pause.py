"""A pause in mode `retract` of the prefill instance: what was sent is never of pages that SGLang gives away.

Scheduler, radix tree, allocator and request are SGLang's own; the scheduler has only what these of its functions use.
"""

from __future__ import annotations

from array import array
from collections import deque
from types import MethodType, SimpleNamespace
from unittest.mock import MagicMock

import torch
from pd_cases import D_PAGES
from pd_instances import PAGE, PREFILL, Decode, Pair, Prefill, check
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.managers.io_struct import PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_backend.pd.pause import exchanging_first

_REAL = (
    "process_batch_result", "process_batch_result_disagg_prefill", "process_prefill_chunk", "checkpoint_disagg_prefill",
    "check_bootstrap", "send_kv_chunk", "_send_kv_chunk",
)  # fmt: skip
_PROMPT = 4 * PAGE
_CHUNK = 2 * PAGE


class Instance:
    """A scheduler with overlap that computes prompts into the pages of a prefill rank."""

    def __init__(self, pair: Pair) -> None:
        self.pool = pair.prefill.ranks[0].pool
        self.allocator = PagedTokenToKVPoolAllocator(self.pool.size, PAGE, torch.bfloat16, "cpu", self.pool, False)
        self.rows = ReqToTokenPool(4, 64, "cpu", False)
        self.tree = RadixCache(CacheInitParams(False, self.rows, self.allocator, PAGE))
        self.scheduler = made = MagicMock()
        made.disaggregation_mode, made.enable_overlap, made.enable_staging = PREFILL, True, False
        made.tree_cache, made.req_to_token_pool, made.token_to_kv_pool_allocator = self.tree, self.rows, self.allocator
        made.kv_checksum_computer = made.decode_offload_manager = None
        made.running_batch = SimpleNamespace(reqs=[], batch_is_full=False)
        made.disagg_prefill_bootstrap_queue.kv_manager.kv_args.state_types = []
        made.spec_algorithm.is_eagle.return_value = False
        for name in _REAL:
            setattr(made, name, MethodType(getattr(Scheduler, name), made))

    def begin(self, row: int, sender: object = None) -> Req:
        """The first chunk of the prompt is being computed, into pages of its own."""
        params = SamplingParams(max_new_tokens=1)
        req = Req(f"r{row}", "", array("q", range(1, _PROMPT + 1)), params, bootstrap_room=7, vocab_size=100)
        req.kv.req_pool_idx, req.disagg_kv_sender, req.metadata_buffer_index = row, sender, 1
        req.refresh_fill_ids()
        self.extend(req, _CHUNK)
        return req

    def extend(self, req: Req, stop: int) -> None:
        start, req.extend_end = req.prefix_len, stop
        slots = self.allocator.alloc(stop - start)
        assert slots is not None
        self.rows.write((req.kv.req_pool_idx, slice(start, stop)), slots)
        req.kv.kv_allocated_len = stop
        req.inflight_middle_chunks += stop < _PROMPT
        batch = MagicMock(reqs=[req], forward_mode=ForwardMode.EXTEND)
        batch.is_dllm.return_value = False
        result = MagicMock(copy_done=None, next_token_ids=torch.tensor([5]), logits_output=None)
        batch.spec_info = result.next_draft_input
        self.scheduler.last_batch, self.scheduler.result_queue = batch, deque([(batch, result)])
        self.scheduler.chunked_req = req if stop < _PROMPT else None

    def pages(self, req: Req) -> list[int]:
        return (self.rows.req_to_token[req.kv.req_pool_idx, : req.extend_end : PAGE] // PAGE).tolist()

    def pause(self) -> None:
        hooked = exchanging_first(lambda: True)
        hooked(Scheduler.pause_generation, self.scheduler, PauseGenerationReqInput(mode="retract"))

    def go_on(self, req: Req) -> None:
        """After the pause: the step between two chunks, and the next one."""
        self.scheduler.process_prefill_chunk(self.scheduler.last_batch, self.scheduler.running_batch)
        self.extend(req, _PROMPT)

    def compute(self, *requests: list[int]) -> None:
        """KV of the same tokens for each of these pages."""
        for each in (*self.pool.k_buffer, *self.pool.v_buffer):
            by_page = each.view(-1, PAGE, *each.shape[1:])
            kv = torch.randn(len(requests[0]), *by_page.shape[1:])
            for pages in requests:
                by_page[pages] = kv.to(each.dtype)


def test_pages_that_are_sent_in_a_pause_are_those_that_the_request_keeps(pair: Pair) -> None:
    instance = Instance(pair)
    other = instance.begin(1)  # the same prompt; its chunk is published first
    instance.scheduler.checkpoint_disagg_prefill(other)
    prefill = Prefill(pair.prefill, pair.address, pair.room(), [0] * 4)
    decode = Decode(pair.decode, pair.address, prefill.room, D_PAGES)
    prefill.admit()
    req = instance.begin(2, prefill.parties[0])
    own = instance.pages(req)
    instance.compute(own, instance.pages(other))
    instance.pause()
    decode.run(pair.address)
    instance.go_on(req)
    kept = instance.pages(req)
    assert kept[:2] == instance.pages(other) != own
    instance.compute([*kept[2:], *{*own}.difference(kept)])  # the rest, and another request whose pages they are by now
    for rank in pair.prefill.ranks:
        rank.aux.bootstrap_room[1] = rank.aux.output_ids[1] = prefill.room
    (batch, result) = instance.scheduler.result_queue.popleft()
    instance.scheduler.process_batch_result(batch, result)
    prefill.pages = kept
    assert decode.until() == KVPoll.Success, decode.failed()
    check(prefill, decode)
    decode.clear()
    prefill.expected = tuple(range(KVPoll.Failed, KVPoll.Success + 1))
    assert prefill.until() == KVPoll.Success
    prefill.clear()
