"""Ranks that hand over several sections: two groups of layers with block sizes of their own, aux rows, and state.

The ranks of both instances find each other through directories that they joined by themselves: no engine's scheduler
tells any of them of the others.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from causes import forget_causes
from simulated.nodes import PATIENCE_S, NamedNode
from simulated.ranks import SPAN, Instance, Model, heads_of, make_rank

import transfer.fetching
import transfer.serving
from transfer.control.connection import Access
from transfer.control.directory import THIS_HOST, Directory, join, look_up
from transfer.control.handshake import Identity
from transfer.plan.granularity import Bounds, Granularity
from transfer.plan.layout import LayoutError, RankLayout, Section, Table
from transfer.protocol.consumer import Where
from transfer.protocol.orders import Ending, Transfer
from transfer.session import NodeOptions
from transfer.transports.base import Unavailable

MODELS = {
    "full": Model(layers=4, heads=4, k_dim=8, v_dim=8, itemsize=2),
    "sliding": Model(layers=2, heads=4, k_dim=4, v_dim=4, itemsize=2),
    "aux": Model(layers=1, heads=1, k_dim=24, v_dim=0, itemsize=1),
    "state": Model(layers=2, heads=4, k_dim=6, v_dim=0, itemsize=4),
}
WHOLE = ("aux", "state")
TOKENS = 44
WANTED = {"full": range(TOKENS), "sliding": range(24, TOKENS), "aux": range(3), "state": range(1)}
"""Tokens, or rows, of each section that travel: a sliding window's are the last ones."""
SOURCE = {"full": (8, [7, 2, 9, 4, 1, 0]), "sliding": (4, [3, 8, 1, 0, 10, 5, 9, 4, 7, 2, 6]), "aux": (1, [4, 0, 2]),
          "state": (1, [3])}  # fmt: skip
DESTINATION = {"state": (1, [0]), "sliding": (16, [2, 0, 5]), "full": (12, [3, 0, 5, 1]), "aux": (1, [1, 5, 3])}
"""Tokens a block, and the request's table; in another order than at the source."""
NOBODY = Access(Identity())


