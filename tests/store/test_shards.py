"""Pages put together from the shards of instances with another TP or PP size, against a plain model of them."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from faults import Faults, FaultySpace, FaultyStore, Late, never
from hypothesis import given, settings
from hypothesis import strategies as st
from store.pools import garble
from store.shard_model import UNIT_NBYTES, Model, Pool, Reader, instances, models, units

from mooncake_connector.kv.geometry import Shard
from store_client import EmbeddedStore, Lookup, Put
from store_client.around import StoreAround
from store_client.sharded import ShardView
from store_client.testing import DEADLINE_S, chain, namespace, parents_of, put_pages


@pytest.fixture(scope="module")
def opened() -> Iterator[EmbeddedStore]:
    """One pool for all examples, cleared for each."""
    folder = Path(tempfile.mkdtemp(prefix="mooncake-test-"))
    with EmbeddedStore(folder / "pool", 4 << 20) as store:
        yield store
    shutil.rmtree(folder)


# What is read


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_a_page_is_found_where_all_its_layers_and_heads_are_stored_and_read_rightly(opened, data):
    """Instances of any TP and PP wrote some shards of some pages; a rank of one more instance reads."""
    opened.clear()
    model = data.draw(models)
    pool = Pool(opened, model)
    for _ in range(data.draw(st.integers(1, 3))):
        for shard in data.draw(instances(model)):
            pool.put(shard, data.draw(st.sets(st.sampled_from(range(len(model.keys))), min_size=2)))
    for shard in data.draw(instances(model)):
        view, reader = pool.view(shard), Reader(model, shard)
        expected = [pool.has(page, shard) for page in range(len(model.keys))]
        assert view.contains(model.keys) == expected
        assert view.lookup(model.keys).pages == [*expected, False].index(False)
        assert view.read(model.keys, reader.consume) == expected
        for page, there in enumerate(expected):
            if there:
                assert np.array_equal(reader.page(page), reader.expected(page))
                check_shown(reader.shown[page], shard, own=shard in pool.holders[page])


def check_shown(shown, shard, *, own):
    """The own page alone where there is one, and no part that has nothing new."""
    if own:
        assert shown == [shard]
    seen = set()
    for part in shown:
        assert units(part) & units(shard) - seen, "a part was read for nothing"
        seen |= units(part)


@settings(max_examples=40)
@given(st.data())
def test_every_element_is_shown_once_where_one_instance_wrote(opened, data):
    opened.clear()
    model = data.draw(models)
    pool = Pool(opened, model)
    for shard in data.draw(instances(model)):
        pool.put(shard, range(len(model.keys)))
    for shard in data.draw(instances(model)):
        reader = Reader(model, shard)
        assert all(pool.view(shard).read(model.keys, reader.consume))
        for page, shown in reader.shown.items():
            counts = Counter(unit for part in shown for unit in units(part) & units(shard))
            assert set(counts.values()) == {1} and set(counts) == units(shard), page


def test_the_model_notices_another_head_layer_and_page():
    model = Model(2, 2)
    whole = model.stored(0, Shard(0, 2, 0, 2))
    assert not np.array_equal(whole, model.stored(1, Shard(0, 2, 0, 2)))
    parts = [model.stored(0, Shard(layer, layer + 1, head, head + 1)) for layer in (0, 1) for head in (0, 1)]
    assert len({part.tobytes() for part in parts}) == 4


# Pages that go away between one look and the next

WHOLE = Shard(0, 4, 0, 4)
HALVES = (Shard(0, 4, 0, 2), Shard(0, 4, 2, 4))
QUARTERS = tuple(Shard(0, 4, head, head + 1) for head in range(4))


@pytest.fixture
def shared(opened: EmbeddedStore, request: pytest.FixtureRequest) -> Pool:
    """A pool for a model of which nothing was ever stored."""
    return Pool(opened, Model(8, 4, name=request.node.name))


def put_all(pool: Pool, *shards: Shard) -> None:
    for shard in shards:
        pool.put(shard, range(len(pool.model.keys)))


def test_a_part_that_vanishes_after_the_lookup_loses_its_page_alone(shared):
    put_all(shared, *HALVES)
    view, reader = shared.view(WHOLE), Reader(shared.model, WHOLE)
    assert view.lookup(shared.model.keys).pages == 4
    shared.lose(1, HALVES[1])
    assert view.read(shared.model.keys, reader.consume) == [True, False, True, True]
    for page in (0, 2, 3):
        assert np.array_equal(reader.page(page), reader.expected(page))
    assert view.lookup(shared.model.keys).pages == 1


@pytest.mark.parametrize("lost", HALVES, ids=["the part being read", "the part that comes next"])
def test_a_part_that_vanishes_during_the_read_loses_its_page(shared, lost):
    put_all(shared, *HALVES)
    reader = Reader(shared.model, WHOLE)

    def consume(i, part, page):
        reader.consume(i, part, page)
        if i == 2 and part == HALVES[0]:
            shared.lose(2, lost)

    assert shared.view(WHOLE).read(shared.model.keys, consume) == [True, True, False, True]


def test_smaller_parts_stand_in_for_one_that_vanished(shared):
    put_all(shared, *HALVES, *QUARTERS)
    view, reader = shared.view(WHOLE), Reader(shared.model, WHOLE)
    assert view.lookup(shared.model.keys).pages == 4
    shared.lose(0, HALVES[1])
    assert view.read(shared.model.keys, reader.consume) == [True] * 4
    assert reader.shown[0] == [HALVES[0], QUARTERS[2], QUARTERS[3]]
    assert reader.shown[1] == list(HALVES)
    assert np.array_equal(reader.page(0), reader.expected(0))


def test_a_part_with_a_wrong_byte_is_a_miss(shared):
    put_all(shared, *HALVES)
    arena = next(shared.store.path.glob("*/arena"))
    content = arena.read_bytes()
    at = content.index(shared.model.stored(3, HALVES[1]).tobytes())
    garble(arena, at + 5, bytes([content[at + 5] ^ 1]))
    reader = Reader(shared.model, WHOLE)
    assert shared.view(WHOLE).read(shared.model.keys, reader.consume) == [True, True, True, False]


# What is asked of the pool


class Counting(StoreAround):
    """A store that counts what it is asked."""

    def __init__(self, store):
        super().__init__(store)
        self.listed, self.asked = 0, []

    def shards(self, name):
        self.listed += 1
        return super().shards(name)

    def space(self, name, shard, nbytes=None):
        space, asked = super().space(name, shard, nbytes), self.asked

        class Asked:
            def __getattr__(self, call):
                asked.append((call, shard))
                return getattr(space, call)

        return Asked()


@pytest.fixture
def clock(monkeypatch):
    """The time that a view sees, which stands still unless it is moved."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr("store_client.sharded.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def counted(pool):
    counting = Counting(pool.store)
    return ShardView(counting, pool.model.namespace, WHOLE, UNIT_NBYTES), counting


