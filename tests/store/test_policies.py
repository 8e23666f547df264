"""Eviction policies: what all of them keep to, whatever they remember, and what each is for."""

import os
import random
import signal
import time
from dataclasses import replace
from typing import get_args

import msgspec
import numpy as np
import pytest
from long_form import LONG
from simulated.waiting import wait_for
from store.audit import audit
from store.pools import data_folder, inside, run, space_in
from store.test_kills import Crew

from mooncake_connector.config.schema import Config
from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore, Put
from store_client.embedded import table
from store_client.embedded.policies import DEFAULT_POLICY, POLICIES, Arrivals, Candidates, Hints
from store_client.embedded.policies.base import Frontier, Room, lowest_first
from store_client.embedded.policies.hints import BINS, TURNS, USES
from store_client.embedded.policies.lru import Recency
from store_client.embedded.policies.returns import Lines, Worth
from store_client.embedded.policies.sample import EDGES, bin_of, bins_of, classes_of
from store_client.embedded.row import NONE
from store_client.embedded.table import MOST_USES
from store_client.testing import DEADLINE_S, chain, get_page, put_chain

CAPACITY = 1 << 20
policies = pytest.mark.parametrize("name", sorted(POLICIES))


def test_the_configuration_knows_every_policy():
    (field,) = (field for field in msgspec.structs.fields(Config) if field.name == "eviction")
    names, _ = get_args(get_args(field.type)[0])
    assert get_args(names) == tuple(POLICIES)


def random_pages(rng: np.random.Generator, slots: int) -> Candidates:
    """A forest with holes, and now and then a link that is stale: to a hole, to nowhere, or to another chain's page."""
    depth = rng.integers(0, 8, slots).astype(np.uint32)
    parent = np.full(slots, NONE, dtype=np.uint32)
    for slot in np.flatnonzero(depth):
        above = np.flatnonzero(depth == depth[slot] - 1)
        parent[slot] = rng.choice(above) if len(above) else NONE
    stale = rng.random(slots) < 0.05
    parent[stale] = rng.integers(0, 2 * slots, int(stale.sum()))
    granules = rng.integers(0, 5, slots).astype(np.uint32)
    access = rng.integers(1, 1000, slots).astype(np.uint64)
    uses = rng.integers(0, MOST_USES + 1, slots).astype(np.uint8)
    return Candidates(access, uses, parent, depth, granules, int(np.count_nonzero(granules)))


def garbled_hints(rng: np.random.Generator, slots: int) -> Hints:
    hints = Hints(None, slots)
    for name in ("header", "ghosts", "entered", "queue", "turn", "tracked", "track_print", "track_slot", "track_class"):
        array = getattr(hints, name)
        array[:] = np.frombuffer(rng.bytes(array.nbytes), dtype=array.dtype)
    return hints


def kept_children(pages: Candidates, gone: set[int], page: int) -> list[int]:
    there = [slot for slot in np.flatnonzero(pages.granules).tolist() if slot not in gone]
    return [slot for slot in there if pages.parent[slot] == page and pages.depth[slot] > pages.depth[page]]


@policies
@pytest.mark.parametrize("seed", range(12))
def test_no_page_goes_before_its_descendants_nor_what_is_in_use(name, seed):
    rng = np.random.default_rng(seed)
    pages = random_pages(rng, 60)
    policy = POLICIES[name](Hints(None, 60) if seed % 2 else garbled_hints(rng, 60))
    used_before, wanted = int(rng.integers(200, 1200)), int(rng.integers(1, 80))
    victims = policy.victims(pages, wanted, 1, used_before, 1200).tolist()
    gone: set[int] = set()
    for page in victims:
        assert pages.granules[page] and page not in gone
        assert pages.access[page] < used_before, "a page in use went"
        assert not kept_children(pages, gone, page), "a page went before its descendants"
        gone.add(page)
    assert victims or not [
        slot for slot in np.flatnonzero(pages.granules) if pages.access[slot] < used_before
        and not kept_children(pages, set(), slot)
    ], "there was something to evict"  # fmt: skip
    freed = int(pages.granules[victims].sum())
    assert freed >= wanted or not [
        slot for slot in np.flatnonzero(pages.granules).tolist()
        if slot not in gone and pages.access[slot] < used_before and not kept_children(pages, gone, slot)
    ], "it stopped early"  # fmt: skip
    assert freed - int(pages.granules[victims[-1:]].sum()) < wanted, "it went on too long"


