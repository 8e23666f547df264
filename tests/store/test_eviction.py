"""Space: the capacity holds, is nearly all usable, and chains lose their ends first."""

import errno
import random

import numpy as np
import pytest
from long_form import LONG
from simulated.waiting import wait_for
from store.audit import audit
from store.pools import garble, space_in

from mooncake_connector.metrics.registry import AGES_S
from store_client import EmbeddedStore, Put
from store_client.embedded import table
from store_client.embedded.allocator import FreeRuns, as_runs
from store_client.embedded.arena import GRANULE, Arena
from store_client.embedded.folder import index_nbytes
from store_client.embedded.policies import Candidates, Hints
from store_client.embedded.policies.lru import Lru
from store_client.embedded.row import NONE
from store_client.testing import DEADLINE_S, chain, get_page, page_bytes, parents_of, put_chain, put_pages


def test_the_least_recently_used_goes_first(pool):
    with EmbeddedStore(pool, 1 << 20) as store:
        space = space_in(store)
        for i in range(16):
            put_chain(space, chain(f"{i}", 1))
        assert get_page(space, chain("0", 1)[0]) is not None
        put_chain(space, chain("new", 1))
        assert space.contains([chain("0", 1)[0], chain("1", 1)[0]]) == [True, False]


def test_how_long_evicted_pages_were_unused_is_counted(pool, monkeypatch):
    """By the clock of the pool, which the test turns on by ten minutes; what is cleared is not counted."""
    with EmbeddedStore(pool, 1 << 20) as store:
        space = space_in(store)
        put_chain(space, chain("old", 16))
        turned_ns = table.now_ns() + 600 * 10**9
        monkeypatch.setattr("store_client.embedded.evictor.now_ns", lambda: turned_ns)
        put_chain(space, chain("new", 4))
        store.clear()
        stats = store.stats()
    assert stats.evicted_pages >= 4 and sum(stats.evicted_ages) == stats.evicted_pages
    assert stats.evicted_ages[AGES_S.index(900.0)] == stats.evicted_pages, "all within 15 minutes, none within 5"
    assert stats.evicted_unused_s == pytest.approx(600 * stats.evicted_pages, rel=0.3)


@pytest.mark.parametrize("policy", ["lru", "s3-fifo", "auto"])
def test_a_pool_that_may_not_grow_to_its_capacity_keeps_what_it_has_room_for(pool, monkeypatch, policy):
    """A hundredth of the capacity may be more than all that there is room for."""
    secure, most = Arena.secure, (8 << 20) // GRANULE

    def short_of_room(arena, start, stop):
        if stop > most:
            raise OSError(errno.ENOSPC, "no room")
        secure(arena, start, stop)

    monkeypatch.setattr(Arena, "secure", short_of_room)
    with EmbeddedStore(pool, 1 << 30, eviction=policy) as store:
        space = space_in(store)
        for i in range(140):
            assert put_chain(space, chain(f"{i}", 1)) == [Put.STORED]
            assert store.stats().pages >= min(i + 1, 120)
        audit(store)


@pytest.mark.long
def test_descendants_go_before_ancestors(pool):
    rng = random.Random(3)
    with EmbeddedStore(pool, 4 << 20) as store:
        space = space_in(store)
        chains = [chain(f"{i}", 12) for i in range(20)]
        for _ in range(1000 if LONG else 150):
            keys = rng.choice(chains)
            if rng.random() < 0.7:
                put_chain(space, keys[: rng.randint(1, 12)])
            else:
                get_page(space, rng.choice(keys))
            for each in chains:
                assert sum(space.contains(each)) == space.lookup(each).pages, "a page went before its descendants"
        assert store.stats().evicted_pages > 100
        audit(store)


def test_a_chain_longer_than_the_pool_keeps_its_beginning(pool):
    keys = chain("long", 40)
    with EmbeddedStore(pool, 1 << 20) as store:
        space = space_in(store)
        for at in range(0, 40, 5):
            few = keys[at : at + 5]
            pages = [page_bytes(key) for key in few]
            put_pages(space, few, pages, parents=parents_of(keys)[at : at + 5], deadline_s=DEADLINE_S)
        assert space.lookup(keys).pages == 16
        assert store.stats().failures == {"full": 24}


