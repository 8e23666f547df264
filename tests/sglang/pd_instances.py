"""Prefill and decode instances of SGLang's own pools and of our managers, in one process and without a server.

A `Prefill` or `Decode` request is polled as SGLang's scheduler polls it: the ranks' answers are reduced to the least,
and a state that a queue of the scheduler does not expect fails the test, as it would end the scheduler.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from instances import server
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    MetadataBuffers,
    get_kv_transfer_buf_infos,
    setup_state_kv_args,
)
from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel
from simulated.waiting import wait_for

from sglang_backend.pd import manager as manager_module
from sglang_backend.pd.manager import MooncakeConnectorKVBootstrapServer, MooncakeConnectorKVManager
from sglang_backend.pd.requests import MooncakeConnectorKVReceiver, MooncakeConnectorKVSender

LAYERS, HEADS, DIM, PAGE = 2, 4, 8, 4
PAGES = 16
PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE

_thread = threading.local()


class _Group:
    """The world of some ranks, each in a thread: `pp` stages of `tp` ranks."""

    def __init__(self, tp: int, pp: int = 1) -> None:
        self.tp, self.pp, self.world_size = tp, pp, tp * pp
        self._given: list[Any] = [None] * self.world_size
        self._barrier = threading.Barrier(self.world_size)

    @property
    def rank_in_group(self) -> int:
        return _thread.rank

    def broadcast_object(self, mine: Any, src: int) -> Any:
        """What the rank of stage `src` gives to those below it; every rank of the world calls it."""
        return self.all_gather_object(mine)[src * self.tp + _thread.rank % self.tp]

    def all_gather_object(self, mine: Any) -> list[Any]:
        self._given[_thread.rank] = mine
        self._barrier.wait(120)
        found = list(self._given)
        self._barrier.wait(120)
        return found


class _Parallel:
    """SGLang's own answers, but for what differs between the ranks that share this process."""

    def __getattr__(self, name: str) -> Any:
        rank, group = getattr(_thread, "rank", 0), getattr(_thread, "group", _Group(1))
        own = {
            "attn_tp_size": group.tp, "attn_tp_rank": rank % group.tp, "tp_rank": rank % group.tp, "attn_cp_rank": 0,
            "attn_dp_rank": 0, "pp_size": group.pp, "world_group": group, "pp_group": group,
        }  # fmt: skip
        return own[name] if name in own else getattr(get_parallel(), name)


