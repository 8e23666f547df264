"""What a pool remembers of pages that it does not have: an explanation that may be missing and never harms."""

import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lock_holder import stopped_holder
from long_form import LONG, examples
from store.audit import audit
from store.pools import CAPACITY, as_root, data_folder, fill, garble, inside, mounted, run, space_in
from store.test_kills import Crew

from store_client import EmbeddedStore, Put, Space
from store_client.embedded import folder
from store_client.embedded.evicted import Evicted, evicted_nbytes, num_entries
from store_client.embedded.names import hash_keys, join_keys
from store_client.embedded.table import now_ns
from store_client.fate import UNKNOWN, Fate, Known, Lost
from store_client.sharded import ShardView
from store_client.testing import SHARD, chain, namespace, page_bytes, put_chain, put_pages

MAX_PAGES = 4096
"""As many entries."""


def known(space: Space, keys: list[bytes]) -> list[Known]:
    return [fate.known for fate in space.explain(keys)]


def causes(space: Space, keys: list[bytes]) -> list[Lost | None]:
    return [fate.cause for fate in space.explain(keys)]


def hashes(keys: list[bytes], space: int = 1) -> "np.ndarray":
    return hash_keys(join_keys(keys), space)


# What is told of a page


def test_a_page_is_stored_or_unknown_before_anything_went(space):
    keys = chain("a", 4)
    put_chain(space, keys[:2])
    assert known(space, keys) == [Known.STORED] * 2 + [Known.UNKNOWN] * 2
    assert space.explain([]) == []


def test_a_page_that_made_room_for_others_says_since_when_and_how_long_it_was_unused(pool):
    with EmbeddedStore(pool, 1 << 20) as store:
        space, keys = space_in(store), [chain(f"{i}", 1)[0] for i in range(16)]
        for key in keys:
            put_chain(space, [key])
        table = inside(store).table
        (slot,) = table.slots(join_keys(keys[:1]), table.space[table.live_slots()[0]])
        unused_ns = min(3600 * 10**9, now_ns() // 2)
        table.backdate([slot], [now_ns() - unused_ns])
        put_chain(space, chain("new", 1))
        fate = space.explain(keys[:1])[0]
        assert (fate.known, fate.cause) == (Known.GONE, Lost.PRESSURE)
        assert 0 <= fate.ago_s < 600
        assert unused_ns / 1e9 - 0.1 <= fate.unused_s < unused_ns / 1e9 + 600
        assert known(space, keys[1:]) == [Known.STORED] * 15


def test_each_way_to_go_has_its_cause(pool, store, space):
    removed, cleared, all_cleared, kept = (chain(name, 2) for name in ("removed", "cleared", "all", "kept"))
    other = space_in(store, "other")
    put_chain(space, removed)
    space.remove(removed[1:])
    assert causes(space, removed) == [None, Lost.REMOVED]
    put_chain(other, cleared)
    other.clear()
    assert causes(other, cleared) == [Lost.CLEARED] * 2
    put_chain(space, all_cleared)
    store.clear()
    assert causes(space, all_cleared) == [Lost.CLEARED] * 2
    put_chain(space, kept)
    assert known(space, kept) == [Known.STORED] * 2


def test_a_page_found_corrupt_is_remembered_as_that(pool, store, space):
    keys = chain("a", 2)
    put_chain(space, keys)
    (arena,) = pool.glob("*/arena")
    content = bytearray(arena.read_bytes())
    content[7::4096] = bytes(byte ^ 1 for byte in content[7::4096])
    garble(arena, 0, content)
    assert store.verify().corrupt == 2
    assert causes(space, keys) == [Lost.CORRUPT] * 2


def test_pages_that_a_shrink_took_away_are_remembered(pool):
    keys = chain("a", 64)
    with EmbeddedStore(pool, 4 << 20) as store:
        put_chain(space_in(store), keys)
    with EmbeddedStore(pool, 2 << 20) as store:
        space = space_in(store)
        stored = space.lookup(keys).pages
        assert stored < 64
        gone = {fate.cause for fate in space.explain(keys) if fate.known is Known.GONE}
        assert gone == {Lost.SHRUNK}
        assert known(space, keys).count(Known.STORED) == sum(space.contains(keys))


def test_a_page_that_had_no_place_was_refused_and_is_stored_later(pool):
    keys = chain("long", 20)
    with EmbeddedStore(pool, 1 << 20) as store:
        space = space_in(store)
        put_chain(space, keys)
        assert space.lookup(keys).pages == 16
        fates = space.explain(keys)[16:]
        assert [(fate.known, fate.cause) for fate in fates] == [(Known.REFUSED, Lost.FULL)] * 4
        space.remove(keys[8:16])
        put_chain(space, keys[16:])
        assert known(space, keys[16:]) == [Known.STORED] * 4


def test_a_page_whose_put_found_the_pool_locked_was_refused(pool, store, space):
    keys = chain("a", 2)
    with stopped_holder(pool):
        assert put_pages(space, keys, [page_bytes(key) for key in keys], parents=[None] * 2, deadline_s=0.2)
        assert causes(space, keys) == [Lost.BUSY] * 2
    put_chain(space, keys)
    assert known(space, keys) == [Known.STORED] * 2


def test_the_latest_that_happened_to_a_page_is_told(pool, store, space):
    keys = chain("a", 1)
    for forget, cause in ((lambda: space.remove(keys), Lost.REMOVED), (space.clear, Lost.CLEARED)) * 2:
        put_chain(space, keys)
        assert known(space, keys) == [Known.STORED]
        forget()
        assert causes(space, keys) == [cause]


def test_namespaces_and_shards_do_not_mix(store):
    keys = chain("a", 1)
    first, second = space_in(store, "first"), space_in(store, "second")
    put_chain(first, keys)
    first.clear()
    assert known(first, keys) == [Known.GONE]
    assert known(second, keys) == [Known.UNKNOWN]


def test_a_view_of_all_shards_tells_what_is_known_of_a_part(store):
    keys, name = chain("a", 3), namespace("m")
    lower, upper = SHARD.__class__(0, 1, 0, 2), SHARD.__class__(1, 2, 0, 2)
    whole = SHARD.__class__(0, 2, 0, 2)
    for shard in (lower, upper):
        put_chain(store.space(name, shard), keys[:2])
    store.space(name, upper).remove(keys[1:2])
    view = ShardView(store, name, whole, 1024)
    fates = view.explain(keys)
    assert [fate.known for fate in fates] == [Known.STORED, Known.GONE, Known.UNKNOWN]
    assert fates[1].cause is Lost.REMOVED


# The table


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 60), st.sampled_from(list(Lost))), min_size=1, max_size=40))
def test_what_is_told_is_the_last_thing_noted_or_nothing(noted):
    table, last = _in_memory(), {}
    for number, cause in noted:
        key = chain(f"{number}", 1)[0]
        table.note(hashes([key]), cause, None if cause.refused else hashes([key]) * np.uint64(0))
        last[key] = cause
    told = table.fates(join_keys(list(last)), 1)
    for fate, cause in zip(told, last.values(), strict=True):
        assert fate == UNKNOWN or fate.cause is cause
        assert fate == UNKNOWN or (fate.known is Known.REFUSED) == cause.refused
    assert any(fate != UNKNOWN for fate in told)
    assert [table.fate(key, 1)[:2] for key in last] == [fate[:2] for fate in told], "one by one it is the same"
    assert table.fates(join_keys(chain("never", 5)), 1) == [UNKNOWN] * 5
    assert table.fate(chain("never", 1)[0], 1) == UNKNOWN


