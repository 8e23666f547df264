"""Ranks that hand over several sections: two groups of layers with block sizes of their own, aux rows, and state.

The ranks of both instances find each other through directories that they joined by themselves: no engine's scheduler
tells any of them of the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from simulated.nodes import TOKENS, Instances, Part, Rank, endings, spoil_arrivals
from simulated.ranks import Model, whole_ranks
from simulated.waiting import wait_for

import transfer.serving
from transfer.control.connection import Access
from transfer.control.directory import THIS_HOST, Directory, join, look_up
from transfer.control.handshake import Identity
from transfer.plan.granularity import Bounds, Granularity
from transfer.plan.layout import NO_BLOCK, LayoutError, Section, Table
from transfer.protocol.orders import Ending
from transfer.session import NodeOptions
from transfer.transports.base import Unavailable

MODELS = {
    "full": Model(layers=4, heads=4, k_dim=8, v_dim=8, itemsize=2),
    "sliding": Model(layers=2, heads=4, k_dim=4, v_dim=4, itemsize=2),
    "aux": Model(layers=1, heads=1, k_dim=24, v_dim=0, itemsize=1),
    "state": Model(layers=2, heads=4, k_dim=6, v_dim=0, itemsize=4),
}
WHOLE = ("aux", "state")
WANTED = {"full": range(TOKENS), "sliding": range(24, TOKENS), "aux": range(3), "state": range(1)}
"""Tokens, or rows, of each section that travel: a sliding window's are the last ones."""
SOURCE = {"full": (8, [7, 2, 9, 4, 1, 0]), "sliding": (4, [3, 8, 1, 0, 10, 5, 9, 4, 7, 2, 6]), "aux": (1, [4, 0, 2]),
          "state": (1, [3])}  # fmt: skip
DESTINATION = {"state": (1, [0]), "sliding": (16, [2, 0, 5]), "full": (12, [3, 0, 5, 1]), "aux": (1, [1, 5, 3])}
"""Tokens a block, and the request's table; in another order than at the source."""
NOBODY = Access(Identity())
DEADLINE_S = 60.0


class Engine(Instances):
    """The ranks of one instance, which find each other in its directory."""

    def __init__(
        self,
        tp: int,
        blocks: dict[str, tuple[int, list[int]]],
        options: NodeOptions,
        change: Callable[[Section], Section] = lambda section: section,
    ) -> None:
        parts = [
            [
                Part(MODELS[name], change(replace(section, name=name, is_whole=name in WHOLE)), table, WANTED[name])
                for section in whole_ranks(MODELS[name], tp, block_tokens, max(table) + 1)
            ]
            for name, (block_tokens, table) in blocks.items()
        ]
        self.ranks = [Rank(list(of_rank), Access(Identity()), options) for of_rank in zip(*parts, strict=True)]
        self.engine_id = "engine"
        self.directory = Directory(self.engine_id, [], tp, ("", 0), NOBODY)

        async def all_join() -> list[Any]:
            cards = [rank.node.card for rank in self.ranks]
            home = self.where.address
            return await asyncio.gather(
                *(join(home, n, card, NOBODY, deadline_s=DEADLINE_S) for n, card in enumerate(cards))
            )

        assert len({len(card.ranks) for card in asyncio.run(all_join())}) == 1

    def open(self, name: str) -> None:
        self.fill()
        super().open(name)


def options(granularity: Granularity = Granularity.LAYER, transport: str = "cma") -> NodeOptions:
    return NodeOptions(page_tokens=16, bounds=Bounds(fixed=granularity), transports=[transport])


@pytest.fixture
def start():
    made: list[Engine] = []

    def engine(tp: int, blocks: dict[str, tuple[int, list[int]]], *more: Any) -> Engine:
        made.append(Engine(tp, blocks, *(more or [options()])))
        return made[-1]

    yield engine
    for one in made:
        one.close()


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("transport", ["cma", "shm"])
@pytest.mark.parametrize("source_tp, destination_tp", [(1, 2), (2, 1), (2, 2)])
def test_every_section_arrives_in_its_own_blocks(start, source_tp, destination_tp, transport, granularity):
    p = start(source_tp, SOURCE, options(granularity, transport))
    d = start(destination_tp, DESTINATION, options(transport=transport))
    p.prefill("t")
    d.fetch("t", p.where, computed=True)
    fetched, sent = d.fetched(), p.sent()
    assert endings([*fetched, *sent]) == {Ending.DONE}, [ended.cause for ended in fetched]
    d.check()
    assert sum(ended.nbytes for ended in fetched) == sum(ended.nbytes for ended in sent) > 0


def test_what_is_sent_whole_is_sent_once_when_prefill_is_over(start, monkeypatch):
    send, batches = transfer.serving._send, []

    def recorded(visitor: Any, peer: Any, order: Any, *rest: Any) -> Any:
        batches.append((visitor.layout.sections[order.batch.section].name, order.peer))
        return send(visitor, peer, order, *rest)

    monkeypatch.setattr(transfer.serving, "_send", recorded)
    p, d = start(1, SOURCE), start(2, DESTINATION)
    p.open("t")
    p.compute("t")
    d.fetch("t", p.where, computed=True)
    wait_for(lambda: len({name for name, _ in batches}) == 2)
    assert {name for name, _ in batches} == {"full", "sliding"}
    p.finish("t")
    assert endings(d.fetched()) == {Ending.DONE}
    counts = Counter(batches)
    assert sorted(counts[key] for key in counts if key[0] in WHOLE) == [1, 1, 1, 1]
    d.check()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_byte_in_any_section_is_noticed(start, name, times, monkeypatch):
    """Once: it is sent again. Twice: the transfer fails."""
    p, d = start(1, SOURCE, options(Granularity.FULL)), start(1, DESTINATION)
    spoil_arrivals(monkeypatch, d, times, list(DESTINATION).index(name))
    p.prefill("t")
    d.fetch("t", p.where, computed=True)
    (ended,) = d.fetched()
    if times == 1:
        assert ended.ending is Ending.DONE
        d.check()
    else:
        assert ended.ending is Ending.FAILED and "wrong bytes twice" in ended.cause


