"""What the tier `object` deletes: by namespace, age, size and capacity, by many hosts at once, with any clock."""

import os
import threading
import time

import pytest
from tiers.s3_servers import Files, environment, line, opened, skewed
from tiers.test_object import requests
from tiers.test_object_faults import refused

from store_client.testing import PAGE_NBYTES, chain
from store_client.tiers.base import SEAL_NBYTES, Purged
from store_client.tiers.testing import DEADLINE_S, Memory, contains, new_space, write

OBJECT_NBYTES = PAGE_NBYTES + SEAL_NBYTES
HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    environment(monkeypatch)


@pytest.fixture
def store(tmp_path):
    """An S3 server with nothing in it, whose objects are files that can be made older."""
    with Files(tmp_path) as server:
        yield server


@pytest.fixture
def memory():
    return Memory()


def age(store, space, key, hours: float) -> None:
    (path,) = [path for path in store.pages() if (path.name, path.parts[-4]) == (key.hex(), space.namespace.hex())]
    written_s = time.time() - hours * HOUR_S
    os.utime(path, (written_s, written_s))


def kept(tier, space, keys) -> int:
    """How many of the last pages of a chain are there; none of those before them may be."""
    there = contains(tier, space, keys)
    count = sum(there)
    assert there == [False] * (len(keys) - count) + [True] * count
    return count


def fill(tier, store, memory, pages: int):
    """Pages that were written an hour apart, the first of them so many hours ago."""
    space, keys = new_space(), chain("old", pages)
    write(tier, memory, space, keys)
    for index, key in enumerate(keys):
        age(store, space, key, pages - index - 0.5)
    return space, keys


def test_pages_are_kept_for_so_many_days(store, memory):
    tier = opened(store.port, keep_days=4.1 / 24)
    space, keys = fill(tier, store, memory, 10)
    tier.tidy(DEADLINE_S)
    assert kept(tier, space, keys) == 4
    stats = tier.stats()
    assert (stats.pages, stats.used_nbytes, stats.evicted_pages) == (4, 4 * OBJECT_NBYTES, 6)
    tier.close()


def test_what_was_written_first_goes_where_it_is_too_much(store, memory):
    tier = opened(store.port, capacity=8 * OBJECT_NBYTES)
    space, keys = fill(tier, store, memory, 8)
    tier.tidy(DEADLINE_S)
    assert kept(tier, space, keys) == 8, "all of the capacity may be used"
    tier._retention._next_s = 0.0
    tier._retention.every_s = 0.0
    more = chain("more", 3)
    write(tier, memory, space, more)
    tier.tidy(DEADLINE_S)
    assert contains(tier, space, more) == [True] * 3 and kept(tier, space, keys) == 4, "down to nine tenths"
    assert tier.stats().used_nbytes == 7 * OBJECT_NBYTES and tier.stats().capacity_nbytes == 8 * OBJECT_NBYTES
    tier.close()


def test_of_pages_of_one_minute_no_more_go_than_must(store, memory):
    tier = opened(store.port, capacity=10 * OBJECT_NBYTES)
    space, keys = new_space(), chain("same", 20)
    write(tier, memory, space, keys)
    for key in keys:
        age(store, space, key, 2)
    tier.tidy(DEADLINE_S)
    assert sum(contains(tier, space, keys)) == 9 == tier.stats().pages
    tier.close()


def test_many_hosts_that_tidy_at_once_delete_no_more_than_one_would(store, memory):
    tiers = [opened(store.port, capacity=20 * OBJECT_NBYTES) for _ in range(6)]
    space, keys = fill(tiers[0], store, memory, 30)
    wrong, together = [], threading.Barrier(len(tiers))

    def work(tier):
        tier._retention.every_s = 0.0
        together.wait(60)
        try:
            tier.tidy(DEADLINE_S)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(tier,)) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong, wrong
    assert kept(tiers[0], space, keys) == 18
    for tier in tiers:
        tier.close()


def test_a_host_leaves_alone_what_another_one_did_just_now(store, memory):
    first, second = (opened(store.port, keep_days=1) for _ in range(2))
    first.tidy(DEADLINE_S)
    assert first.stats().pages == 0
    before = requests(second)["list"]
    second.tidy(DEADLINE_S)
    assert requests(second)["list"] == before and second.stats().pages is None
    asked = requests(second)
    second.tidy(DEADLINE_S)
    assert requests(second) == asked, "it does not even ask again"
    swept = store.bucket / "some" / "prefix" / "mckv1" / "swept"
    os.utime(swept, (time.time() - 2 * HOUR_S,) * 2)
    second._retention._next_s = 0.0
    second.tidy(DEADLINE_S)
    assert second.stats().pages == 0
    for tier in (first, second):
        tier.close()