def test_the_newest_overwrites_and_most_of_a_pools_pages_are_remembered():
    table = _in_memory()
    keys = [os.urandom(32) for _ in range(2 * MAX_PAGES)]
    table.note(hashes(keys[:MAX_PAGES]), Lost.PRESSURE, np.zeros(MAX_PAGES, np.uint64))
    before = sum(fate is not UNKNOWN for fate in table.fates(join_keys(keys[:MAX_PAGES]), 1))
    assert before > MAX_PAGES // 2  # 1 - 1/e of them
    table.note(hashes(keys[MAX_PAGES:]), Lost.CLEARED, np.zeros(MAX_PAGES, np.uint64))
    later = sum(fate is not UNKNOWN for fate in table.fates(join_keys(keys[:MAX_PAGES]), 1))
    assert 0 < later < before


def test_a_torn_entry_is_nothing():
    keys = [os.urandom(32) for _ in range(64)]
    table = _in_memory()
    table.note(hashes(keys), Lost.PRESSURE, np.zeros(64, np.uint64))
    old = table._entries.copy()
    table.note(hashes(keys), Lost.CLEARED, np.zeros(64, np.uint64))
    table._entries[:, 0] = old[:, 0]  # whoever wrote these was stopped in between
    assert table.fates(join_keys(keys), 1) == [UNKNOWN] * 64


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_in_the_file_are_nothing_or_an_explanation(pool, seed):
    keys = fill(pool)
    rng = random.Random(seed)
    path = data_folder(pool) / "evicted"
    garble(path, 0, rng.randbytes(path.stat().st_size))
    with EmbeddedStore(pool, CAPACITY) as store:
        space = space_in(store)
        assert known(space, keys) == [Known.STORED] * 4
        assert all(isinstance(fate, Fate) for fate in space.explain(chain("b", 2000)))
        space.clear()
        assert causes(space, keys) == [Lost.CLEARED] * 4
        audit(store)


@pytest.mark.parametrize(
    "max_pages, entries", [(1, 4096), (1024, 4096), (20_000, 1 << 14), (524288, 1 << 18), (1 << 24, 1 << 18)]
)
def test_the_table_is_as_large_as_the_pool_within_bounds(max_pages, entries):
    assert num_entries(max_pages) == entries
    assert evicted_nbytes(max_pages) == 16 * entries