def test_no_other_shard_is_asked_for_what_the_own_one_has(shared):
    put_all(shared, WHOLE, *HALVES)
    view, counting = counted(shared)
    keys = shared.model.keys
    assert view.lookup(keys).pages == 4 and all(view.contains(keys)) and all(view.read(keys, lambda *args: None))
    assert counting.listed == 0
    assert {shard for _, shard in counting.asked} == {WHOLE}


def test_where_there_is_no_other_shard_a_miss_costs_one_lookup(shared):
    shared.put(WHOLE, [1])
    view, counting = counted(shared)
    assert view.lookup(shared.model.keys).pages == 0
    assert counting.asked == [("lookup", WHOLE)]


def test_shards_are_listed_at_a_miss_once_a_second(shared, clock):
    view, counting = counted(shared)
    keys = shared.model.keys
    for _ in range(3):
        assert view.lookup(keys) == Lookup(0) and not any(view.contains(keys))
        assert not any(view.read(keys, lambda *args: None))
    assert counting.listed == 1
    put_all(shared, *HALVES)
    assert view.lookup(keys).pages == 0
    clock.now_s += 1.1
    assert view.lookup(keys).pages == 4
    assert counting.listed == 2


def test_parts_that_leave_something_out_even_together_are_not_asked(shared):
    """The other stage of a pipeline may have no page yet, or none any more; shards beside the own one never count."""
    view, counting = counted(shared)
    counting.shards = lambda name: [HALVES[0], Shard(0, 2, 2, 4), Shard(4, 8, 0, 4)]
    assert view.lookup(shared.model.keys).pages == 0
    assert {shard for _, shard in counting.asked} == {WHOLE}


# What is written


def write(view, model, pages):
    keys = [model.keys[page] for page in pages]

    def fill(i, page):
        page[:] = model.stored(pages[i], view.shard)

    parents = [parents_of(model.keys)[page] for page in pages]
    return view.write(keys, fill, parents=parents, deadline_s=DEADLINE_S)


def test_a_page_that_others_cover_is_not_stored_again(shared):
    shared.put(HALVES[0], [0, 1, 2])
    shared.put(HALVES[1], [0, 2])
    view = shared.view(WHOLE)
    assert write(view, shared.model, range(4)) == [Put.PRESENT, Put.STORED, Put.PRESENT, Put.STORED]
    assert view.own.contains(shared.model.keys) == [False, True, False, True]
    reader = Reader(shared.model, WHOLE)
    assert view.read(shared.model.keys, reader.consume) == [True] * 4
    assert all(np.array_equal(reader.page(page), reader.expected(page)) for page in range(4))
    assert reader.shown[1] == [WHOLE]


