"""Prefill and decode instances of real nodes, with real memory, and one request's KV of which every byte is known."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulated.cuda_driver import LIBRARY
from simulated.ranks import SPAN, Instance, Model, whole_ranks
from simulated.waiting import wait_for

import transfer.fetching
from transfer.control.connection import Access
from transfer.control.directory import THIS_HOST, Address, Directory
from transfer.control.handshake import Identity
from transfer.plan.layout import RankLayout, Section, Table
from transfer.protocol.incoming import Incoming, Where
from transfer.protocol.orders import Ending, Failed, Transfer
from transfer.protocol.outgoing import Outgoing
from transfer.serving import Computed
from transfer.session import Node, NodeOptions

MODEL = Model(layers=4, heads=4, k_dim=8, v_dim=8, itemsize=2)
TOKENS = 44
CHUNKS = (20, TOKENS)
SECRET = b"sixteen bytes or more"
"""Of instances that are reached over TCP, where a test names no other."""


class NamedNode(Node):
    """Told of transfers by name. Where nothing will come of one it cancels that, as an engine would that computes."""

    def __init__(self, tables: list[list[int]], *args: Any) -> None:
        super().__init__(*args)
        self.tables = tables
        self.outgoing: dict[str, Outgoing] = {}
        self.incoming: dict[str, Incoming] = {}
        self._sent: list[Transfer] = []
        self._fetched: list[Transfer] = []
        self._runs: Counter[str] = Counter()

    def open(self, name: str) -> None:
        self.outgoing[name] = Outgoing(name, block_tables=self.tables)
        super().open(self.outgoing[name])

    def computed(self, layer: int, stops: Mapping[str, int], section: int = 0) -> None:
        progress = [
            (self.outgoing[name], Computed(self.tables, stop, self._runs[name])) for name, stop in stops.items()
        ]
        super().computed(layer, progress, section)

    def finished(self, name: str, num_tokens: int) -> None:
        super().finished(self.outgoing[name], num_tokens)

    def preempted(self, name: str) -> None:
        self._runs[name] += 1
        super().preempted(self.outgoing[name])

    def cancel(self, name: str, cause: str) -> None:
        super().cancel(self.outgoing[name], cause)

    def announce(self, name: str, where: Where, home: Address, *, computed: bool) -> None:
        self.incoming[name] = Incoming(name, where=where, computed=computed)
        super().announce(self.incoming[name], home)

    def grant(self, name: str, *tables: Table) -> None:
        super().grant(self.incoming[name], tables)

    def drop(self, name: str, cause: str) -> None:
        super().cancel(self.incoming[name], cause)

    def take_sent(self) -> list[Transfer]:
        self._take()
        taken, self._sent = self._sent, []
        return taken

    def take_fetched(self) -> list[Transfer]:
        self._take()
        taken, self._fetched = self._fetched, []
        return taken

    def _take(self) -> None:
        for report in self.take_ended():
            if isinstance(report, Failed):
                super().cancel(report.transfer, "nothing will come")
            else:
                (self._sent if isinstance(report.transfer, Outgoing) else self._fetched).append(report.transfer)


class Part:
    """One section of a rank: memory of its own, and the request's blocks in it."""

    def __init__(self, model: Model, section: Section, table: list[int], wanted: range) -> None:
        self.table, self.wanted, self._model = table, wanted, model
        self.bytes = np.zeros(SPAN, dtype=np.uint8)
        self.address = self.bytes.ctypes.data
        moved = tuple(start + self.address for start in section.blocks.layer_addresses)
        self.section = replace(section, blocks=replace(section.blocks, layer_addresses=moved))

    def places(self, stop: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """For each byte of the request: (what it must be, where it is)."""
        names, places = Instance(self._model, [self.section], self.table).bytes_of(self.section, stop)
        salt = sum(self.section.name.encode())
        return ((names + salt) * 2654435761 >> 7) % 255 + 1, places - self.address

    def fill(self) -> None:
        values, places = self.places()
        self.bytes[places] = values

    def check(self, first_token: int = 0) -> None:
        """What is wanted of the request is there, and nothing else was written."""
        values, places = self.places(self.wanted.stop)
        _, before = self.places(max(first_token, self.wanted.start))
        mine = np.isin(places, before, invert=True)
        assert (self.bytes[places[mine]] == values[mine]).all(), self.section.name
        _, allowed = self.places(-(-self.wanted.stop // self.section.block_tokens) * self.section.block_tokens)
        outside = np.ones(SPAN, dtype=bool)
        outside[allowed] = False
        outside[before] = True
        assert not self.bytes[outside].any(), self.section.name


class Rank:
    """A node, and the sections that it hands over."""

    def __init__(self, parts: list[Part], access: Access, options: NodeOptions, device: int | None = None) -> None:
        self.parts = parts
        self.layout = RankLayout(tuple(part.section for part in parts))
        if device is not None:
            for part in parts:
                LIBRARY.allocate(part.address, SPAN)
        regions = [(part.address, SPAN) for part in parts]
        self.node = NamedNode([part.table for part in parts], self.layout, regions, access, options, device)

    @property
    def bytes(self) -> np.ndarray:
        """The memory of the first section."""
        return self.parts[0].bytes


class Instances:
    """One engine: nodes of all its ranks, and its directory.

    Args:
        identity: all but the instance, which each rank draws for itself.
        device: of the stand-in for the CUDA driver, which then has the memory.
    """

    def __init__(
        self,
        tp_size: int,
        table: list[int],
        *,
        block_tokens: int = 8,
        order: str = "LBHN",
        engine_id: str = "engine",
        identity: dict[str, Any] | None = None,
        tls: Any = None,
        options: NodeOptions | None = None,
        port: int = 0,
        device: int | None = None,
    ) -> None:
        options = options or NodeOptions(page_tokens=16)
        known = {"secret": SECRET} if options.hosts else {}

        def access() -> Access:
            return Access(Identity(**(known | (identity or {}))), tls)

        sections = whole_ranks(MODEL, tp_size, block_tokens, 10, order)
        self.ranks = [
            Rank([Part(MODEL, section, table, range(TOKENS))], access(), options, device) for section in sections
        ]
        self.engine_id = engine_id
        cards = [rank.node.card for rank in self.ranks]
        self.directory = Directory(engine_id, cards, tp_size, (cards[0].host, port), access())

    @property
    def where(self) -> Where:
        return Where(THIS_HOST, self.directory.port, self.engine_id)

    # Prefill

    def fill(self) -> None:
        for rank in self.ranks:
            for part in rank.parts:
                part.fill()

    def open(self, name: str) -> None:
        for rank in self.ranks:
            rank.node.open(name)

    def compute(self, name: str, stops: Sequence[int] = CHUNKS, step_s: float = 0.0) -> None:
        """Chunk by chunk and layer by layer, as far as prefill says that of a section."""
        for stop in stops:
            for number, section in enumerate(self.ranks[0].layout.sections):
                for layer in section.shard.layers if not section.is_whole else ():
                    for rank in self.ranks:
                        rank.node.computed(layer, {name: stop}, number)
                    time.sleep(step_s)

    def finish(self, name: str) -> None:
        for rank in self.ranks:
            rank.node.finished(name, TOKENS)

    def prefill(self, name: str) -> None:
        """All of a request."""
        self.open(name)
        self.compute(name)
        self.finish(name)

    # Decode

    def announce(self, name: str, where: Where, *, computed: bool) -> None:
        for rank in self.ranks:
            rank.node.announce(name, where, self.where.address, computed=computed)

    def grant(self, name: str, first_token: int = 0) -> None:
        for rank in self.ranks:
            wanted = [(part.wanted, part.table) for part in rank.parts]
            rank.node.grant(name, *(Table(max(first_token, w.start), w.stop, table) for w, table in wanted))

    def fetch(self, name: str, where: Where, *, computed: bool) -> None:
        """Ask for a request, with blocks for it."""
        self.announce(name, where, computed=computed)
        self.grant(name)

    def drop(self, name: str) -> None:
        for rank in self.ranks:
            rank.node.drop(name, "aborted")

    def check(self, *, first_token: int = 0) -> None:
        """The request's KV is there, and nothing else was written."""
        for rank in self.ranks:
            for part in rank.parts:
                part.check(first_token)

    # Outcomes

    def sent(self) -> list[Transfer]:
        return self._one_each(lambda rank: rank.node.take_sent())

    def fetched(self) -> list[Transfer]:
        return self._one_each(lambda rank: rank.node.take_fetched())

    def _one_each(self, take: Callable[[Rank], list[Transfer]]) -> list[Transfer]:
        """One ending of each rank, waited for."""
        found: list[Transfer] = []
        for rank in self.ranks:
            ended: list[Transfer] = []
            wait_for(lambda: ended.extend(take(rank)) or ended)  # noqa: B023
            assert len(ended) == 1
            found += ended
        return found

    def close(self) -> None:
        self.directory.close()
        for rank in self.ranks:
            rank.node.close()


def endings(transfers: Iterable[Transfer]) -> set[Ending | None]:
    return {transfer.ending for transfer in transfers}


def spoil_arrivals(monkeypatch: pytest.MonkeyPatch, decode: Instances, times: int, section: int = 0) -> None:
    """So many batches of a section have a wrong byte in the first rank's memory when they are checked."""
    check, left, part = transfer.fetching._check, [times], decode.ranks[0].parts[section]

    def spoilt(origin: Any, landed: Any, *rest: Any) -> tuple[bool, int]:
        if left[0] and landed.section == section:
            left[0] -= 1
            _, places = part.places(part.wanted.stop)
            part.bytes[places[-1]] ^= 1
        return check(origin, landed, *rest)

    monkeypatch.setattr(transfer.fetching, "_check", spoilt)
