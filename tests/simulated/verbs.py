"""A stand-in for the package `ibverbs` and for cards: queue pairs of one process; a thread of each card does the reads.

A card has a speed, may be down, may answer nothing, and may not say what became of what it was asked. Keys, states and
access are checked as a card does, and a request that fails takes its queue pair and all that follows with it. Memory of
the stand-in for CUDA's driver is the host's to no card: it takes it as a dma-buf, or as `has_peer_memory` says.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import deque
from enum import IntEnum, IntFlag
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from simulated.cuda_driver import LIBRARY

from transfer.transports.cuda.direct import BY_MODULE, DMA_BUF
from transfer.transports.rdma import card as card_module
from transfer.transports.rdma import pair, reader, trial
from transfer.transports.rdma.rails import ROCE_V2, Rail

NO_ANSWER_S = 0.05
"""After which a read that nobody answers fails."""


SHORT_S = 2e-5
"""What takes no longer takes nothing: sleeping would take longer."""


class AccessFlags(IntFlag):
    LOCAL_WRITE = 1
    REMOTE_READ = 4


class QPAttrMask(IntFlag):
    STATE = 1


class QPState(IntEnum):
    RESET, INIT, RTR, RTS, ERR = range(5)


class SGE(NamedTuple):
    addr: int
    length: int
    lkey: int


class QPInfo(NamedTuple):
    qp_num: int
    psn: int
    lid: int
    gid: bytes
    port: int
    mtu: int


class Completion(NamedTuple):
    wr_id: int
    is_success: bool
    status_str: str


class Fabric:
    """Cards `card0`, `card1`... at 10.77.N.1, all of which reach each other. Patches the transport to use them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, speeds: list[float]) -> None:
        """`speeds` in bytes per second."""
        self.cards = {f"card{i}": Card(self, i, speed) for i, speed in enumerate(speeds)}
        self.queues: dict[int, QP] = {}
        self.numbers = itertools.count(1)
        self.has_peer_memory = False
        verbs = SimpleNamespace(
            AccessFlags=AccessFlags, QPAttrMask=QPAttrMask, QPState=QPState, SGE=SGE, QPInfo=QPInfo,
            QPType=SimpleNamespace(RC=2), SendFlags=SimpleNamespace(SIGNALED=2), WROpcode=SimpleNamespace(RDMA_READ=4),
            QPInitAttr=SimpleNamespace, SendWR=SimpleNamespace,
        )  # fmt: skip
        for module in (card_module, pair, reader, trial):
            monkeypatch.setattr(module, "binding", lambda: verbs)
        monkeypatch.setattr(card_module, "open_device", lambda name: Context(self.cards[name]))
        monkeypatch.setattr(card_module, "rails", lambda: [card.rail for card in self.cards.values()])
        monkeypatch.setattr(card_module, "is_up", lambda rail: self.cards[rail.device].is_up)
        monkeypatch.setattr(card_module, "index_now", lambda rail: rail.gid_index)

    def close(self) -> None:
        for card in self.cards.values():
            card.work.put(None)
            card.thread.join()
        assert not self.queues, "a queue pair was not closed"