def conversations(rng: np.random.Generator, chains: int) -> Candidates:
    """Chains that branch, each page last used with what hangs on it or later, no two branches at one moment."""
    parent, depth, access = [], [], []
    for _ in range(chains):
        above, started = (NONE, 0) if not parent or rng.random() < 0.5 else (int(rng.integers(len(parent))), 1)
        for _ in range(int(rng.integers(1, 9))):
            parent.append(above)
            depth.append(depth[above] + 1 if started else 0)
            access.append(0)
            above, started = len(parent) - 1, 1
    ends = sorted(set(range(len(parent))) - set(parent))
    for used, slot in zip(rng.permutation(1000)[: len(ends)].tolist(), ends, strict=True):
        while slot != NONE and access[slot] < used + 1:
            access[slot], slot = used + 1, parent[slot]
    return Candidates(
        np.array(access, dtype=np.uint64), rng.integers(0, MOST_USES + 1, len(parent)).astype(np.uint8),
        np.array(parent, dtype=np.uint32), np.array(depth, dtype=np.uint32),
        rng.integers(1, 5, len(parent)).astype(np.uint32), len(parent),
    )  # fmt: skip


class OneByOne:
    """Which pages are ends, found anew for each that goes."""

    def __init__(self, pages: Candidates, granules: int, used_before: int) -> None:
        self.pages, self.granules, self.used_before, self.gone = pages, granules, used_before, list[int]()

    def wants_more(self) -> bool:
        return int(self.pages.granules[self.gone].sum()) < self.granules

    def ends(self) -> list[int]:
        left = [slot for slot in range(self.pages.count) if slot not in self.gone]
        above = {int(self.pages.parent[slot]) for slot in left}
        return [slot for slot in left if slot not in above and self.pages.access[slot] < self.used_before]


@pytest.mark.parametrize("name", ["lru", "auto"])
@pytest.mark.parametrize("seed", range(40))
def test_of_the_ends_of_chains_the_lowest_goes_each_time(name, seed):
    rng = np.random.default_rng(seed)
    pages, kinds = conversations(rng, 30), None
    rank: Recency | Worth = Recency(pages)
    if name == "auto":
        pages.access[:] *= np.uint64(1 << 36)
        kinds = classes_of(pages.uses, pages.uses)
        rank = Worth(Lines(rng.random((TURNS * USES, BINS))), kinds, pages, 1 << 47)
    used_before, wanted = int(np.quantile(pages.access, rng.uniform(0.5, 1))), int(rng.integers(1, 200))
    slow = OneByOne(pages, wanted, used_before)
    while slow.wants_more() and (ends := slow.ends()):
        slow.gone.append(min(ends, key=lambda slot: (rank.one(slot), -int(pages.depth[slot]), slot)))
    assert lowest_first(Frontier(pages, used_before, Room()), wanted, 1, rank, kinds).tolist() == slow.gone


@pytest.mark.parametrize("seed", range(40))
def test_s3_fifo_takes_from_the_queue_that_is_too_long_what_queued_first(seed):
    rng = np.random.default_rng(seed)
    pages, hints = conversations(rng, 30), Hints(None, 300)
    count, wanted, number = pages.count, int(rng.integers(1, 200)), 1000
    hints.header[2] = number
    hints.queue[:count], hints.entered[:count] = rng.random(count) < rng.random(), rng.permutation(number)[:count]
    uses, entered, is_main = pages.uses.copy(), hints.entered.copy(), hints.queue.copy() > 0
    slow = OneByOne(pages, wanted, int(np.quantile(pages.access, rng.uniform(0.5, 1))))
    while slow.wants_more() and (ends := slow.ends()):
        small, main = [slot for slot in ends if not is_main[slot]], [slot for slot in ends if is_main[slot]]
        num_small = sum(not is_main[slot] for slot in range(count) if slot not in slow.gone)
        of_small = bool(small) and (num_small > int(0.1 * count) or not main)
        slot = min(small if of_small else main, key=lambda slot: entered[slot])
        if not uses[slot]:
            slow.gone.append(slot)
        elif of_small:
            while slot != NONE and not is_main[slot]:
                is_main[slot], uses[slot], entered[slot], number = True, 0, number, number + 1
                slot = int(pages.parent[slot])
        else:
            uses[slot], entered[slot], number = min(uses[slot], 3) - 1, number, number + 1
    assert POLICIES["s3-fifo"](hints).victims(pages, wanted, 1, slow.used_before, 5000).tolist() == slow.gone
    assert pages.uses.tolist() == uses.tolist()
    assert hints.entered.tolist() == entered.tolist()


