"""A capacity that changes: killed at any moment, beside writers and readers, and what an older version left."""

import time

import pytest
from store.audit import audit
from store.pools import inside, run, space_in

from store_client import EmbeddedStore, Put
from store_client.testing import chain, get_page, page_bytes, parents_of, put_chain

LARGE, SMALL = 8 << 20, 2 << 20


def fill(store, name, count=40):
    for i in range(count):
        put_chain(space_in(store), chain(f"{name} {i}", 4))


def open_elsewhere(pool, capacity, before=""):
    return run(f"{before}EmbeddedStore(sys.argv[1], {capacity}).close()", pool, opened=False).returncode


KILLED_AFTER_COMMIT = """
import contextlib
from store_client.embedded.ledger import Ledger
commits = int(sys.argv[4])
transaction = Ledger.transaction
@contextlib.contextmanager
def counted(self):
    global commits
    with transaction(self) as draft:
        yield draft
    commits -= 1
    if commits < 0:
        os.kill(os.getpid(), 9)
with EmbeddedStore(sys.argv[1], int(sys.argv[2])):
    Ledger.transaction = counted
    EmbeddedStore(sys.argv[1], int(sys.argv[3]))
"""


@pytest.mark.parametrize("commits", range(4))
@pytest.mark.parametrize("sizes", [(LARGE, SMALL), (SMALL, LARGE)], ids=["shrinking", "growing"])
def test_a_kill_while_the_capacity_changes_leaves_each_granule_one_owner(pool, sizes, commits):
    before, after = sizes
    with EmbeddedStore(pool, before) as store:
        fill(store, "before")
    run(KILLED_AFTER_COMMIT, pool, before, after, commits, opened=False)
    with EmbeddedStore(pool) as store:
        assert store.stats().capacity_nbytes in sizes
        assert store.stats().pages > 0, "the pool was kept"
        audit(store)
    with EmbeddedStore(pool, LARGE) as store:
        fill(store, "after")
        audit(store)
        report = store.verify()
        assert report.pages > 0 and report.corrupt == 0


@pytest.mark.parametrize("grown", [False, True])
def test_a_pool_whose_space_has_two_owners_is_not_used(pool, grown):
    """As a process left it that was killed while it shrank the pool, before the pages beyond were evicted first."""
    with EmbeddedStore(pool, LARGE) as store:
        fill(store, "before")
        writer = inside(store).writer
        with writer.locked(time.monotonic() + 60), writer._ledger.transaction() as draft:
            draft.capacity = draft.high_water = SMALL // 4096
            draft.free.clip(draft.capacity)
            if grown:
                draft.capacity = LARGE // 4096
    with EmbeddedStore(pool, LARGE) as store:
        fill(store, "after")
        audit(store)
        assert store.verify().corrupt == 0


def test_a_process_that_nobody_knows_of_keeps_the_space_that_it_has_mapped(pool):
    """Its owner's file was deleted from outside; without the space its next look into the arena could kill it."""
    with EmbeddedStore(pool, LARGE) as store:
        fill(store, "before")
        (arena,) = pool.glob("*/arena")
        for file in pool.glob("*/owners/*"):
            file.unlink()
        assert open_elsewhere(pool, SMALL) == 0
        assert arena.stat().st_blocks * 512 >= LARGE
    assert open_elsewhere(pool, SMALL) == 0
    assert arena.stat().st_blocks * 512 <= SMALL, "nobody maps it now"


def test_a_shrink_does_not_wait_for_writers_and_gives_their_space_to_nobody_else(pool):
    keys = chain("slow", 100)
    space_is_back = []
    with EmbeddedStore(pool, LARGE) as store:
        space = space_in(store)

        def write_slowly(i, view):
            if i == 50:
                inside(store).resize(SMALL, 1.0)
                assert store.stats().capacity_nbytes == SMALL
                inside(store).resize(LARGE, 1.0)
                fill(store, "meanwhile")
                space_is_back.append(store.stats().used_nbytes)
            view[:] = page_bytes(keys[i])

        outcome = space.write(keys, write_slowly, nbytes=65536, parents=parents_of(keys), deadline_s=60)
        audit(store)
        assert space_is_back[0] <= LARGE - 100 * 65536
        for key, put in zip(keys, outcome, strict=True):
            page = get_page(space, key)
            assert (page is not None) == (put is Put.STORED)
            assert page is None or (page == page_bytes(key)).all()
        fill(store, "later")
        audit(store)
        assert store.verify().corrupt == 0


def test_all_processes_see_the_new_capacity(pool):
    with EmbeddedStore(pool, LARGE) as store:
        fill(store, "before")
        dies = "from store_client.embedded.table import Table\n"
        dies += "Table.set_capacity = lambda *a: os.kill(os.getpid(), 9)\n"
        assert open_elsewhere(pool, SMALL, dies) == -9
        fill(store, "after", 1)
        assert store.stats().capacity_nbytes == SMALL
        assert store.stats().used_nbytes <= SMALL
        audit(store)


def test_an_unchanged_capacity_is_right_however_full_the_file_system_is(pool, monkeypatch):
    with EmbeddedStore(pool, LARGE) as store:
        fill(store, "a", 4)
    monkeypatch.setattr("store_client.embedded.folder.free_nbytes", lambda folder: 0)
    for capacity in (LARGE, SMALL):
        with EmbeddedStore(pool, capacity) as store:
            assert store.stats().pages > 0
            audit(store)