@pytest.mark.long
def test_95_percent_of_the_arena_are_usable_under_a_churn_of_sizes(pool):
    rng = random.Random(5)
    with EmbeddedStore(pool, 64 << 20) as store:
        lowest = 1.0
        for i in range(2400 if LONG else 800):
            nbytes = rng.choice([4096, 12288, 65536, 262144, 1048576])
            space, (key,) = space_in(store, f"{nbytes}"), chain(f"{i}", 1)
            assert put_chain(space, [key], nbytes) == [Put.STORED]
            got = get_page(space, key, nbytes)
            assert got is not None and np.array_equal(got, page_bytes(key, nbytes))
            if i > 400:
                lowest = min(lowest, store.stats().used_nbytes / store.stats().capacity_nbytes)
        assert lowest >= 0.95
        assert store.stats().used_nbytes <= 64 << 20
        audit(store)


def test_a_flipped_byte_is_a_miss_a_counter_and_a_new_chance(pool, store, space):
    keys = chain("a", 2)
    put_chain(space, keys)
    (arena,) = pool.glob("*/arena")
    content = arena.read_bytes()
    at = content.find(page_bytes(keys[1])[:64].tobytes()) + 777
    garble(arena, at, bytes([content[at] ^ 1]))
    assert get_page(space, keys[0]) is not None
    assert get_page(space, keys[1]) is None
    wait_for(lambda: store.stats().corrupt_pages == 1)  # counts are on their way where the page is just being dropped
    wait_for(lambda: space.contains(keys) == [True, False])  # nobody has to put anything for the page to be dropped
    assert put_chain(space, keys) == [Put.PRESENT, Put.STORED]
    assert get_page(space, keys[1]) is not None


def test_all_corrupt_pages_of_a_batch_are_dropped(pool, space):
    keys = chain("a", 12)
    put_chain(space, keys)
    (arena,) = pool.glob("*/arena")
    content = bytearray(arena.read_bytes())
    content[7::4096] = bytes(byte ^ 1 for byte in content[7::4096])
    garble(arena, 0, content)
    assert space.read(keys, lambda i, view: None, nbytes=65536) == [False] * len(keys)
    wait_for(lambda: not any(space.contains(keys)))  # those met after the first one are dropped as well


@pytest.mark.parametrize("max_pages", [150_000, 5_000_000])
def test_the_index_takes_at_most_300_bytes_a_page(max_pages):
    assert index_nbytes(max_pages) / max_pages <= 300


def test_lru_counts_a_page_as_used_when_a_descendant_is():
    pages = Candidates(
        access=np.array([1, 5, 2, 9], np.uint64), uses=np.zeros(4, np.uint8),
        parent=np.array([NONE, 0, NONE, 2], np.uint32), depth=np.array([0, 1, 0, 1], np.uint32),
        granules=np.ones(4, np.uint32), count=4,
    )  # fmt: skip
    lru = Lru(Hints(None, 4))
    assert lru.victims(pages, 4, 4, 100, 100).tolist() == [1, 0, 3, 2]
    assert lru.victims(pages, 1, 1, 100, 100).tolist() == [1]
    assert lru.victims(pages, 4, 4, 9, 100).tolist() == [1, 0]


def test_free_runs_coalesce_and_fit_best():
    free = FreeRuns(as_runs([(0, 10), (20, 3), (30, 100)]))
    assert free.take_whole(1, 3) == [20]
    assert free.take_whole(3, 3) == [0, 3, 6]
    free.add(as_runs([(20, 10)]))
    assert free.runs().tolist() == [[9, 1], [20, 110]]
    assert free.take_pieces(111, 2) == [(20, 110), (9, 1)]
    assert free.total == 0


def test_space_given_back_twice_is_an_error():
    free = FreeRuns(as_runs([(0, 10)]))
    with pytest.raises(ValueError, match="free already"):
        free.add(as_runs([(5, 2)]))
