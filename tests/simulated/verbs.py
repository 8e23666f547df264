"""A stand-in for libibverbs and for cards: queue pairs of one process; a thread of each card does what is posted.

A card has a speed, may be down, may answer nothing, may bind no window, and may not say what became of reads. Keys,
windows, states and access are checked as a card does, and a request that fails takes its queue pair and all that
follows with it. Memory of the stand-in for CUDA's driver is the host's to no card: it takes it as a dma-buf, or as
`has_peer_memory` says.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import deque
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from simulated.cuda_driver import LIBRARY

from transfer.transports.cuda.direct import BY_MODULE, DMA_BUF
from transfer.transports.rdma import card as card_module
from transfer.transports.rdma import opened
from transfer.transports.rdma.abi import Access, Opcode, State
from transfer.transports.rdma.queue_pair import Chain
from transfer.transports.rdma.rails import ROCE_V2, Rail
from transfer.transports.rdma.verbs import Completion, Limits, Port

NO_ANSWER_S = 0.05
"""After which a read that nobody answers fails."""


SHORT_S = 2e-5
"""What takes no longer takes nothing: sleeping would take longer."""


class Request(NamedTuple):
    """As it was posted."""

    number: int
    opcode: Opcode
    is_signaled: bool
    address: int
    key: int
    ranges: list[tuple[int, int, int]]
    """Address, size and key of each."""
    window: int
    bound_to: tuple[int, int]


def posted(chain: Chain) -> list[Request]:
    """What the library would read."""
    found, at, first = [], chain.ended(), chain.ended()
    ranges_at = chain.ranges.ctypes.data
    while at:
        one = chain.requests[(at - first) // chain.requests.itemsize]
        start = (int(one["sg_list"]) - ranges_at) // chain.ranges.itemsize
        found.append(
            Request(
                int(one["wr_id"]), Opcode(int(one["opcode"])), bool(one["send_flags"]), int(one["wr.rdma.remote_addr"]),
                int(one["wr.rdma.rkey"]), chain.ranges[start : start + int(one["num_sge"])].tolist(),
                int(one["bind_mw.rkey"]),
                (int(one["bind_mw.bind_info.addr"]), int(one["bind_mw.bind_info.length"])),
            )
        )  # fmt: skip
        if found[-1].opcode is Opcode.LOCAL_INV:
            found[-1] = found[-1]._replace(window=int(one["invalidate_rkey"]))
        at = int(one["next"])
    return found


class Fabric:
    """Cards `card0`, `card1`... at 10.77.N.1, all of which reach each other. Patches the transport to use them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, speeds: list[float], *, has_windows: bool = True) -> None:
        """`speeds` in bytes per second."""
        self.cards = {f"card{i}": Card(self, i, speed) for i, speed in enumerate(speeds)}
        self.queues: dict[int, QP] = {}
        self.numbers = itertools.count(1)
        self.has_peer_memory = False
        self.limits = Limits(has_windows, 64, 1000, 4, 4, 16, 16)
        self.max_msg_nbytes = 1 << 20
        self.registered: list[tuple[int, int]] = []
        """Address and size, each time that a card was asked to register something."""
        monkeypatch.setattr(card_module, "open_device", lambda name: Context(self.cards[name]))
        monkeypatch.setattr(card_module, "QueuePair", lambda context, domain, queue, *limits: QP(domain, queue))
        monkeypatch.setattr(opened, "library", lambda: None)
        monkeypatch.setattr(opened, "rails", lambda: [card.rail for card in self.cards.values()])
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
        self.is_up, self.answers, self.speaks, self.binds = True, True, True, True
        self.max_window_nbytes = 1 << 31
        self.takes_dma_buf, self.reaches_devices, self.binds_devices = True, True, True
        self.blocked: set[str] = set()
        """Ways by which it takes memory of devices and does not reach it."""
        self.ways: dict[int, str] = {}
        """By which it has such memory, by its address."""
        self.gid = bytes(10) + b"\xff\xff" + ip_address(f"10.77.{number}.1").packed
        self.device = f"card{number}"
        self.moved_nbytes = 0
        self.work: queue.SimpleQueue[tuple[QP, Request] | None] = queue.SimpleQueue()
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

    def domain(self) -> Domain:
        return Domain(self._card)

    def limits(self) -> Limits:
        return self._card.fabric.limits

    def port(self, number: int) -> Port:
        return Port(active_mtu=5, lid=0, max_msg_sz=self._card.fabric.max_msg_nbytes)

    def channel(self) -> Channel:
        return Channel()

    def queue(self, size: int, channel: Channel | None = None) -> CQ:
        return CQ(channel)

    def close(self) -> None:
        pass