def _in_memory() -> Evicted:
    """A table in a file that is gone already."""
    path = Path(f"/dev/shm/mooncake-test-evicted-{os.getpid()}")
    table = Evicted(path, MAX_PAGES)
    path.unlink()
    return table


# Pools of other versions, other sizes, other processes


def test_a_pool_of_an_older_version_is_opened_as_before_and_remembers_from_now_on(pool):
    keys = fill(pool)
    (data_folder(pool) / "evicted").unlink()
    with EmbeddedStore(pool, CAPACITY) as store:
        space = space_in(store)
        assert space.lookup(keys).pages == 4
        space.remove(keys[3:])
        assert known(space, keys) == [Known.STORED] * 3 + [Known.GONE]
        assert (data_folder(pool) / "evicted").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("wrong", ["short", "link", "folder", "pipe"])
def test_what_is_no_table_of_ours_is_made_anew_or_done_without(pool, wrong, tmp_path):
    keys = fill(pool)
    path, target = data_folder(pool) / "evicted", tmp_path / "target"
    target.write_bytes(b"theirs")
    path.unlink()
    if wrong == "short":
        path.write_bytes(b"x")
    elif wrong == "link":
        path.symlink_to(target)
    elif wrong == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with EmbeddedStore(pool, CAPACITY) as store:
        space = space_in(store)
        assert space.lookup(keys).pages == 4
        space.remove(keys[3:])
        assert known(space, keys)[3] == (Known.UNKNOWN if wrong == "folder" else Known.GONE)
        assert put_chain(space, keys) == [Put.PRESENT] * 3 + [Put.STORED]
    assert target.read_bytes() == b"theirs"


@as_root
def test_a_file_system_without_room_for_it_has_a_pool_that_remembers_nothing(pool):
    with mounted(pool, "size=64m"):
        keys = fill(pool, capacity=4 << 20)
        (data_folder(pool) / "evicted").unlink()
        with open(pool / "ballast", "wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, folder.free_nbytes(pool) - 4096)
        with EmbeddedStore(pool) as store:
            space = space_in(store)
            assert space.lookup(keys).pages == 4
            space.remove(keys[3:])
            assert known(space, keys) == [Known.STORED] * 3 + [Known.UNKNOWN]
        (pool / "ballast").unlink()


def test_a_pool_that_grows_or_shrinks_keeps_what_it_remembers(pool):
    keys = fill(pool)
    with EmbeddedStore(pool, CAPACITY) as store:
        space_in(store).remove(keys[3:])
    for capacity in (CAPACITY * 2, CAPACITY // 2):
        with EmbeddedStore(pool, capacity) as store:
            assert causes(space_in(store), keys)[3] is Lost.REMOVED


def test_a_pool_that_is_destroyed_takes_it_along(pool):
    fill(pool)
    assert (data_folder(pool) / "evicted").exists()
    assert folder.remove_pool(pool) == []
    assert not pool.exists()


def test_another_process_reads_what_this_one_noted(pool, store, space):
    keys = chain("a", 2)
    put_chain(space, keys)
    space.clear()
    told = run("print(*(fate.cause.value for fate in space.explain(chain('a', 2))))", pool)
    assert told.stdout.split() == ["cleared"] * 2


def test_a_writer_killed_between_the_note_and_the_change_has_told_of_nothing(pool, store, space):
    keys = chain("a", 3)
    put_chain(space, keys)
    code = """
        from store_client.embedded.evicted import Evicted
        note = Evicted.note
        def dies(*arguments):
            note(*arguments)
            os.kill(os.getpid(), 9)
        Evicted.note = dies
        space.clear()
    """
    assert run(code, pool).returncode == -signal.SIGKILL
    assert known(space, keys) == [Known.STORED] * 3
    audit(store)


@pytest.mark.long
def test_processes_that_are_killed_while_they_evict_leave_explanations_that_hold(pool, monkeypatch, tmp_path):
    """Whoever asks meanwhile gets an answer for every page: an entry is never half a cause."""
    monkeypatch.setenv("WRONG_BYTES_FILE", str(tmp_path / "wrong"))
    report = tmp_path / "wrong"
    rng = random.Random(4)
    with EmbeddedStore(pool, 4 << 20) as store:
        space, keys = space_in(store, "asked"), chain("asked", 8)
        crew, stop, faults = Crew(pool, ["write", "evict", "mix", "clear"]), threading.Event(), []

        def ask() -> None:
            while not stop.is_set():
                fates = space.explain(keys)
                explained = [fate.known in (Known.GONE, Known.REFUSED) for fate in fates]
                if explained != [fate.cause is not None for fate in fates] or len(fates) != len(keys):
                    faults.append(fates)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            for _ in range(200 if LONG else 10):
                put_chain(space, keys)
                for victim in rng.sample(range(4), 2):
                    crew.kill(victim)
                audit(store, idle=False)
        finally:
            stop.set()
            asking.join(60)
            crew.stop()
        assert not faults
        assert not report.exists()
        assert [fate is Known.STORED for fate in known(space, keys)] == space.contains(keys)
        store.clear()
        assert Known.STORED not in known(space, keys)
        audit(store)