def test_without_rules_nothing_is_asked(store, memory):
    tier = opened(store.port)
    before = requests(tier)
    tier.tidy(DEADLINE_S)
    assert requests(tier) == before and tier.stats().used_nbytes is None
    tier.close()


def test_a_sweep_goes_on_where_its_time_was_up(store, memory):
    """Thousands of objects, more than one listing tells: each call does a part."""
    folder = store.bucket / f"some/prefix/mckv1/{'ab' * 32}/0-4x0-2/4"
    folder.mkdir(parents=True)
    keys = chain("many", 1100)
    old_s = time.time() - 48 * HOUR_S
    for key in keys:
        path = folder / key.hex()
        path.write_bytes(b"x")
        os.utime(path, (old_s, old_s))
    tier = opened(store.port, keep_days=1)
    calls, deadline_s = 0, time.monotonic() + 120
    while tier.stats().pages is None and time.monotonic() < deadline_s:
        tier.tidy(1e-6)
        calls += 1
    assert calls > 1 and tier.stats().pages == 0
    assert tier.stats().evicted_pages == 1100 and store.pages() == []
    tier.close()


def test_purge_takes_what_all_conditions_apply_to(store, memory):
    tier, spaces, keys = opened(store.port), [new_space(), new_space()], chain("a", 4)
    big, bigger = chain("big", 2), 2 * PAGE_NBYTES

    def purged(space=None, **conditions):
        return tier.purge(space and space.namespace, deadline_s=DEADLINE_S, **conditions)

    for space in spaces:
        write(tier, memory, space, keys)
        write(tier, memory, space, big, bigger)
        for key in (*keys[:2], big[0]):
            age(store, space, key, 5)
    assert purged(spaces[0], older_than_s=6 * HOUR_S) == Purged(0, 0)
    assert purged(spaces[0], older_than_s=4 * HOUR_S, larger_than_nbytes=PAGE_NBYTES) == Purged(1, bigger)
    assert contains(tier, spaces[0], big, bigger) == [False, True]
    assert purged(spaces[0], older_than_s=4 * HOUR_S) == Purged(2, 2 * PAGE_NBYTES)
    assert contains(tier, spaces[0], keys) == [False, False, True, True]
    assert contains(tier, spaces[1], keys) == [True] * 4
    assert purged(larger_than_nbytes=PAGE_NBYTES) == Purged(3, 3 * bigger)
    assert purged(older_than_s=4 * HOUR_S) == Purged(2, 2 * PAGE_NBYTES)
    assert purged(spaces[1]) == Purged(2, 2 * PAGE_NBYTES)
    assert purged() == Purged(2, 2 * PAGE_NBYTES)
    assert store.pages() == []
    tier.close()


def test_a_purge_that_has_no_time_says_how_far_it_came(store, memory):
    with line(store.port) as between:
        tier, space, keys = opened(between.port), new_space(), chain("a", 3)
        write(tier, memory, space, keys)
        between.hold()
        text = refused(lambda: tier.purge(None, deadline_s=0.2), cause="timeout")
        assert "0 pages were deleted before that" in text
        between.release()
        tier.close()


def test_the_clock_of_a_host_does_not_matter_to_ages(store, memory):
    tier, space, keys = opened(store.port), new_space(), chain("a", 3)
    write(tier, memory, space, keys)
    age(store, space, keys[0], 3)
    program = (
        "import sys; from tiers.s3_servers import opened\n"
        "tier = opened(int(sys.argv[1]), keep_days=2 / 24)\n"
        "print(tier.purge(None, older_than_s=7200, deadline_s=60)); tier.tidy(60); print(tier.stats().pages)"
    )
    assert skewed(program, store.port, "+3h").splitlines() == [str(Purged(1, PAGE_NBYTES)), "2"]
    assert skewed(program, store.port, "-3h").splitlines() == [str(Purged(0, 0)), "None"], "it was swept just now"
    assert contains(tier, space, keys) == [False, True, True]
    tier.close()