@pytest.mark.parametrize("gone", [6, 7])
def test_a_window_that_begins_inside_a_unit_takes_the_whole_unit_and_nothing_of_what_is_gone(start, gone):
    """Tokens from 27 on are wanted, and 4 are moved together; the source has its blocks of 4 from 24 or 28 on."""
    p, d = start(1, SOURCE), start(1, DESTINATION)
    window = d.ranks[0].parts[list(DESTINATION).index("sliding")]
    window.wanted = range(27, TOKENS)
    p.open("t")
    p.ranks[0].parts[list(SOURCE).index("sliding")].table[:gone] = [NO_BLOCK] * gone
    p.compute("t")
    p.finish("t")
    d.fetch("t", p.where, computed=True)
    (ended,) = d.fetched()
    if gone == 6:
        assert ended.ending is Ending.DONE, ended.cause
        window.wanted = range(24, TOKENS)
        d.check()
    else:
        assert ended.ending is Ending.FAILED and "no block any more for token 24" in ended.cause


def wider(section: Section) -> Section:
    if section.name != "aux":
        return section
    k = replace(section.blocks.k, dim=((32, 1),))
    return replace(section, k_dim=32, blocks=replace(section.blocks, k=k, block_stride=32))


@pytest.mark.parametrize(
    "blocks, change, said",
    [
        (SOURCE.keys() - {"state"}, lambda section: section, ["only one side has section state", "section 'full'"]),
        (SOURCE.keys(), wider, ["k_dim differ: section 'aux'", "24 + 0 elements", "32 + 0 elements"]),
    ],
    ids=["lacks one", "another shape"],
)
def test_sections_that_do_not_fit_are_refused_with_both_sides_values(start, blocks, change, said):
    p = start(1, SOURCE)
    d = start(1, {name: value for name, value in DESTINATION.items() if name in blocks}, options(), change)
    p.prefill("t")
    d.fetch("t", p.where, computed=True)
    (ended,) = d.fetched()
    assert ended.ending is Ending.FAILED and all(each in ended.cause for each in said), ended.cause


def test_another_number_of_tables_than_of_sections_fails_the_transfer(start):
    p, d = start(1, SOURCE), start(1, DESTINATION)
    p.prefill("t")
    d.announce("t", p.where, computed=True)
    d.ranks[0].node.grant("t", Table(0, 1, [0]))
    (ended,) = d.fetched()
    assert ended.ending is Ending.FAILED and "1 block tables for 4 sections" in ended.cause


@pytest.mark.parametrize("first, stop, fits", [(0, 16, True), (3, 17, False), (0, 1 << 40, False), (99, 99, True)])
def test_tokens_lie_in_the_blocks_of_their_table(start, first, stop, fits):
    """Before anything is planned for them: whoever asks may ask for as many as there are numbers."""
    (rank,) = start(1, SOURCE).ranks
    layout = replace(rank.layout, sections=rank.layout.sections[:1])
    block_tokens = layout.sections[0].block_tokens
    tables = [Table(first, stop, [0] * (16 // block_tokens))]
    if fits:
        layout.check_tables(tables)
    else:
        with pytest.raises(LayoutError, match=f"tokens up to {stop} in blocks of 16"):
            layout.check_tables(tables)


# Directories that are joined


def test_who_asks_before_all_ranks_have_joined_waits_for_the_last(start):
    cards = [rank.node.card for rank in start(2, SOURCE).ranks]
    directory = Directory("late", [], 2, ("", 0), NOBODY)
    home = THIS_HOST, directory.port

    async def ask() -> None:
        first = asyncio.ensure_future(join(home, 0, cards[0], NOBODY, deadline_s=DEADLINE_S))
        asked = asyncio.ensure_future(look_up(home, NOBODY, deadline_s=DEADLINE_S))
        done, _ = await asyncio.wait([first, asked], timeout=0.2)
        assert not done
        last = await join(home, 1, cards[1], NOBODY, deadline_s=DEADLINE_S)
        assert last == await first == await asked and last.ranks == cards
        assert await join(home, 1, cards[1], NOBODY, deadline_s=DEADLINE_S) == last

    asyncio.run(ask())
    directory.close()


@pytest.mark.parametrize("number, problem", [(2, "joins an instance of 2 ranks"), (0, "which another process is")])
def test_a_rank_that_cannot_be_does_not_join(start, caplog, number, problem):
    cards = [rank.node.card for rank in start(2, SOURCE).ranks]
    directory = Directory("e", cards, 2, ("", 0), NOBODY)
    home = THIS_HOST, directory.port
    with pytest.raises(Unavailable):
        asyncio.run(join(home, number, cards[1], NOBODY, deadline_s=DEADLINE_S))
    assert problem in caplog.text
    assert asyncio.run(look_up(home, NOBODY, deadline_s=DEADLINE_S)).ranks == cards
    directory.close()


def test_a_rank_that_its_own_directory_does_not_know_fetches_nothing(start):
    p, d = start(1, SOURCE), start(1, DESTINATION)
    d.ranks[0].node.announce("t", p.where, p.where.address, computed=True)
    (ended,) = d.fetched()
    assert "this rank is not in the directory of its own instance" in ended.cause
    assert ended.ending is Ending.FAILED
