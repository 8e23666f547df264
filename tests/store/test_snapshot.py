"""A snapshot and back: equal pages, whole chains, the order of use, and nothing of the pool that it costs."""

from __future__ import annotations

import json
import os
import time

import pytest
from lock_holder import stopped_holder
from store.audit import audit
from store.pools import CAPACITY, as_root, garble, inside, mounted, running, space_in
from store.snapshots import SPACES, by_use, held_by, put_one, put_some, saved

from mooncake_connector.errors import PoolError, SnapshotError
from store_client import EmbeddedStore
from store_client.embedded import survey as survey_
from store_client.snapshot import Snapshot, restore, restoring, take_snapshot, writing
from store_client.snapshot.folders import partial_of
from store_client.testing import (
    DEADLINE_S,
    SHARD,
    chain,
    get_page,
    namespace,
    page_bytes,
    parents_of,
    put_chain,
    put_pages,
)

PAGES = 3 * 3 * 8
"""Of `put_some`."""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "snapshot"


@pytest.fixture
def full(pool):
    """A pool with several chains."""
    with EmbeddedStore(pool, CAPACITY) as store:
        put_some(store)
        yield store
        audit(store)


@pytest.fixture
def other(pool):
    """Another pool, empty."""
    with EmbeddedStore(pool.with_name("other"), CAPACITY) as store:
        yield store
        audit(store)


def back(folder, store, *arguments):
    with Snapshot(folder) as snapshot:
        return restore(snapshot, store, *arguments)


def put_group(store, model, kind, keys, some):
    """Those pages of a chain that a group of a model's layers has."""
    space = store.space(namespace(model, group=json.dumps({"kind": kind, "layers": [1]})), SHARD)
    keys, parents = [keys[i] for i in some], [parents_of(keys)[i] for i in some]
    pages = [page_bytes(key) for key in keys]
    put_pages(space, keys, pages, parents=parents, deadline_s=DEADLINE_S)


def shape(held):
    return {name: (page.parent, page.nbytes) for name, page in held.items()}