@policies
def test_a_choice_leaves_nothing_behind_for_one_among_more_or_fewer_pages(name):
    rng, policy = np.random.default_rng(7), POLICIES[name](Hints(None, 90))
    for slots in (60, 20, 90, 45):
        pages = random_pages(rng, slots)
        fresh = POLICIES[name](Hints(None, 90)).victims(replace(pages, uses=pages.uses.copy()), 30, 1, 900, 1200)
        policy.hints.queue[:] = 0
        policy.hints.entered[:] = 0
        policy.hints.header[:] = 0
        assert len(fresh) and policy.victims(pages, 30, 1, 900, 1200).tolist() == fresh.tolist()


@policies
def test_a_number_of_pages_that_is_wrong_hinders_nothing(name):
    """It is a counter in the pool's files."""
    pages = replace(conversations(np.random.default_rng(0), 4), count=0)
    assert POLICIES[name](Hints(None, len(pages.granules))).victims(pages, 1, 1, 5000, 5000).size


@policies
def test_small_pages_go_in_any_number_to_make_room_for_a_large_one(name):
    """Most of the space is a few pages' that were used just now, and what goes first is small."""
    slots = 2000
    granules = np.ones(slots, dtype=np.uint32)
    granules[-100:] = 400
    access = np.arange(1, slots + 1, dtype=np.uint64)
    unlinked, roots = np.full(slots, NONE, dtype=np.uint32), np.zeros(slots, dtype=np.uint32)
    pages = Candidates(access, np.zeros(slots, dtype=np.uint8), unlinked, roots, granules, slots)
    policy, hints = POLICIES[name], Hints(None, slots)
    hints.entered[:] = np.arange(slots)
    victims = policy(hints).victims(pages, 1500, 1, 1901, 5000)
    assert int(granules[victims].sum()) == 1500


def test_a_page_alone_is_worth_what_it_is_among_others():
    rng = np.random.default_rng(7)
    pages = random_pages(rng, 400)
    pages.access[:] = rng.integers(1, 1 << 50, 400)
    pages.access[:40] = (1 << 50) - rng.integers(0, 1 << 30, 40).astype(np.uint64)
    worth = Worth(Lines(rng.random((TURNS * USES, BINS))), classes_of(pages.uses, pages.uses), pages, 1 << 50)
    assert [worth.one(slot) for slot in range(400)] == pytest.approx(worth.all(np.arange(400)).tolist())


def test_an_age_is_in_the_bin_between_whose_edges_it_is_alone_and_among_others():
    ages = np.concatenate([EDGES[:-1], EDGES[1:] - 1, [-1.0, 2.0**62]])
    expected = [*range(BINS), *range(BINS), 0, BINS - 1]
    assert bins_of(ages).tolist() == list(map(bin_of, ages.tolist())) == expected


def test_a_page_that_came_back_is_not_of_the_class_of_what_is_asked_about_it_once():
    hints = Hints(None, 8)
    policy, (none, zero) = POLICIES["auto"](hints), np.array([[NONE], [0]], dtype=np.uint32)
    document, question = np.array([7 << 40], dtype=np.uint64), np.array([9 << 40], dtype=np.uint64)
    unused, used, slots = np.zeros(1, dtype=np.uint8), np.ones(1, dtype=np.uint8), np.zeros(1, dtype=np.int64)

    def classes():
        return classes_of(hints.turn[:2], np.zeros(2, dtype=np.uint8)).tolist()

    policy.stored(Arrivals(slots, document, none, unused, 1), 10)
    policy.stored(Arrivals(slots + 1, question, zero, unused, 2), 10)
    assert len(set(classes())) == 1, "both are new"
    ages = np.full(1, 10, dtype=np.uint64)
    policy.evicted(policy.victims(Candidates(ages, unused, none, zero, zero + 1, 1), 1, 1, 20, 20), document)
    policy.stored(Arrivals(slots, document, none, unused, 1), 30)
    policy.stored(Arrivals(slots + 1, question, zero, used, 2), 30)
    assert len(set(classes())) == 2