def fill_up(store: EmbeddedStore) -> None:
    space, page = store.space(namespace("filler"), WHOLE), np.zeros(4096, np.uint8)
    for key in chain("filler", (store.stats().capacity_nbytes - store.stats().used_nbytes) // 4096):
        put_pages(space, [key], [page], parents=[None], deadline_s=DEADLINE_S)
    assert store.stats().used_nbytes == store.stats().capacity_nbytes


@pytest.mark.parametrize("covered", [True, False], ids=["parent elsewhere", "parent nowhere"])
def test_a_page_may_go_on_from_pages_of_other_shards_in_a_full_pool(tmp_path, covered):
    """Others are evicted for it, as for a page whose parent is in the own shard; not so for one nobody can reach."""
    model = Model(4, 4)
    with EmbeddedStore(tmp_path / "pool", 1 << 20) as store:
        pool = Pool(store, model)
        if covered:
            for shard in HALVES:
                pool.put(shard, [0])
        fill_up(store)
        outcome = write(pool.view(WHOLE), model, [1, 2])
    assert outcome == ([Put.STORED] * 2 if covered else [Put.FAILED] * 2)


def test_a_page_stays_the_child_of_a_parent_in_its_own_shard(shared):
    """A parent that others have as well is still never evicted before it."""
    view = shared.view(WHOLE)
    write(view, shared.model, [0])
    for shard in HALVES:
        shared.put(shard, [0])
    view = shared.view(WHOLE)
    parents = []
    view.own = SimpleNamespace(
        contains=view.own.contains,
        write=lambda keys, fill, **options: parents.extend(options["parents"]) or [Put.STORED] * len(keys),
    )
    write(view, shared.model, [1])
    assert parents == [shared.model.keys[0]]


def test_after_clear_nothing_is_found(shared):
    put_all(shared, *HALVES)
    beside = shared.view(Shard(4, 8, 0, 4))
    write(beside, shared.model, [0])
    view = shared.view(WHOLE)
    write(view, shared.model, range(4))
    assert view.clear() == 8
    assert shared.view(WHOLE).contains(shared.model.keys) == [False] * 4
    assert beside.lookup(shared.model.keys).pages == 1


# Answers that are pending


def unsure_view(pool, *shards):
    """Some shards of the store may get more of a chain."""
    return view_of(pool, dict.fromkeys(shards, lambda keys, found: Lookup(found.pages, found.pages < len(keys))))


def view_of(pool, answers):
    """`answers` to lookups by shard, where they are not those of the store."""

    def space(namespace, shard, nbytes=None):
        faults = Faults()
        faults.answer = answers.get(shard)
        return FaultySpace(pool.store.space(namespace, shard), shard, faults)

    store = StoreAround(pool.store)
    store.space = space
    return ShardView(store, pool.model.namespace, WHOLE, UNIT_NBYTES)


@pytest.mark.parametrize("shard", [WHOLE, HALVES[1]], ids=["own", "other"])
def test_a_lookup_is_pending_while_any_shard_may_bring_the_next_page(shared, shard):
    keys = shared.model.keys
    shared.put(HALVES[0], range(4))
    shared.put(HALVES[1], range(2))
    view = unsure_view(shared, shard)
    assert view.lookup(keys) == Lookup(2, pending=True)
    assert view.lookup(keys[:2]) == Lookup(2)
    assert unsure_view(shared).lookup(keys) == Lookup(2)


@pytest.mark.parametrize(
    ("halves", "expected"),
    [
        ([Lookup(0, True, wait_s=0.25), Lookup(0, True, wait_s=0.5)], Lookup(0, True, wait_s=0.25)),
        ([Lookup(0, True, wait_s=0.25), Lookup(0, True)], Lookup(0, True, wait_s=0.25)),
        ([Lookup(0, True, 2, wait_s=0.25), Lookup(0, True, 1, wait_s=0.5)], Lookup(0, True, 1, wait_s=0.5)),
        ([Lookup(0, True, wait_s=0.25), Lookup(0)], Lookup(0)),
    ],
    ids=["both wait", "one may wait long", "one is further", "one is known"],
)
def test_a_pending_answer_is_worth_waiting_for_as_long_as_the_shards_that_hold_it_up(shared, halves, expected):
    answers = {shard: lambda keys, found, answer=answer: answer for shard, answer in zip(HALVES, halves, strict=True)}
    for shard in HALVES:  # of another page: they are known to the pool
        shared.put(shard, [3])
    assert view_of(shared, answers).lookup(shared.model.keys) == expected


def test_a_thread_that_may_wait_gets_what_came_in_time(shared):
    keys = shared.model.keys
    put_all(shared, WHOLE)
    faults = Faults()
    view = ShardView(FaultyStore(shared.store, faults), shared.model.namespace, WHOLE, UNIT_NBYTES)
    faults.answer = Late(asked=3)
    assert view.lookup_within(keys, 60.0) == Lookup(4) and faults.calls["lookup"] == 3
    faults.answer = never
    assert view.lookup_within(keys, 0.0) == Lookup(0, pending=True) and faults.calls["lookup"] == 4
    assert view.lookup_within(keys, 0.01) == Lookup(0, pending=True)