class Rank:
    """A node, and memory of its own for each section."""

    def __init__(self, sections: Iterable[Section], tables: list[list[int]], options: NodeOptions) -> None:
        self.tables = tables
        self.memory: dict[str, np.ndarray] = {}
        placed = []
        for section in sections:
            memory = self.memory[section.name] = np.zeros(SPAN, dtype=np.uint8)
            moved = tuple(start + memory.ctypes.data for start in section.blocks.layer_addresses)
            placed.append(replace(section, blocks=replace(section.blocks, layer_addresses=moved)))
        self.layout = RankLayout(tuple(placed))
        regions = [(memory.ctypes.data, SPAN) for memory in self.memory.values()]
        self.node = NamedNode(tables, self.layout, regions, Access(Identity()), options)

    def places(self, section: Section, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """For each byte of a section up to this token: (what it must be, where it is)."""
        table = self.tables[self.layout.sections.index(section)]
        names, places = Instance(MODELS[section.name], [section], table).bytes_of(section, stop)
        salt = sorted(MODELS).index(section.name)
        return ((names + salt) * 2654435761 >> 7) % 255 + 1, places - self.memory[section.name].ctypes.data


class Engine:
    """The ranks of one instance, which find each other in its directory."""

    def __init__(
        self,
        tp: int,
        blocks: dict[str, tuple[int, list[int]]],
        options: NodeOptions,
        change: Callable[[Section], Section] = lambda section: section,
    ) -> None:
        self.blocks = blocks
        self.ranks = [
            Rank((change(section_of(name, tokens, max(table) + 1, tp, n)) for name, (tokens, table) in blocks.items()),
                 [table for _, table in blocks.values()], options)
            for n in range(tp)
        ]  # fmt: skip
        self.directory = Directory("engine", [], tp, ("", 0), NOBODY)
        self.home = THIS_HOST, self.directory.port

        async def all_join() -> list[Any]:
            cards = [rank.node.card for rank in self.ranks]
            return await asyncio.gather(
                *(join(self.home, n, card, NOBODY, deadline_s=PATIENCE_S) for n, card in enumerate(cards))
            )

        assert len({len(card.ranks) for card in asyncio.run(all_join())}) == 1

    def give(self, name: str, finish: bool = True) -> None:
        for rank in self.ranks:
            for section in rank.layout.sections:
                values, places = rank.places(section, WANTED[section.name].stop)
                rank.memory[section.name][places] = values
            rank.node.open(name)
            for stop in (20, TOKENS):
                for number, section in enumerate(rank.layout.sections):
                    for layer in section.shard.layers if not section.is_whole else ():
                        rank.node.computed(layer, {name: stop}, number)
        if finish:
            self.finish(name)

    def finish(self, name: str) -> None:
        for rank in self.ranks:
            rank.node.finished(name, TOKENS)

    def take(self, name: str, other: Engine) -> None:
        for rank in self.ranks:
            rank.node.announce(name, Where(*other.home, "engine"), self.home, computed=True)
            tables = [
                Table(WANTED[section].start, WANTED[section].stop, table)
                for section, (_, table) in self.blocks.items()
            ]  # fmt: skip
            rank.node.grant(name, *tables)

    def ended(self, side: str) -> list[Transfer]:
        found: list[Transfer] = []
        end_s = time.monotonic() + PATIENCE_S
        while len(found) < len(self.ranks):
            assert time.monotonic() < end_s, "a transfer has no ending"
            found = [*found, *(ended for rank in self.ranks for ended in getattr(rank.node, f"take_{side}")())]
            time.sleep(0.002)
        return found

    def check(self) -> None:
        """Every section has the request's bytes, and nothing else was written."""
        for rank in self.ranks:
            for section in rank.layout.sections:
                memory, wanted = rank.memory[section.name], WANTED[section.name]
                values, places = rank.places(section, wanted.stop)
                _, before = rank.places(section, wanted.start)
                mine = np.isin(places, before, invert=True)
                assert (memory[places[mine]] == values[mine]).all(), section.name
                block = section.block_tokens
                _, allowed = rank.places(section, -(-wanted.stop // block) * block)
                outside = np.ones(SPAN, dtype=bool)
                outside[allowed] = False
                outside[before] = True
                assert not memory[outside].any(), section.name

    def close(self) -> None:
        self.directory.close()
        for rank in self.ranks:
            rank.node.close()


def section_of(name: str, block_tokens: int, num_blocks: int, tp: int, rank: int) -> Section:
    model = MODELS[name]
    layout = make_rank(model, range(model.layers), heads_of(model, rank, tp), block_tokens, num_blocks, "LBHN", 0, 0)
    return replace(layout, name=name, is_whole=name in WHOLE)


@pytest.fixture
def make():
    made: list[Engine] = []

    def engine(*args: Any, **kwargs: Any) -> Engine:
        made.append(Engine(*args, **kwargs))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def options(granularity: Granularity = Granularity.LAYER, transport: str = "cma") -> NodeOptions:
    return NodeOptions(page_tokens=16, bounds=Bounds(fixed=granularity), transports=[transport])


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("transport", ["cma", "shm"])
@pytest.mark.parametrize("source_tp, destination_tp", [(1, 2), (2, 1), (2, 2)])
def test_every_section_arrives_in_its_own_blocks(make, source_tp, destination_tp, transport, granularity):
    p = make(source_tp, SOURCE, options(granularity, transport))
    d = make(destination_tp, DESTINATION, options(transport=transport))
    p.give("t")
    d.take("t", p)
    fetched, sent = d.ended("fetched"), p.ended("sent")
    assert {ended.ending for ended in (*fetched, *sent)} == {Ending.DONE}, [ended.cause for ended in fetched]
    d.check()
    assert sum(ended.nbytes for ended in fetched) == sum(ended.nbytes for ended in sent) > 0


def test_what_is_sent_whole_is_sent_once_when_prefill_is_over(make, monkeypatch):
    send, batches = transfer.serving._send, []

    def recorded(visitor: Any, peer: Any, order: Any, *rest: Any) -> Any:
        batches.append((visitor.layout.sections[order.batch.section].name, order.peer))
        return send(visitor, peer, order, *rest)

    monkeypatch.setattr(transfer.serving, "_send", recorded)
    p, d = make(1, SOURCE, options()), make(2, DESTINATION, options())
    p.give("t", finish=False)
    d.take("t", p)
    end_s = time.monotonic() + PATIENCE_S
    while len({name for name, _ in batches}) < 2:
        assert time.monotonic() < end_s, batches
        time.sleep(0.002)
    assert {name for name, _ in batches} == {"full", "sliding"}
    p.finish("t")
    assert {ended.ending for ended in d.ended("fetched")} == {Ending.DONE}
    counts = Counter(batches)
    assert sorted(counts[key] for key in counts if key[0] in WHOLE) == [1, 1, 1, 1]
    d.check()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_byte_in_any_section_is_noticed(make, name, times, monkeypatch):
    """Once: it is sent again. Twice: the transfer fails."""
    p, d = make(1, SOURCE, options(Granularity.FULL)), make(1, DESTINATION, options())
    check, left, (rank,) = transfer.fetching._check, [times], d.ranks
    (section,) = [section for section in rank.layout.sections if section.name == name]

    def spoilt(origin: Any, landed: Any, *rest: Any) -> Any:
        if left[0] and rank.layout.sections[landed.section].name == name:
            left[0] -= 1
            _, places = rank.places(section, WANTED[name].stop)
            rank.memory[name][places[-1]] ^= 1
        return check(origin, landed, *rest)

    monkeypatch.setattr(transfer.fetching, "_check", spoilt)
    p.give("t")
    d.take("t", p)
    (ended,) = d.ended("fetched")
    assert left == [0]
    if times == 1:
        assert ended.ending is Ending.DONE
        d.check()
    else:
        assert ended.ending is Ending.FAILED and "wrong bytes twice" in ended.cause


def test_a_section_that_one_side_lacks_is_refused_with_both_sides_values(make):
    fewer = {name: value for name, value in DESTINATION.items() if name != "state"}
    p, d = make(1, SOURCE, options()), make(1, fewer, options())
    p.give("t")
    d.take("t", p)
    (ended,) = d.ended("fetched")
    assert ended.ending is Ending.FAILED and "only one side has section state" in ended.cause
    assert p.ranks[0].layout.sections[0].describe() in ended.cause


def test_a_section_of_another_shape_is_refused_with_both_sides_values(make):
    def wider(section: Section) -> Section:
        if section.name != "aux":
            return section
        k = replace(section.blocks.k, dim=((32, 1),))
        return replace(section, k_dim=32, blocks=replace(section.blocks, k=k, block_stride=32))

    p, d = make(1, SOURCE, options()), make(1, DESTINATION, options(), wider)
    p.give("t")
    d.take("t", p)
    (ended,) = d.ended("fetched")
    assert ended.ending is Ending.FAILED and "k_dim differ: section 'aux'" in ended.cause
    assert "24 + 0 elements" in ended.cause and "32 + 0 elements" in ended.cause


def test_another_number_of_tables_than_of_sections_fails_the_transfer(make):
    p, d = make(1, SOURCE, options()), make(1, DESTINATION, options())
    p.give("t")
    (rank,) = d.ranks
    rank.node.announce("t", Where(*p.home, "engine"), d.home, computed=True)
    rank.node.grant("t", Table(0, 1, [0]))
    (ended,) = d.ended("fetched")
    assert ended.ending is Ending.FAILED and "1 block tables for 4 sections" in ended.cause


@pytest.mark.parametrize("first, stop, fits", [(0, 16, True), (3, 17, False), (0, 1 << 40, False), (99, 99, True)])
def test_tokens_lie_in_the_blocks_of_their_table(make, first, stop, fits):
    """Before anything is planned for them: whoever asks may ask for as many as there are numbers."""
    (rank,) = make(1, SOURCE, options()).ranks
    layout = replace(rank.layout, sections=rank.layout.sections[:1])
    block_tokens = layout.sections[0].block_tokens
    tables = [Table(first, stop, [0] * (16 // block_tokens))]
    if fits:
        layout.check_tables(tables)
    else:
        with pytest.raises(LayoutError, match=f"tokens up to {stop} in blocks of 16"):
            layout.check_tables(tables)


# Directories that are joined


def test_who_asks_before_all_ranks_have_joined_waits_for_the_last(make):
    cards = [rank.node.card for rank in make(2, SOURCE, options()).ranks]
    directory = Directory("late", [], 2, ("", 0), NOBODY)
    home = THIS_HOST, directory.port

    async def ask() -> None:
        first = asyncio.ensure_future(join(home, 0, cards[0], NOBODY, deadline_s=PATIENCE_S))
        asked = asyncio.ensure_future(look_up(home, NOBODY, deadline_s=PATIENCE_S))
        done, _ = await asyncio.wait([first, asked], timeout=0.2)
        assert not done
        last = await join(home, 1, cards[1], NOBODY, deadline_s=PATIENCE_S)
        assert last == await first == await asked and last.ranks == cards
        assert await join(home, 1, cards[1], NOBODY, deadline_s=PATIENCE_S) == last

    asyncio.run(ask())
    directory.close()


@pytest.mark.parametrize("number, problem", [(2, "joins an instance of 2 ranks"), (0, "which another process is")])
def test_a_rank_that_cannot_be_does_not_join(make, caplog, number, problem):
    forget_causes()
    cards = [rank.node.card for rank in make(2, SOURCE, options()).ranks]
    directory = Directory("e", cards, 2, ("", 0), NOBODY)
    home = THIS_HOST, directory.port
    with pytest.raises(Unavailable):
        asyncio.run(join(home, number, cards[1], NOBODY, deadline_s=PATIENCE_S))
    assert problem in caplog.text
    assert asyncio.run(look_up(home, NOBODY, deadline_s=PATIENCE_S)).ranks == cards
    directory.close()


def test_a_rank_that_its_own_directory_does_not_know_fetches_nothing(make):
    p, d = make(1, SOURCE, options()), make(1, DESTINATION, options())
    p.give("t")
    (rank,) = d.ranks
    rank.node.announce("t", Where(*p.home, "engine"), p.home, computed=True)
    (ended,) = d.ended("fetched")
    assert "this rank is not in the directory of its own instance" in ended.cause
    assert ended.ending is Ending.FAILED