@policies
def test_hints_that_are_garbage_end_no_put(pool, name):
    with EmbeddedStore(pool, CAPACITY, eviction=name) as store:
        (file,) = pool.glob("*/policy")
        space, rng = space_in(store), np.random.default_rng(1)
        for i in range(12):
            file.open("r+b").write(rng.bytes(file.stat().st_size))
            assert put_chain(space, chain(f"{i}", 6)) == [Put.STORED] * 6
        audit(store)


@policies
def test_every_policy_keeps_whole_beginnings_under_churn(pool, name):
    rng = random.Random(3)
    with EmbeddedStore(pool, CAPACITY, eviction=name) as store:
        space = space_in(store)
        chains = [chain(f"{i}", 8) for i in range(12)]
        for _ in range(120):
            keys = rng.choice(chains)
            put_chain(space, keys[: rng.randint(1, 8)])
            get_page(space, rng.choice(keys))
            for each in chains:
                assert sum(space.contains(each)) == space.lookup(each).pages, "a page went before its descendants"
        assert store.stats().evicted_pages > 40
        audit(store)


def test_s3_fifo_keeps_what_was_used_again_where_lru_lets_a_scan_through(pool):
    def used_twice(name):
        with EmbeddedStore(pool / name, CAPACITY, eviction=name) as store:
            space, hot = space_in(store), [chain(f"hot {i}", 1)[0] for i in range(8)]
            for key in hot:
                put_chain(space, [key])
            pages = inside(store).table
            pages.set_uses(pages.live_slots(), np.ones(8, dtype=np.uint8))
            for i in range(30):
                put_chain(space, chain(f"scan {i}", 1))
            return sum(space.contains(hot))

    assert used_twice("lru") == 0
    assert used_twice("s3-fifo") == 8


def test_a_use_is_counted_once_a_second_and_no_further_than_there_is_room(pool, store, space, monkeypatch):
    (key,) = chain("a", 1)
    put_chain(space, [key])
    pages = inside(store).table
    (slot,) = pages.live_slots()

    def uses():
        return int(pages.uses(pages.access[[slot]])[0])

    now = table.now_ns()
    assert uses() == 0
    for i in range(1, MOST_USES + 5):
        monkeypatch.setattr(table, "now_ns", lambda i=i: now + 2 * i * 10**9)
        for _ in range(3):
            get_page(space, key)
        assert uses() == min(i, MOST_USES)
    put_chain(space, chain("a", 2))
    assert uses() == MOST_USES and int(pages.access[slot]) & 3 == table.READ


def test_the_pool_names_its_policy_and_a_process_that_asks_for_another_is_told(pool, caplog):
    EmbeddedStore(pool, CAPACITY, eviction="s3-fifo").close()
    with EmbeddedStore(pool, eviction="lru") as store:
        assert store.eviction == "s3-fifo"
        assert [record.message for record in caplog.records if "evicts by s3-fifo" in record.message]
        code = "print(store.eviction); store.choose_eviction('auto'); print(store.eviction)"
        assert run("import contextlib", pool).returncode == 0
        process = run(code, pool)
        assert process.stdout.split() == ["s3-fifo", "auto"]
        assert store.eviction == "auto"
    caplog.clear()
    with EmbeddedStore(pool) as store:
        assert store.eviction == "auto" and not [r for r in caplog.records if "evicts by" in r.message]
        with pytest.raises(PoolError, match="eviction 'fifo' is unknown: expected one of lru, "):
            store.choose_eviction("fifo")


def test_a_new_pool_has_the_default_policy_and_a_process_that_asks_for_it_hears_nothing(pool, caplog):
    with EmbeddedStore(pool, CAPACITY) as store, EmbeddedStore(pool, eviction=DEFAULT_POLICY) as other:
        assert store.eviction == other.eviction == DEFAULT_POLICY
    assert not [record for record in caplog.records if "evicts by" in record.message]


def test_a_pool_of_a_version_without_policies_keeps_its_pages_and_is_lru(pool):
    keys = chain("a", 4)
    with EmbeddedStore(pool, CAPACITY) as store:
        put_chain(space_in(store), keys)
        pages = inside(store).table
        pages._header[16:18] = 0
        pages.access |= np.uint64(0x3F)  # the lowest bits of a time
    (data_folder(pool) / "policy").unlink()
    with EmbeddedStore(pool, eviction="lru") as store:
        pages = inside(store).table
        assert space_in(store).lookup(keys).pages == 4 and store.eviction == "lru"
        assert not pages.uses(pages.access[pages.live_slots()]).any()
        for i in range(30):
            assert put_chain(space_in(store), chain(f"{i}", 2)) == [Put.STORED] * 2
        audit(store)


