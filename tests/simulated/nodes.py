"""Prefill and decode instances of real nodes, with real memory, and one request's KV of which every byte is known."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulated.cuda_driver import LIBRARY
from simulated.ranks import SPAN, Instance, Model, heads_of, make_rank

import transfer.fetching
from transfer.control.connection import Access
from transfer.control.directory import THIS_HOST, Address, Directory
from transfer.control.handshake import Identity
from transfer.plan.layout import RankLayout, Section, Table
from transfer.protocol.consumer import Incoming, Where
from transfer.protocol.orders import Transfer
from transfer.protocol.producer import Outgoing
from transfer.serving import Computed
from transfer.session import Node, NodeOptions

MODEL = Model(layers=4, heads=4, k_dim=8, v_dim=8, itemsize=2)
TOKENS = 44
CHUNKS = (20, TOKENS)
PATIENCE_S = 120.0
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
        for failed in self.take_failed():
            super().cancel(failed, "nothing will come")
        for ended in self.take_ended():
            (self._sent if isinstance(ended, Outgoing) else self._fetched).append(ended)


class Rank:
    """A node and its memory."""

    def __init__(
        self, section: Section, table: list[int], access: Access, options: NodeOptions, device: int | None
    ) -> None:
        self.table = table
        self.bytes = np.zeros(SPAN, dtype=np.uint8)
        address = self.bytes.ctypes.data
        moved = tuple(start + address for start in section.blocks.layer_addresses)
        self.section = replace(section, blocks=replace(section.blocks, layer_addresses=moved))
        self.layout = RankLayout((self.section,))
        if device is not None:
            LIBRARY.allocate(address, SPAN)
        self.node = NamedNode([table], self.layout, [(address, SPAN)], access, options, device)

    def places(self, tokens: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """For each byte of the request: (what it must be, where it is)."""
        names, places = Instance(MODEL, [self.section], self.table).bytes_of(self.section, tokens)
        return (names * 2654435761 >> 7) % 255 + 1, places - self.bytes.ctypes.data


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

        self.engine_id = engine_id
        self.ranks = [
            Rank(
                make_rank(MODEL, range(MODEL.layers), heads_of(MODEL, rank, tp_size), block_tokens, 10, order, 0, 0),
                table,
                access(),
                options,
                device,
            )
            for rank in range(tp_size)
        ]
        cards = [rank.node.card for rank in self.ranks]
        self.directory = Directory(engine_id, cards, tp_size, (cards[0].host, port), access())
        self.where = Where(THIS_HOST, self.directory.port, engine_id)

    # Prefill

    def fill(self) -> None:
        for rank in self.ranks:
            values, places = rank.places()
            rank.bytes[places] = values

    def open(self, name: str) -> None:
        for rank in self.ranks:
            rank.node.open(name)

    def compute(self, name: str, stops: Sequence[int] = CHUNKS, step_s: float = 0.0) -> None:
        for stop in stops:
            for layer in range(MODEL.layers):
                for rank in self.ranks:
                    rank.node.computed(layer, {name: stop})
                time.sleep(step_s)

    def finish(self, name: str) -> None:
        for rank in self.ranks:
            rank.node.finished(name, TOKENS)

    # Decode

    def announce(self, name: str, where: Where, *, computed: bool) -> None:
        for rank in self.ranks:
            rank.node.announce(name, where, self.where.address, computed=computed)

    def grant(self, name: str, first_token: int = 0) -> None:
        for rank in self.ranks:
            rank.node.grant(name, Table(first_token, TOKENS, rank.table))

    def drop(self, name: str) -> None:
        for rank in self.ranks:
            rank.node.drop(name, "aborted")

    def check(self, *, first_token: int = 0) -> None:
        """The request's KV is there, and nothing else was written."""
        for rank in self.ranks:
            values, places = rank.places(TOKENS)
            _, before = rank.places(first_token)
            wanted = np.isin(places, before, invert=True)
            assert (rank.bytes[places[wanted]] == values[wanted]).all()
            unit_end = -(-TOKENS // rank.section.block_tokens) * rank.section.block_tokens
            _, allowed = rank.places(unit_end)
            outside = np.ones(SPAN, dtype=bool)
            outside[allowed] = False
            outside[before] = True
            assert not rank.bytes[outside].any()

    # Outcomes

    def sent(self) -> list[Transfer]:
        return self._one_each(lambda rank: rank.node.take_sent())

    def fetched(self) -> list[Transfer]:
        return self._one_each(lambda rank: rank.node.take_fetched())

    def _one_each(self, take: Callable[[Rank], list[Transfer]]) -> list[Transfer]:
        """One ending of each rank, waited for."""
        found = []
        for rank in self.ranks:
            end_s = time.monotonic() + PATIENCE_S
            while not (ended := take(rank)):
                assert time.monotonic() < end_s, "a transfer has no ending"
                time.sleep(0.002)
            assert len(ended) == 1
            found += ended
        return found

    def close(self) -> None:
        self.directory.close()
        for rank in self.ranks:
            rank.node.close()


def spoil_arrivals(monkeypatch: pytest.MonkeyPatch, decode: Instances, times: int) -> None:
    """So many batches have a wrong byte in the first rank's memory when they are checked."""
    check, left, rank = transfer.fetching._check, [times], decode.ranks[0]

    def spoilt(*args: Any) -> tuple[bool, int]:
        if left[0]:
            left[0] -= 1
            _, places = rank.places(4)
            rank.bytes[places] ^= 1
        return check(*args)

    monkeypatch.setattr(transfer.fetching, "_check", spoilt)