@contextmanager
def running(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[None]:
    """What SGLang knows of its server, for the instances inside; `settings` are of the connector."""
    for name, value in {"model_id": "m", **settings}.items():
        monkeypatch.setenv(f"MOONCAKE_CONNECTOR_{name.upper()}", str(value))
    described = SimpleNamespace(
        num_attention_layers=LAYERS,
        get_total_num_kv_heads=lambda: HEADS,
        hf_config=SimpleNamespace(architectures=["Tiny"]),
    )
    monkeypatch.setattr(manager_module, "ModelConfig", SimpleNamespace(from_server_args=lambda _: described))
    for module in (conn, manager_module):
        monkeypatch.setattr(module, "get_parallel", _Parallel)
    with server("qwen3", disaggregation_mode="prefill", page_size=PAGE):
        yield


def mha_pool(heads: int = HEADS, layers: int = LAYERS, pages: int = PAGES, page: int = PAGE) -> MHATokenToKVPool:
    return MHATokenToKVPool(pages * page, page, torch.bfloat16, heads, DIM, layers, "cpu", False)


def metadata(rows: int = 8, top: int = 16) -> MetadataBuffers:
    """Aux rows as SGLang makes them, only narrower."""
    return MetadataBuffers(rows, 16, torch.float32, 16, top)


def kv_args(
    pool: KVCache, aux: MetadataBuffers, rank: int = 0, draft: KVCache | None = None, layers: int = LAYERS
) -> KVArgs:
    """As SGLang's queues describe a rank's memory to their manager."""
    args = KVArgs()
    args.engine_rank, args.pp_rank, args.system_dp_rank, args.rust_http_port = rank, 0, 0, None
    args.kv_cache_dtype_str, args.page_size = "auto", pool.page_size
    infos = [list(each) for each in get_kv_transfer_buf_infos(pool)]
    if draft is not None:
        more = draft.get_contiguous_buf_infos()
        infos = [mine + list(theirs) for mine, theirs in zip(infos, more, strict=True)]
        args.num_draft_entries = len(more[0])
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = infos
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = aux.get_buf_infos()
    setup_state_kv_args(args, pool, draft, layers)
    return args


class Rank:
    """One rank: its pool, its aux rows, its manager."""

    def __init__(self, mode: DisaggregationMode, rank: int, group: _Group, page: int) -> None:
        stage, num_layers = rank // group.tp, LAYERS // group.pp
        self.layers = range(stage * num_layers, (stage + 1) * num_layers)
        self.pool, self.aux = mha_pool(HEADS // group.tp, num_layers, page=page), metadata()
        args = kv_args(self.pool, self.aux, rank % group.tp)
        args.pp_rank, args.prefill_start_layer = stage, self.layers.start
        self.manager = MooncakeConnectorKVManager(args, mode, None, False)

    @property
    def kv(self) -> list[torch.Tensor]:
        """Of each of its layers K and V, as `[page, token, head, dim]`, to be read and written."""
        of_layers = [*self.pool.k_buffer, *self.pool.v_buffer]
        return [each.view(-1, self.pool.page_size, *each.shape[1:]) for each in of_layers]

    def fill(self, value: float) -> None:
        for each in self.kv:
            each.fill_(value)

    def snapshot(self) -> list[torch.Tensor]:
        return [each.clone() for each in self.kv]


class Instance:
    """The ranks of a prefill or of a decode instance."""

    def __init__(self, mode: DisaggregationMode, tp: int = 1, port: int = 0, page: int = PAGE, pp: int = 1) -> None:
        self.mode, group = mode, _Group(tp, pp)

        def make(rank: int) -> Rank:
            _thread.rank, _thread.group = rank, group
            return Rank(mode, rank, group, page)

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(group.world_size) as ranks:
            if mode is PREFILL:
                patch.setattr(conn, "get_disagg", _with_port(conn.get_disagg(), port))
            self.ranks = list(ranks.map(make, range(group.world_size)))
        self.stages = [self.ranks[first : first + tp] for first in range(0, group.world_size, tp)]

    def buffer(self, number: int) -> list[torch.Tensor]:
        """Of the model's layers K, then V: buffer `number`, by the ranks that have its heads."""
        kind, layer = divmod(number, LAYERS)
        having = [rank for rank in self.ranks if layer in rank.layers]
        return [rank.kv[kind * len(rank.layers) + layer - rank.layers.start] for rank in having]

    @property
    def managers(self) -> list[MooncakeConnectorKVManager]:
        return [rank.manager for rank in self.ranks]

    def close(self) -> None:
        for manager in self.managers:
            manager.teardown()


def _with_port(disagg: Any, port: int) -> Callable[[], Any]:
    class Disagg:
        disaggregation_bootstrap_port = port

        def __getattr__(self, name: str) -> Any:
            return getattr(disagg, name)

    return Disagg


class Pair:
    """A prefill and a decode instance, and the bootstrap server between them."""

    def __init__(self, prefill_tp: int = 1, decode_tp: int = 1, page: int = PAGE, prefill_pp: int = 1) -> None:
        self.port = free_port()
        self.bootstrap = start_bootstrap(self.port)
        self.prefill = Instance(PREFILL, prefill_tp, self.port, page, prefill_pp)
        self.decode = Instance(DECODE, decode_tp)
        self.address = f"127.0.0.1:{self.port}"
        self._rooms = 0

    def room(self) -> int:
        self._rooms += 1
        return self._rooms

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()
        self.bootstrap.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_bootstrap(port: int) -> MooncakeConnectorKVBootstrapServer:
    started = MooncakeConnectorKVBootstrapServer("127.0.0.1", port)

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_for(listens)
    return started


class _Request:
    parties: list[Any]
    expected: tuple[int, ...]
    """States that the queue it is in expects; SGLang raises for others."""

    def poll(self) -> int:
        return self.check(min(int(party.poll()) for party in self.parties))

    def check(self, state: int) -> int:
        assert state in self.expected, f"{type(self).__name__} in state {state}"
        return state

    def until(self, *states: int) -> int:
        """Poll until it is in one of these states, or at an end."""
        wait_for(lambda: self.poll() in (*states, KVPoll.Failed, KVPoll.Success))
        return self.poll()

    def abort(self) -> None:
        for party in self.parties:
            party.abort()

    def failed(self) -> list[KVTransferError]:
        """SGLang was told `Failed`, by one of the ranks at least: what each rank says of it."""
        found = []
        for party in self.parties:
            with pytest.raises(KVTransferError) as raised:
                party.failure_exception()
            found.append(raised.value)
        return found

    def clear(self) -> None:
        for party in self.parties:
            party.clear()


class Prefill(_Request):
    """A request on the prefill instance, whose KV is at `pages`."""

    def __init__(self, instance: Instance, address: str, room: int, pages: Sequence[int], aux: int = 1) -> None:
        self.instance, self.room, self.pages, self.aux = instance, room, list(pages), aux
        self.parties = [MooncakeConnectorKVSender(manager, address, room) for manager in instance.managers]
        self.expected = (KVPoll.Failed, KVPoll.Bootstrapping, KVPoll.WaitingForInput)
        self.sent = 0

    def poll(self) -> int:
        """In a pipeline the first stage says for all when a request begins; it is over when every stage says so."""
        tp = len(self.instance.stages[0])
        if KVPoll.Transferring not in self.expected and len(self.instance.stages) > 1:
            states = [int(party.poll_pp_consensus()) for party in self.parties[:tp]]
        else:
            by_rank = [int(party.poll()) for party in self.parties]
            states = [min(by_rank[first : first + tp]) for first in range(0, len(by_rank), tp)]
            under_way = [state for state in states if state not in (KVPoll.Failed, KVPoll.Success)]
            states = under_way or states
        return self.check(min(states))

    def admit(self) -> None:
        """Out of the bootstrap queue."""
        assert self.until(KVPoll.WaitingForInput) == KVPoll.WaitingForInput
        for sender in self.parties:
            assert sender.pop_decode_prefix_len() == 0
            sender.init(len(self.pages), self.aux)

    def compute(self, *counts: int) -> None:
        """The next chunks, of so many pages; without any, all that is left."""
        for rank in self.instance.ranks:
            rank.aux.output_ids[self.aux] = self.room
            rank.aux.bootstrap_room[self.aux] = self.room
        for count in counts or (len(self.pages) - self.sent,):
            chunk = np.array(self.pages[self.sent : self.sent + count], dtype=np.int32)
            self.sent += count
            for sender in self.parties:
                assert sender.should_send_kv_chunk(count, self.sent == len(self.pages))
                sender.send(chunk, None, count * PAGE)
        if self.sent == len(self.pages):  # now in the queue of what is under way
            self.expected = (KVPoll.Failed, KVPoll.WaitingForInput, KVPoll.Transferring, KVPoll.Success)

    def run(self, *counts: int) -> None:
        self.admit()
        self.compute(*counts)


class Decode(_Request):
    """A request on the decode instance, which gives it `pages`, of which `prefix` are there already."""

    def __init__(
        self, instance: Instance, address: str, room: int, pages: Sequence[int], aux: int = 2, prefix: int = 0
    ) -> None:
        self.instance, self.room, self.pages, self.aux, self.prefix = instance, room, list(pages), aux, prefix
        self.parties = [MooncakeConnectorKVReceiver(manager, address, room) for manager in instance.managers]
        self.expected = (KVPoll.Failed, KVPoll.Bootstrapping, KVPoll.WaitingForInput)
        for rank in instance.ranks:
            rank.aux.clear_slot(aux)

    def bootstrap(self, address: str) -> None:
        """As the scheduler, which asks again until it knows the instance."""
        for manager, receiver in zip(self.instance.managers, self.parties, strict=True):
            wait_for(lambda manager=manager: manager.try_ensure_parallel_info(address))
            receiver.init(0)

    def allocate(self) -> None:
        """Out of the queue of those that wait for pages."""
        assert self.until(KVPoll.WaitingForInput) == KVPoll.WaitingForInput, self.failed()
        for receiver in self.parties:
            pages = np.array(self.pages[self.prefix :], dtype=np.int32)
            receiver.send_metadata(pages, self.aux, None, decode_prefix_len=self.prefix * PAGE)
        self.expected = tuple(range(KVPoll.Failed, KVPoll.Success + 1))

    def run(self, address: str) -> None:
        self.bootstrap(address)
        self.allocate()

    def failed(self) -> list[KVTransferError]:
        """And its pages are taken back, as `DecodeTransferQueue` does, which holds them until each rank says so."""
        found = super().failed()
        for receiver in self.parties:
            if receiver.kv_mgr.enable_deferred_decode_kv_release:
                receiver.ensure_abort_notified(force_arm=True)
        held = [receiver.kv_mgr for receiver in self.parties if receiver.abort_notified]
        wait_for(lambda: all(manager.is_abort_release_safe(self.room, 0) for manager in held))
        return found


def check(prefill: Prefill, decode: Decode) -> None:
    """Decode's pages hold what prefill's do, by layer and head, and its aux row as well."""
    for number in range(2 * LAYERS):
        sources = [each[prefill.pages[decode.prefix :]] for each in prefill.instance.buffer(number)]
        taken = [each[decode.pages[decode.prefix :]] for each in decode.instance.buffer(number)]
        assert torch.equal(torch.cat(sources, dim=2), torch.cat(taken, dim=2)), f"layer buffer {number}"
    for rank in decode.instance.ranks:
        assert rank.aux.bootstrap_room[decode.aux, 0] == prefill.room
        assert rank.aux.output_ids[decode.aux, 0] == prefill.room