class TestRoundTrip:
    def test_every_page_comes_back_with_its_chain(self, full, folder, other):
        report = take_snapshot(full, folder)
        assert (report.pages, report.spaces, report.replaced, report.remains) == (PAGES, 3, False, False)
        restored = back(folder, other)
        assert (restored.pages, restored.nbytes) == (PAGES, report.nbytes)
        assert shape(held_by(other)) == shape(held_by(full))
        for name, shard, _ in SPACES:
            assert all(other.space(name, shard).lookup(chain(str(n), 8)).pages == 8 for n in range(3))

    def test_it_survives_the_pool(self, pool, folder):
        saved(pool, folder)
        os.rename(pool, pool.with_name("gone"))
        with EmbeddedStore(pool, CAPACITY) as store:
            assert back(folder, store).pages == PAGES == len(held_by(store))

    def test_pages_in_many_pieces(self, pool, folder, other):
        """Free space is in holes, so that pages lie in pieces, some in more than a row of the table names."""
        with EmbeddedStore(pool, CAPACITY) as store:
            small = chain("small", CAPACITY // 8192 - 1)
            pages = [page_bytes(key, 8192) for key in small]
            put_pages(space_in(store), small, pages, parents=[None] * len(small), deadline_s=DEADLINE_S)
            space_in(store).remove(small[::2])
            put_one(store, namespace("wide"), SHARD, "wide", 4, 65536)
            rows = [inside(store).table.any_at(int(page["slot"])) for page in store.survey().pages]
            assert any(found is not None and found.row.is_listed for found in rows)
            report = take_snapshot(store, folder, namespace("wide").digest)
            assert report.pages == 4
        assert back(folder, other).pages == len(held_by(other)) == 4

    def test_windows_and_states_hang_on_the_same_pages_as_before(self, pool, folder, other):
        """And come back behind them, however the pool numbers what it holds."""
        with EmbeddedStore(pool, CAPACITY) as store:
            for model in map(str, range(6)):
                for kind, some in (("full", range(6)), ("window", (4, 5)), ("state", (5,))):
                    put_group(store, model, kind, chain(model, 6), some)
            before = shape(held_by(store))
            take_snapshot(store, folder)
        assert back(folder, other).pages == 6 * 9
        assert shape(held_by(other)) == before
        links = {name: parent for name, (parent, _) in before.items() if parent is not None}
        assert sum(parent[2] == name[2] for name, parent in links.items()) == 6 * 3
        with EmbeddedStore(pool.with_name("small"), 2 << 20) as small:  # of which these take a half and more
            back(folder, small)
            put_chain(space_in(small, "new"), chain("new", 24))
            kept = held_by(small)
            assert 0 < small.stats().evicted_pages < 6 * 9
            for name in links.keys() & kept.keys():
                assert links[name] in kept, "a page outlived the one that it is of no use without"

    def test_one_namespace_alone(self, full, folder, other):
        take_snapshot(full, folder)
        assert back(folder, other, namespace("other").digest).pages == 24
        assert {name[0] for name in held_by(other)} == {namespace("other").digest}
        assert take_snapshot(full, folder, namespace("m").digest).pages == 48
        with Snapshot(folder) as snapshot:
            assert {space[0] for space in snapshot.spaces if space is not None} == {namespace("m")}

    def test_several_files(self, full, folder, other, monkeypatch):
        monkeypatch.setattr("store_client.snapshot.files.FILE_NBYTES", 20_000)
        monkeypatch.setattr(writing, "_BATCH_NBYTES", 9_000)
        take_snapshot(full, folder)
        sizes = [file.stat().st_size for file in folder.glob("pages.*")]
        assert len(sizes) > 10 and max(sizes) <= 20_000
        assert back(folder, other).pages == PAGES
        assert shape(held_by(other)) == shape(held_by(full))

    def test_progress_is_told_in_bytes(self, full, folder, other):
        told = []
        report = take_snapshot(full, folder, None, lambda done, total: told.append((done, total)))
        assert told[-1] == (report.nbytes, report.nbytes)
        told.clear()
        back(folder, other, None, lambda done, total: told.append((done, total)))
        assert told[-1] == (report.nbytes, report.nbytes) and sorted(told) == told

    def test_folder_and_files_are_private(self, full, folder):
        take_snapshot(full, folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
        assert sorted(os.listdir(folder.parent)) == [folder.name]


class TestUse:
    def test_a_snapshot_is_no_use_of_a_page(self, full, folder):
        before, counted = inside(full).table.access.copy(), full.stats().read_pages
        take_snapshot(full, folder)
        assert (inside(full).table.access == before).all() and full.stats().read_pages == counted

    def test_the_order_of_use_stays(self, full, folder, other):
        used = chain("1", 8)
        assert full.space(*SPACES[0][:2]).read(used, lambda i, view: None, nbytes=4096) == [True] * 8
        take_snapshot(full, folder)
        back(folder, other)
        assert by_use(held_by(other)) == by_use(held_by(full))
        assert {name[2] for name in by_use(held_by(other))[:8]} == set(used)

    def test_the_order_of_use_stays_over_a_reboot(self, full, folder, other, monkeypatch):
        """The clock of pages' use begins anew: all of it was before."""
        order = by_use(held_by(full))
        take_snapshot(full, folder)
        monkeypatch.setattr(restoring, "now_ns", lambda: 1_000_000)
        back(folder, other)
        monkeypatch.setattr(survey_, "now_ns", lambda: 1_000_000)
        held = held_by(other)
        assert by_use(held) == order and all(0 < page.idle_ns < 1_000_000 for page in held.values())

    def test_what_was_used_last_is_evicted_last_afterwards(self, full, folder, pool):
        full.space(*SPACES[0][:2]).read(chain("0", 8), lambda i, view: None, nbytes=4096)
        take_snapshot(full, folder)
        with EmbeddedStore(pool.with_name("small"), 1 << 20) as small:
            assert back(folder, small).pages == PAGES
            for i in range(200):
                put_chain(space_in(small, "new"), chain(f"new {i}", 1), 4096)
            assert 0 < small.stats().evicted_pages < PAGES
            assert small.space(*SPACES[0][:2]).lookup(chain("0", 8)).pages == 8

    def test_a_full_pool_keeps_its_own_and_takes_whole_chains_of_what_was_used_last(self, pool, folder):
        with EmbeddedStore(pool, CAPACITY) as store:
            for number in range(20):
                put_chain(space_in(store), chain(str(number), 8), 65536 - 4096)
                time.sleep(0.001)
            take_snapshot(store, folder)
        with EmbeddedStore(pool.with_name("small"), 2 << 20) as small:
            own = chain("own", 8)
            put_chain(space_in(small), own, 65536)
            report = back(folder, small)
            with Snapshot(folder) as snapshot:
                assert report.pages + report.no_room_pages == snapshot.manifest.pages
            assert report.no_room_pages > 0 < report.pages and small.stats().evicted_pages == 0
            assert all(get_page(space_in(small), key) is not None for key in own)
            found = [space_in(small).lookup(chain(str(number), 8)).pages for number in range(20)]
            assert sum(found) == report.pages, "a page that no lookup reaches is worth nothing"
            assert found == sorted(found) and found[-1] == 8, "what was used last comes first"

    def test_what_the_pool_has_is_not_touched(self, full, folder):
        take_snapshot(full, folder)
        before = inside(full).table.access.copy()
        assert back(folder, full).present_pages == PAGES
        assert (inside(full).table.access == before).all()


class TestBesideEngines:
    def test_what_goes_before_or_while_it_is_looked_at_is_told(self, full):
        survey = full.survey(namespace("other").digest)
        keys = [page["key"].tobytes() for page in survey.pages]
        space = full.space(*SPACES[2][:2])
        space.remove(keys[:1])

        def view(pages):
            assert len(pages) == 23
            space.remove(keys[5:7])

        seen = full.peek(survey.pages, view)
        assert [i for i, right in enumerate(seen) if right is None] == [0, 5, 6]
        assert [right for right in seen if right is not None] == [True] * 21

    def test_what_changes_meanwhile_is_left_out_and_its_children_have_no_parent(self, full, folder, other, monkeypatch):
        keys, space = chain("0", 8), full.space(*SPACES[2][:2])
        survey = full.survey()
        monkeypatch.setattr(full, "survey", lambda digest: survey)
        space.remove(keys[3:4])
        report = take_snapshot(full, folder)
        assert (report.pages, report.changed_pages, report.corrupt_pages) == (PAGES - 1, 1, 0)
        assert back(folder, other).pages == PAGES - 1
        held = held_by(other)
        assert held[namespace("other").digest, SHARD, keys[4]].parent is None
        assert other.space(*SPACES[2][:2]).contains(keys) == [True] * 3 + [False] + [True] * 4

    def test_a_corrupt_page_is_left_out(self, full, folder, other):
        (arena,) = full.path.glob("*/arena")
        page = full.survey().pages[0]
        found = inside(full).table.any_at(int(page["slot"]))
        assert found is not None
        garble(arena, found.row.extents[0][0] * 4096 + 7, b"\xff\x00\xff")
        report = take_snapshot(full, folder)
        assert (report.pages, report.corrupt_pages) == (PAGES - 1, 1)
        assert back(folder, other).pages == PAGES - 1

    @pytest.mark.slow
    def test_a_pool_in_use_gives_right_pages_only(self, pool, folder, other):
        """Another process stores, and so evicts, all the time."""
        churn = """
            print("ready", flush=True)
            while True:
                put_chain(space, chain(os.urandom(4).hex(), 16), 4096)
        """
        deadline = time.monotonic() + 120
        with EmbeddedStore(pool, 1 << 20) as store:
            put_some(store)
            with running(churn, pool):
                reports = [take_snapshot(store, folder) for _ in range(20)]
                while not reports[-1].pages:  # all of them were evicted between the two looks
                    assert time.monotonic() < deadline
                    reports.append(take_snapshot(store, folder))
        assert all(report.corrupt_pages == 0 for report in reports)
        assert back(folder, other).pages == reports[-1].pages == len(held_by(other)) > 0

    def test_where_all_pages_went_meanwhile_the_former_snapshot_stays(self, full, folder, other, monkeypatch):
        take_snapshot(full, folder)
        survey = full.survey()
        monkeypatch.setattr(full, "survey", lambda digest: survey)
        full.clear()
        report = take_snapshot(full, folder)
        assert (report.pages, report.changed_pages, report.replaced) == (0, PAGES, False)
        assert back(folder, other).pages == PAGES and os.listdir(folder.parent) == [folder.name]

    def test_a_page_in_the_place_of_a_parent_that_went_is_not_taken_for_it(self, full):
        keys, space = chain("0", 8), full.space(*SPACES[2][:2])
        slots = {page["key"].tobytes(): int(page["slot"]) for page in full.survey(namespace("other").digest).pages}
        space.remove(keys[3:4])
        new = [key for i in range(4) for key in put_one(full, *SPACES[2][:2], f"new {i}", 1, SPACES[2][2])]
        survey = full.survey(namespace("other").digest)
        places = {page["key"].tobytes(): i for i, page in enumerate(survey.pages)}
        assert slots[keys[3]] in [int(survey.pages[places[key]]["slot"]) for key in new], "one has taken its slot"
        assert survey.pages[places[keys[4]]]["parent"] == -1
        assert survey.pages[places[keys[5]]]["parent"] == places[keys[4]]

    def test_a_process_that_holds_the_lock_and_is_stopped(self, full, folder, other):
        """Saving needs no lock, and goes on; restoring says it at its deadline, and what is there by then stays."""
        with stopped_holder(full.path):
            assert take_snapshot(full, folder).pages == PAGES
        held = pytest.raises(PoolError, match="a process that does not run holds its lock; continue or end it")
        with stopped_holder(other.path), Snapshot(folder) as snapshot, held:
            restore(snapshot, other, deadline_s=0.1)
        assert back(folder, other).pages == PAGES

    def test_a_reader_of_the_former_snapshot_goes_on(self, full, folder, other):
        take_snapshot(full, folder)
        with Snapshot(folder) as former:
            full.clear()
            put_chain(space_in(full), chain("new", 3), 4096)
            assert take_snapshot(full, folder).replaced
            assert restore(former, other).pages == PAGES
            with pytest.raises(SnapshotError, match="is in use: another process takes or reads this snapshot"):
                take_snapshot(full, folder)
        assert take_snapshot(full, folder).remains
        assert sorted(os.listdir(folder.parent)) == [folder.name]
        with Snapshot(folder) as snapshot:
            assert snapshot.manifest.pages == 3


class TestSpace:
    @as_root
    @pytest.mark.parametrize("known_before", [True, False])
    def test_a_full_disk_costs_the_new_snapshot_alone(self, full, tmp_path, other, monkeypatch, known_before):
        disk = tmp_path / "disk"
        with mounted(disk, "size=20m"):
            take_snapshot(full, disk / "snapshot")
            (disk / "ballast").write_bytes(bytes((19 << 20) + (1 << 19)))
            if not known_before:
                monkeypatch.setattr(writing, "_check_room", lambda *arguments: None)
            with pytest.raises(SnapshotError, match="KiB free" if known_before else "No space left"):
                take_snapshot(full, disk / "snapshot")
            assert sorted(os.listdir(disk)) == ["ballast", "snapshot"]
            assert back(disk / "snapshot", other).pages == PAGES

    def test_an_empty_pool_leaves_the_former_snapshot(self, full, folder, other):
        take_snapshot(full, folder)
        report = take_snapshot(other, folder)
        assert report.pages == 0 and not report.replaced
        assert back(folder, other).pages == PAGES

    def test_an_interrupt_leaves_nothing(self, full, folder):
        def interrupt(done, total):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            take_snapshot(full, folder, None, interrupt)
        assert os.listdir(folder.parent) == [] and not partial_of(folder).exists()