class Card:
    def __init__(self, fabric: Fabric, number: int, bytes_per_s: float) -> None:
        self.fabric, self.bytes_per_s = fabric, bytes_per_s
        self.is_up, self.answers, self.speaks = True, True, True
        self.takes_dma_buf, self.reaches_devices = True, True
        self.blocked: set[str] = set()
        """Ways by which it takes memory of devices and does not reach it."""
        self.ways: dict[int, str] = {}
        """By which it has such memory, by its address."""
        self.gid = bytes(10) + b"\xff\xff" + ip_address(f"10.77.{number}.1").packed
        self.device = f"card{number}"
        self.moved_nbytes = 0
        self.work: queue.SimpleQueue[tuple[QP, Any] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def rail(self) -> Rail:
        return Rail(self.device, 1, self.is_up, ROCE_V2, self.gid, 3)

    def passes(self, address: int) -> bool:
        """Whether what lies between it and that memory lets bytes through."""
        if LIBRARY._range(address) is None:
            return True
        way = self.ways[max(start for start in self.ways if start <= address)]
        return self.reaches_devices and way not in self.blocked

    def _run(self) -> None:
        while (given := self.work.get()) is not None:
            given[0].carry_out(given[1])


class Context:
    def __init__(self, card: Card) -> None:
        self._card = card

    def alloc_pd(self) -> Domain:
        return Domain(self._card)

    def query_device(self) -> Any:
        return SimpleNamespace(max_qp_wr=64, max_cqe=1000, max_sge=4, max_qp_rd_atom=16)

    def query_port(self, number: int) -> Any:
        return SimpleNamespace(active_mtu=5, lid=0, max_msg_sz=1 << 20)

    def create_comp_channel(self) -> Channel:
        return Channel()

    def create_cq(self, size: int, channel: Channel | None = None) -> CQ:
        return CQ(channel)

    def close(self) -> None:
        pass


class Domain:
    def __init__(self, card: Card) -> None:
        self.card = card
        self.regions: dict[int, tuple[int, int, int]] = {}

    def reg_mr(self, address: int, nbytes: int, access: int) -> Any:
        if LIBRARY._range(address) is not None:
            if not self.card.fabric.has_peer_memory:
                raise OSError(14, "Bad address")
            self.card.ways[address] = BY_MODULE
        return self._add(address, nbytes, access)

    def reg_dmabuf_mr(self, offset: int, nbytes: int, address: int, descriptor: int, access: int) -> Any:
        if not self.card.takes_dma_buf:
            raise OSError(95, "Operation not supported")
        start, size = LIBRARY.dma_bufs[os.fstat(descriptor).st_ino]
        assert start + offset == address and offset + nbytes <= size
        self.card.ways[address] = DMA_BUF
        return self._add(address, nbytes, access)

    def _add(self, address: int, nbytes: int, access: int) -> Any:
        key = next(self.card.fabric.numbers)
        self.regions[key] = address, nbytes, access
        return SimpleNamespace(lkey=key, rkey=key, close=lambda: self.regions.pop(key))

    def allows(self, key: int, address: int, nbytes: int, access: int) -> bool:
        start, size, given = self.regions.get(key, (0, 0, 0))
        return bool(given & access) and start <= address and address + nbytes <= start + size

    def create_qp(self, wanted: Any) -> QP:
        return QP(self, wanted.send_cq)

    def close(self) -> None:
        assert not self.regions, "a region was not unregistered"


class Channel:
    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self.ready: deque[CQ] = deque()

    def get_cq_event(self) -> CQ:
        os.eventfd_read(self.fd)
        return self.ready.popleft()

    def close(self) -> None:
        os.close(self.fd)


class CQ:
    def __init__(self, channel: Channel | None) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._found: deque[Completion] = deque()
        self._notify = False

    def add(self, completion: Completion) -> None:
        with self._lock:
            self._found.append(completion)
            notify, self._notify = self._notify, False
        if notify and self._channel is not None:
            self._channel.ready.append(self)
            os.eventfd_write(self._channel.fd, 1)

    def req_notify(self) -> None:
        self._notify = True

    def ack_events(self, count: int) -> None:
        pass

    def poll(self, most: int) -> list[Completion]:
        with self._lock:
            return [self._found.popleft() for _ in range(min(most, len(self._found)))]

    def close(self) -> None:
        pass


class QP:
    def __init__(self, domain: Domain, completions: CQ) -> None:
        self._domain, self._completions = domain, completions
        self._lock = threading.Lock()
        """Held while a request is carried out, so that nothing is written once it was closed or reset."""
        self.state, self.access, self.peer = QPState.RESET, 0, 0
        self.set: dict[str, Any] = {}
        """What else it was told on its way through the states."""
        self.qp_num = next(domain.card.fabric.numbers)
        domain.card.fabric.queues[self.qp_num] = self

    def modify(self, mask: int, *, qp_state: QPState) -> None:
        self.state = qp_state

    def to_init(self, port: int, access: int, pkey_index: int) -> None:
        assert self.state is QPState.RESET
        self.state, self.access, self.set = QPState.INIT, access, {"pkey_index": pkey_index}

    def to_rtr(self, there: QPInfo, **attributes: Any) -> None:
        self.set |= attributes
        if not self._domain.card.is_up:
            raise OSError(22, "the port is down")
        self.state, self.peer = QPState.RTR, there.qp_num

    def to_rts(self, sequence: int, **attributes: Any) -> None:
        self.state = QPState.RTS
        self.set |= attributes

    def post_send(self, requests: list[Any]) -> None:
        for request in requests:
            self._domain.card.work.put((self, request))

    def close(self) -> None:
        with self._lock:
            self.state = QPState.ERR
            del self._domain.card.fabric.queues[self.qp_num]

    def answers(self, number: int) -> bool:
        """Whether it serves the queue pair of this number."""
        is_on = self._domain.card.is_up and self._domain.card.answers
        return is_on and self.peer == number and self.state in (QPState.RTR, QPState.RTS)

    def carry_out(self, request: Any) -> None:
        with self._lock:
            why = self._read(request)
            if why and self.state is not QPState.RESET:
                self.state = QPState.ERR
        if why or getattr(request, "send_flags", 0):
            self._completions.add(Completion(request.wr_id, not why, why))

    def _read(self, request: Any) -> str:
        """Why it failed, or nothing."""
        if self.state is not QPState.RTS:
            return "Work Request Flushed Error"
        nbytes, ours = sum(sge.length for sge in request.sg_list), self._domain.card
        if (takes_s := nbytes / ours.bytes_per_s) > SHORT_S:
            time.sleep(takes_s)
        there = ours.fabric.queues.get(self.peer)
        if there is None or not (ours.is_up and there.answers(self.qp_num)):
            time.sleep(NO_ANSWER_S)
            return "transport retry counter exceeded"
        may_read = there._domain.allows(request.rkey, request.remote_addr, nbytes, AccessFlags.REMOTE_READ)
        if not (may_read and there.access & AccessFlags.REMOTE_READ):
            there.state = QPState.ERR
            return "remote access error"
        while not ours.speaks and self.state is QPState.RTS:
            time.sleep(0.001)
        if self.state is not QPState.RTS:
            return "Work Request Flushed Error"
        source = request.remote_addr
        for sge in request.sg_list:
            assert self._domain.allows(sge.lkey, sge.addr, sge.length, AccessFlags.LOCAL_WRITE)
            if not (ours.passes(sge.addr) and there._domain.card.passes(source)):
                return "remote operation error"
            LIBRARY.write_by_card(sge.addr, LIBRARY.by_card(source, sge.length))
            source += sge.length
        ours.moved_nbytes += nbytes
        return ""