def audit_links(store):
    """Nothing outlives what it hangs on, nor comes before it."""
    pool = inside(store)
    with pool.writer.locked(time.monotonic() + DEADLINE_S):
        pages, live = pool.table, pool.table.live_slots()
        linked = live[pages.parent[live] < pages.max_pages]
        parents = pages.parent[linked].astype(np.int64)
        assert (pages.granules[parents] > 0).all() and (pages.depth[parents] < pages.depth[linked]).all()


@pytest.mark.long
@pytest.mark.parametrize("name", ["s3-fifo", "auto"])
def test_processes_killed_at_random_while_they_decide_leave_a_sound_pool_that_evicts_by_its_policy(
    pool, monkeypatch, tmp_path, name
):
    """Several write more than the pool holds, so at most moments one of them is choosing pages, or noting new ones."""
    report, rng = tmp_path / "wrong", random.Random(6)
    monkeypatch.setenv("WRONG_BYTES_FILE", str(report))
    with EmbeddedStore(pool, CAPACITY, eviction=name) as store:
        space, crew = space_in(store, "later"), Crew(pool, ["evict", "write", "mix", "receive"])
        try:
            for _ in range(400 if LONG else 12):
                was = store.stats().evicted_pages
                wait_for(lambda was=was: store.stats().evicted_pages > was)
                for victim in rng.sample(range(4), rng.randint(1, 3)):
                    crew.kill(victim)
                assert not report.exists(), report.read_text()
                audit(store, idle=False)
                audit_links(store)
        finally:
            crew.stop()
        assert store.eviction == name
        audit(store)
        for i in range(20):
            assert put_chain(space, chain(f"later {i}", 2)) == [Put.STORED] * 2
        audit(store)


@pytest.mark.parametrize("moment", ["S3Fifo.victims", "_Choice.note", "S3Fifo.stored", "Ghosts.add"])
def test_a_process_killed_while_its_policy_decides_leaves_a_sound_pool(pool, moment):
    with EmbeddedStore(pool, CAPACITY, eviction="s3-fifo") as store:
        space = space_in(store)
        for i in range(16):
            put_chain(space, chain(f"{i}", 1))
        pages = inside(store).table
        pages.set_uses(pages.live_slots()[:8], np.full(8, 2, dtype=np.uint8))
        code = f"""
            from store_client.embedded.policies.s3_fifo import Ghosts, S3Fifo, _Choice
            def die(*arguments): os.kill(os.getpid(), 9)
            {moment} = die
            for i in range(40): put_chain(space, chain("new %d" % i, 1))
        """
        assert run(code, pool).returncode == -signal.SIGKILL
        audit(store)
        for i in range(30):
            assert put_chain(space, chain(f"later {i}", 2)) == [Put.STORED] * 2
        audit(store)


def test_without_room_for_hints_a_pool_is_lru_and_says_so(pool, caplog):
    EmbeddedStore(pool, CAPACITY, eviction="s3-fifo").close()
    file = data_folder(pool) / "policy"
    file.unlink()
    file.mkdir()
    with EmbeddedStore(pool) as store:
        assert store.eviction == "lru"
        assert any("no room for what its eviction policy remembers" in record.message for record in caplog.records)
        for i in range(30):
            assert put_chain(space_in(store), chain(f"{i}", 2)) == [Put.STORED] * 2
    os.rmdir(file)


def test_what_comes_back_is_known_by_its_name_for_a_while():
    hints = Hints(None, 16)
    policy = POLICIES["s3-fifo"](hints)
    slots, prints = np.arange(4), np.arange(1, 5, dtype=np.uint64) * np.uint64((1 << 40) + 1)
    parents, uses = np.full(4, NONE, dtype=np.uint32), np.zeros(4, dtype=np.uint8)
    policy.stored(Arrivals(slots, prints, parents, uses, 4), 10)
    policy.evicted(slots[:2], prints[:2])
    policy.stored(Arrivals(slots, prints, parents, uses, 4), 20)
    assert hints.queue[:4].tolist() == [1, 1, 0, 0], "the main queue for what came back"
