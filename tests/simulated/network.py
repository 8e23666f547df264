"""Prefill and decode ranks that run the real protocol over a network, a memory and a clock that are simulated.

The world carries out what they order, as slowly and as badly as a test asks for, and holds what must always be
true: source blocks are not read after their release, nothing is written to blocks after theirs, every transfer is
released once, and what a consumer says is done is there and right (`simulated.invariants`). A write takes what the
source blocks hold when it ends; checksums fit that, also where the engine took the blocks meanwhile.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from simulated.sides import NamedConsumer, NamedProducer, Prompt, no_prompt

from transfer.plan.granularity import Batch, Divider, Granularity
from transfer.protocol.incoming import Source
from transfer.protocol.messages import AnyMessage, Granted, decode, encode
from transfer.protocol.orders import (
    Abandon,
    Ended,
    Ending,
    Failed,
    Order,
    Protocol,
    Revoke,
    Send,
    Timing,
    Verify,
    Write,
)
from transfer.transports.base import TransferError

LAYERS, TOKENS, UNIT = 4, 24, 4
KEY = b"key of a grant.."
WRONG, STALE = "wrong", "stale"
LATENCY_S = 0.01
TIMING = Timing()


@dataclass(frozen=True)
class Fault:
    """What becomes of one message: each number is a copy that arrives so many seconds late."""

    copies: tuple[float, ...] = (0.0,)


DROP, DOUBLE = Fault(()), Fault((0.0, 0.3))


@dataclass
class Faults:
    """Everything that goes wrong; messages, writes and checks are counted in the order in which they begin."""

    messages: dict[int, Fault] = field(default_factory=dict)
    cuts: list[tuple[float, float]] = field(default_factory=list)
    """From, to: all messages sent meanwhile are lost."""
    failed_writes: set[int] = field(default_factory=set)
    wrong_writes: set[int] = field(default_factory=set)
    write_s: dict[int, float] = field(default_factory=dict)
    revoke_s: float = 0.02


@dataclass
class Rank:
    """One process: its side of the protocol, and what its engine and its memory know. All is lost in a restart."""

    name: str
    peer: str
    """What its peers call this life of it."""
    side: Protocol
    failed: dict[str, float] = field(default_factory=dict)
    """Transfer -> when nothing would come of it, before it was granted."""
    released: dict[str, tuple[Ending, str, float]] = field(default_factory=dict)
    opened: dict[str, float] = field(default_factory=dict)
    """Transfer -> when the engine named it."""
    finished: dict[str, float] = field(default_factory=dict)
    computed: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    """Transfer -> the (layer, token) whose KV is in the blocks."""
    granted: dict[str, int] = field(default_factory=dict)
    """Transfer -> its number, until the grant is revoked."""
    memory: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """(transfer, layer, token) -> the bytes."""
    ticking: bool = False


class World:
    """Ranks P0, P1, ... and D0, D1, ..., their network, and the time.

    Args:
        parts: for each consumer rank, the layers that each producer rank sends it (empty: an idle source; absent: no
            route).
        prompt: what each side knows of a request's prompt.
        apart: each consumer rank is an instance of its own.
    """

    def __init__(
        self,
        parts: list[dict[int, range]],
        faults: Faults | None = None,
        granularity: Granularity = Granularity.LAYER,
        timing: Timing = TIMING,
        prompt: Prompt = no_prompt,
        *,
        apart: bool = False,
    ) -> None:
        self.prompt, self.apart = prompt, apart
        self.parts, self.faults, self.granularity, self.timing = parts, faults or Faults(), granularity, timing
        self.now_s = 0.0
        self.messages = self.writes = 0
        self._lives = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = 0
        self.ranks: dict[str, Rank] = {}
        self.history: list[Rank] = []
        self.log: list[str] = []
        self.died: set[str] = set()
        """Ranks that had more than one life, or have none."""
        self._down: set[str] = set()
        self._runs: dict[str, int] = defaultdict(int)
        """Transfer -> how often its prefill was begun again."""
        for name in [*self.producers, *self.consumers]:
            self.start(name)

    @property
    def producers(self) -> list[str]:
        return [f"P{number}" for number in range(1 + max(source for part in self.parts for source in part))]

    @property
    def consumers(self) -> list[str]:
        return [f"D{number}" for number in range(len(self.parts))]

    # Time

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        self._counter += 1
        heapq.heappush(self._events, (when_s, self._counter, call))

    def run(self, until_s: float = 2000.0) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, call = heapq.heappop(self._events)
            call()
        self.now_s = until_s

    # Lives

    def start(self, name: str) -> None:
        """A new life of a rank; of an earlier one nothing is left but what it sent."""
        self._lives += 1
        side: Protocol
        if name[0] == "P":
            side = NamedProducer(lambda peer, granted: self.divide(name, peer, granted), self.timing, self.prompt)
        else:
            side = NamedConsumer(self.timing, self.prompt)
        self._down.discard(name)
        self.ranks[name] = Rank(name, f"{name}.{self._lives}", side)
        self.history.append(self.ranks[name])
        self.log.append(f"{self.now_s:8.2f} {name} starts as {self.ranks[name].peer}")

    def divide(self, producer: str, consumer: str, granted: Granted) -> list[Divider]:
        layers = self.parts[int(consumer[1:].split(".")[0])].get(int(producer[1:]))
        if layers is None:
            raise TransferError("no route between these ranks")
        return [Divider(self.granularity, layers, granted.tables[0].tokens, UNIT)] if layers else []

    # What engines do

    def open(self, transfer: str, at_s: float, *, chunks: Iterable[int] = (TOKENS,), step_s: float = 0.1) -> float:
        """All producer ranks compute a request: each chunk layer by layer. Returns when they are through."""
        for name in self.producers:
            self.call(at_s, name, self._open, transfer)
        return self._prefill(transfer, at_s, chunks, step_s)

    def _prefill(self, transfer: str, at_s: float, chunks: Iterable[int], step_s: float) -> float:
        run = self._runs[transfer]
        for stop in chunks:
            for layer in range(LAYERS):
                at_s += step_s
                for name in self.producers:
                    self.call(at_s, name, self._compute, transfer, run, layer, stop)
        for name in self.producers:
            self.call(at_s, name, self._finish, transfer, run)
        return at_s

    def preempt(self, transfer: str, at_s: float, *, chunks: Iterable[int] = (TOKENS,), step_s: float = 0.1) -> None:
        """The prefill instance takes a request's blocks, if it is still computing, and then computes it again."""

        def preempt() -> None:
            ranks = [self.ranks[name] for name in self.producers]
            if not any(transfer in r.opened for r in ranks) or any(transfer in r.finished for r in ranks):
                return
            self._runs[transfer] += 1
            for rank in ranks:
                rank.computed.pop(transfer, None)
                self._in(rank, lambda r: transfer in r.side.held and r.side.preempted(transfer, self.now_s))
            self._prefill(transfer, self.now_s, chunks, step_s)

        self.at(at_s, preempt)

    def _open(self, rank: Rank, transfer: str) -> None:
        rank.opened[transfer] = self.now_s
        rank.side.open(transfer, self.now_s)
        if transfer not in rank.side.held:
            rank.side.cancel(transfer, "refused", self.now_s)

    def _compute(self, rank: Rank, transfer: str, run: int, layer: int, stop: int) -> None:
        if transfer in rank.side.held and run == self._runs[transfer]:
            rank.computed.setdefault(transfer, set()).update((layer, token) for token in range(stop))
            rank.side.computed(transfer, layer, stop, self.now_s)

    def _finish(self, rank: Rank, transfer: str, run: int) -> None:
        if transfer in rank.side.held and run == self._runs[transfer]:
            rank.finished[transfer] = self.now_s
            rank.side.finished(transfer, TOKENS, self.now_s)

    def fetch(
        self, transfer: str, announce_s: float, grant_s: float, *, computed: bool, first_token: int = 0
    ) -> None:
        """All consumer ranks ask for a transfer, of the producers' processes of that moment."""
        for number, name in enumerate(self.consumers):
            self.call(announce_s, name, self._announce, transfer, number, computed)
            self.call(grant_s, name, self._grant, transfer, first_token)

    def _announce(self, rank: Rank, transfer: str, number: int, computed: bool) -> None:
        of_all = Counter(source for part in self.parts for source in part)
        sources = [
            Source(self.ranks[f"P{source}"].peer, [layers], 1 if self.apart else of_all[source])
            for source, layers in self.parts[number].items()
        ]
        rank.opened[transfer] = self.now_s
        rank.side.announce(transfer, sources, self.now_s, computed=computed)

    def _grant(self, rank: Rank, transfer: str, first_token: int) -> None:
        if transfer in rank.side.held and rank.side.grant(transfer, first_token, TOKENS, [0], KEY, self.now_s):
            rank.granted[transfer] = rank.side.records[transfer].number

    def cancel(self, name: str, transfer: str, at_s: float) -> None:
        self.call(at_s, name, self._cancel, transfer)

    def _cancel(self, rank: Rank, transfer: str) -> None:
        if transfer in rank.side.held:
            rank.side.cancel(transfer, "abort", self.now_s)

    def crash(self, name: str, at_s: float, *, back_s: float | None = 0.0) -> None:
        """The process dies, and has another life so many seconds later, or none."""

        def die() -> None:
            self.log.append(f"{self.now_s:8.2f} {name} dies")
            self.died.add(name)
            self._down.add(name)
            if back_s is not None:
                self.at(self.now_s + back_s, lambda: self.start(name))

        self.at(at_s, die)

    def lose(self, name: str, at_s: float) -> None:
        """All consumers learn that a producer's process of that moment is gone, be it true or not."""
        self.at(at_s, lambda: self._lose(self.ranks[name].peer))

    def _lose(self, peer: str) -> None:
        for other in self.consumers:
            self._in(self.ranks[other], lambda rank: rank.side.lost(peer, self.now_s))

    def call(self, at_s: float, name: str, call: Callable[..., Any], *args: Any) -> None:
        """Do something in a rank, in the life that it has then."""
        self.at(at_s, lambda: self._in(self.ranks[name], lambda rank: call(rank, *args)))

    def lives(self, rank: Rank) -> bool:
        """Whether this is the present life of a rank, and not dead."""
        return self.ranks[rank.name] is rank and rank.name not in self._down

    def _in(self, rank: Rank, call: Callable[[Rank], Any]) -> None:
        if not self.lives(rank):
            return
        call(rank)
        self._obey(rank)
        if not rank.ticking:
            self._tick(rank)

    def _tick(self, rank: Rank) -> None:
        if not self.lives(rank):
            return
        wait_s = rank.side.tick(self.now_s)
        self._obey(rank)
        rank.ticking = wait_s is not None
        if wait_s is not None:
            self.at(self.now_s + wait_s, lambda: self._tick(rank))

    # What is ordered

    def _obey(self, rank: Rank) -> None:
        for order in rank.side.take():
            self._carry_out(rank, order)

    def _carry_out(self, rank: Rank, order: Order) -> None:
        if not isinstance(order, Send):
            self.log.append(f"{self.now_s:8.2f} {rank.name} {order}")
        match order:
            case Send():
                self._carry(rank, order.peer, order.message)
            case Write():
                self._write(rank, order)
            case Verify():
                checked = order.peer, order.transfer.request, order.landed, self._is_right(rank, order)
                self._later(0.01, rank, lambda r: r.side.verified(*checked, self.now_s))
            case Revoke():
                self._later(self.faults.revoke_s, rank, lambda r: self._revoke(r, order.transfer.request))
            case Failed():
                rank.failed[order.transfer.request] = self.now_s
            case Ended():
                self._release(rank, order)
            case Abandon():
                pass

    def _later(self, wait_s: float, rank: Rank, call: Callable[[Rank], Any]) -> None:
        self.at(self.now_s + wait_s, lambda: self._in(rank, call))

    def _carry(self, rank: Rank, peer: str, message: AnyMessage) -> None:
        number, data = self.messages, encode(message)
        self.messages += 1
        lost = any(start <= self.now_s < stop for start, stop in self.faults.cuts)
        fault = DROP if lost else self.faults.messages.get(number, Fault())
        self.log.append(f"{self.now_s:8.2f} #{number} {rank.name} -> {peer} {fault.copies} {message}")
        for late_s in fault.copies:
            self.at(self.now_s + LATENCY_S + late_s, lambda: self._arrive(rank.peer, peer, data))

    def _arrive(self, sender: str, peer: str, data: bytes) -> None:
        """At the process that it is for, if that lives."""
        self._in(self._process(peer), lambda rank: rank.side.receive(sender, decode(data), self.now_s))

    def _process(self, peer: str) -> Rank:
        return next(rank for rank in self.history if rank.peer == peer)

    def _write(self, rank: Rank, order: Write) -> None:
        number = self.writes
        self.writes += 1
        target, name = self._process(order.peer), order.transfer.request

        def land(rank: Rank) -> None:
            assert name in rank.opened and name not in rank.released, "source read after its release"
            error = None
            if number in self.faults.failed_writes:
                error = "connection lost"
            elif not self.lives(target) or order.granted.number not in target.granted.values():
                error = "refused"
            else:
                into = next(each for each, number in target.granted.items() if number == order.granted.number)
                assert into not in target.released, "written to after its release"
                computed = rank.computed.get(name, set())
                for layer, token in places(order.batch):
                    value = name if (layer, token) in computed else STALE
                    value = WRONG if number in self.faults.wrong_writes else value
                    target.memory[into, layer, token] = value
            rank.side.written(order.peer, name, order.number, [number], error, self.now_s)

        self._later(self.faults.write_s.get(number, 0.02), rank, land)

    def _is_right(self, rank: Rank, order: Verify) -> bool:
        found = [(order.transfer.request, layer, token) for layer, token in places(order.landed.part)]
        return all(rank.memory.get(place, WRONG) != WRONG for place in found)

    def _revoke(self, rank: Rank, transfer: str) -> None:
        rank.granted.pop(transfer, None)
        rank.side.revoked(transfer, self.now_s)

    def _release(self, rank: Rank, order: Ended) -> None:
        transfer, name = order.transfer, order.transfer.request
        assert name in rank.opened, "released what was never begun"
        assert name not in rank.released, "released twice"
        assert transfer.ending is not None
        if rank.name[0] == "D":
            assert name not in rank.granted, "released before nothing could write to it"
        rank.released[name] = (transfer.ending, transfer.cause, self.now_s)


def places(batch: Batch) -> Iterable[tuple[int, int]]:
    """Layers and tokens of a batch."""
    return product(batch.layers, range(batch.first_token, batch.stop_token))