class Domain:
    def __init__(self, card: Card) -> None:
        self.card = card
        self.regions: dict[int, tuple[int, int, int]] = {}
        self.windows: dict[int, tuple[int, int, QP]] = {}
        """By key, those that are bound: address, size and by which queue pair."""

    def register(self, address: int, nbytes: int, access: int) -> Any:
        if LIBRARY._range(address) is not None:
            if not self.card.fabric.has_peer_memory:
                raise OSError(14, "Bad address")
            self.card.ways[address] = BY_MODULE
        return self._add(address, nbytes, access)

    def register_dma_buf(self, offset: int, nbytes: int, address: int, descriptor: int, access: int) -> Any:
        if not self.card.takes_dma_buf:
            raise OSError(95, "Operation not supported")
        start, size = LIBRARY.dma_bufs[os.fstat(descriptor).st_ino]
        assert start + offset == address and offset + nbytes <= size
        self.card.ways[address] = DMA_BUF
        return self._add(address, nbytes, access)

    def _add(self, address: int, nbytes: int, access: int) -> Any:
        self.card.fabric.registered.append((address, nbytes))
        key = next(self.card.fabric.numbers)
        self.regions[key] = address, nbytes, access
        return SimpleNamespace(address=address, lkey=key, rkey=key, close=lambda: self.regions.pop(key))

    def allows(self, key: int, address: int, nbytes: int, access: int) -> bool:
        start, size, given = self.regions.get(key, (0, 0, 0))
        return bool(given & access) and start <= address and address + nbytes <= start + size

    def window(self) -> Window:
        return Window(self)

    def lets(self, reading: QP, key: int, address: int, nbytes: int) -> bool:
        """Whether the peer of this queue pair reads these bytes by this key."""
        if key in self.windows:
            start, size, bound_by = self.windows[key]
            return bound_by is reading and start <= address and address + nbytes <= start + size
        return self.allows(key, address, nbytes, Access.REMOTE_READ)

    def close(self) -> None:
        assert not self.regions, "a region was not unregistered"
        assert not self.windows, "a window was not closed"


class Window:
    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self.key = next(domain.card.fabric.numbers) << 8
        self.address, self.is_closed = self.key, False

    def next_key(self) -> int:
        return (self.key & ~0xFF) | ((self.key + 1) & 0xFF)

    def bound(self, key: int) -> None:
        self.key = key

    def close(self) -> None:
        self.is_closed = True
        self._domain.windows.pop(self.key, None)


class Channel:
    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self.ready: deque[CQ] = deque()

    def take(self) -> CQ:
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

    def notify(self) -> None:
        self._notify = True

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
        self.state, self.access, self.peer = State.RESET, Access(0), 0
        self.set: dict[str, Any] = {}
        """What else it was told on its way through the states."""
        self.number = next(domain.card.fabric.numbers)
        domain.card.fabric.queues[self.number] = self

    def reset(self) -> None:
        self.state = State.RESET

    def fail(self) -> None:
        self.state = State.ERR

    def to_init(self, port: int, access: Access, pkey_index: int) -> None:
        assert self.state is State.RESET
        self.state, self.access, self.set = State.INIT, access, {"pkey_index": pkey_index}

    def to_rtr(self, number: int, sequence: int, lid: int, gid: bytes, port: int, **attributes: Any) -> None:
        self.set |= attributes
        if not self._domain.card.is_up:
            raise OSError(22, "the port is down")
        self.state, self.peer = State.RTR, number

    def to_rts(self, sequence: int, **attributes: Any) -> None:
        self.state = State.RTS
        self.set |= attributes

    def post(self, chain: Chain) -> None:
        for request in posted(chain):
            if request.opcode is Opcode.RDMA_READ:
                self._domain.card.work.put((self, request))
            else:  # what concerns this card alone waits for no other
                self.carry_out(request)

    def close(self) -> None:
        self.state = State.ERR  # what is under way ends with it
        with self._lock:
            self._domain.card.fabric.queues.pop(self.number, None)

    def answers(self, number: int) -> bool:
        """Whether it serves the queue pair of this number."""
        is_on = self._domain.card.is_up and self._domain.card.answers
        return is_on and self.peer == number and self.state in (State.RTR, State.RTS)

    def carry_out(self, request: Request) -> None:
        with self._lock:
            why = self._done(request)
            if why and self.state is not State.RESET:
                self.state = State.ERR
        if why or request.is_signaled:
            self._completions.add(Completion(request.number, not why, why))

    def _done(self, request: Request) -> str:
        """Why it failed, or nothing."""
        if self.state is not State.RTS:
            return "Work Request Flushed Error"
        if request.opcode is Opcode.RDMA_READ:
            return self._read(request)
        windows = self._domain.windows
        if request.opcode is Opcode.BIND_MW:
            card = self._domain.card
            is_bindable = card.binds if LIBRARY._range(request.bound_to[0]) is None else card.binds_devices
            if request.window in windows or not is_bindable or request.bound_to[1] > card.max_window_nbytes:
                return "memory window bind error"
            windows[request.window] = *request.bound_to, self
        elif windows.pop(request.window, None) is None:
            return "local protection error"
        return ""

    def _read(self, request: Request) -> str:
        nbytes, ours = sum(size for _, size, _ in request.ranges), self._domain.card
        if (takes_s := nbytes / ours.bytes_per_s) > SHORT_S:
            time.sleep(takes_s)
        there = ours.fabric.queues.get(self.peer)
        if there is None or not (ours.is_up and there.answers(self.number)):
            time.sleep(NO_ANSWER_S)
            return "transport retry counter exceeded"
        may_read = there._domain.lets(there, request.key, request.address, nbytes)
        if not (may_read and there.access & Access.REMOTE_READ):
            there.state = State.ERR
            return "remote access error"
        while not ours.speaks and self.state is State.RTS:
            time.sleep(0.001)
        if self.state is not State.RTS:
            return "Work Request Flushed Error"
        source = request.address
        for address, size, key in request.ranges:
            assert self._domain.allows(key, address, size, Access.LOCAL_WRITE)
            if not (ours.passes(address) and there._domain.card.passes(source)):
                return "remote operation error"
            LIBRARY.write_by_card(address, LIBRARY.by_card(source, size))
            source += size
        ours.moved_nbytes += nbytes
        return ""
