"""Where a snapshot may be put, what it replaces, and what of other people is never touched."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil

import pytest
from store.pools import CAPACITY, as_root, mounted
from store.snapshots import held_by, put_some, saved

from mooncake_connector.errors import SnapshotError
from store_client import EmbeddedStore
from store_client.snapshot import Snapshot, folders, restore, take_snapshot
from store_client.snapshot.folders import former_of, partial_of

PAGES = 9


@pytest.fixture
def store(pool):
    with EmbeddedStore(pool, CAPACITY) as store:
        put_some(store, chains=1, length=3)
        yield store


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "snapshot"


def below(path):
    """Everything there, with the content of files."""
    return {str(found.relative_to(path)): found.read_bytes() if found.is_file() else None for found in path.rglob("*")}


def pages_in(folder):
    with Snapshot(folder) as snapshot:
        return snapshot.manifest.pages


class TestTargets:
    def test_a_snapshot_replaces_the_former_one(self, store, folder):
        assert not take_snapshot(store, folder).replaced
        store.clear()
        put_some(store, chains=1, length=1)
        assert take_snapshot(store, folder).replaced
        assert pages_in(folder) == 3 and os.listdir(folder.parent) == ["snapshot"]

    def test_a_damaged_one_is_replaced_as_well(self, store, folder):
        take_snapshot(store, folder)
        (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:-5])
        assert take_snapshot(store, folder).replaced and pages_in(folder) == PAGES

    def test_an_empty_folder_is_taken(self, store, folder):
        folder.mkdir()
        take_snapshot(store, folder)
        assert pages_in(folder) == PAGES and folder.stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize(
        "made",
        [
            lambda folder: (folder.mkdir(), (folder / "thesis.tex").write_text("x")),
            lambda folder: (folder.mkdir(), (folder / "manifest.json").write_text('{"kind": "other"}')),
            lambda folder: (folder.mkdir(), (folder / "pages.00000").write_text("x")),
            lambda folder: (folder.mkdir(), (folder / "manifest.json").mkdir()),
            lambda folder: folder.write_text("a file"),
        ],
        ids=["other files", "another manifest", "no manifest", "a folder for a manifest", "a file"],
    )
    def test_a_folder_of_others_is_refused_and_not_touched(self, store, folder, made):
        made(folder)
        before = below(folder.parent)
        with pytest.raises(SnapshotError, match=r"name another folder|name a folder that does not exist"):
            take_snapshot(store, folder)
        assert below(folder.parent) == before

    def test_a_snapshot_with_a_file_of_others_in_it_is_refused(self, store, folder):
        take_snapshot(store, folder)
        (folder / "notes").write_text("mine")
        with pytest.raises(SnapshotError, match=r"it holds notes\) and nothing in it was touched"):
            take_snapshot(store, folder)
        assert (folder / "notes").exists() and pages_in(folder) == PAGES

    def test_a_link_is_not_followed(self, store, folder, tmp_path):
        take_snapshot(store, tmp_path / "real")
        before = below(tmp_path)
        folder.symlink_to(tmp_path / "real")
        with pytest.raises(SnapshotError, match="no link to it"):
            take_snapshot(store, folder)
        with pytest.raises(SnapshotError, match="is not a snapshot of a pool that can be read"):
            Snapshot(folder)
        folder.unlink()
        assert below(tmp_path) == before

    def test_a_link_in_the_place_of_a_file_of_the_former_one_is_removed_and_not_followed(self, store, folder, tmp_path):
        take_snapshot(store, folder)
        (tmp_path / "precious").write_text("x")
        (folder / "index").unlink()
        (folder / "index").symlink_to(tmp_path / "precious")
        with pytest.raises(SnapshotError, match="index"):
            Snapshot(folder)
        take_snapshot(store, folder)
        assert (tmp_path / "precious").read_text() == "x" and pages_in(folder) == PAGES

    def test_a_missing_parent_is_said(self, store, tmp_path):
        with pytest.raises(SnapshotError, match="does not exist: make it first"):
            take_snapshot(store, tmp_path / "a" / "b")

    def test_a_folder_in_the_pool_is_refused(self, store):
        with pytest.raises(SnapshotError, match="lies in the pool"):
            take_snapshot(store, store.path / "snapshot")

    @as_root
    def test_a_mount_point_is_refused_before_anything_is_written(self, store, folder):
        with mounted(folder, "size=20m"):
            with pytest.raises(SnapshotError, match="is a mount point, which cannot be replaced: name a folder below"):
                take_snapshot(store, folder)
            assert os.listdir(folder.parent) == ["snapshot"]
            take_snapshot(store, folder / "below")
            assert pages_in(folder / "below") == PAGES


class TestRemains:
    def test_those_of_an_unfinished_snapshot_go(self, store, folder):
        partial = partial_of(folder)
        partial.mkdir()
        (partial / "pages.00000").write_bytes(bytes(1000))
        assert take_snapshot(store, folder).remains
        assert pages_in(folder) == PAGES and os.listdir(folder.parent) == ["snapshot"]

    @pytest.mark.parametrize("name", ["notes", "pages.00000/mine", "manifest.json.bak"])
    def test_those_of_others_are_refused_and_not_touched(self, store, folder, name):
        (partial_of(folder) / name).parent.mkdir(parents=True)
        (partial_of(folder) / name).write_text("mine")
        with pytest.raises(SnapshotError):
            take_snapshot(store, folder)
        assert (partial_of(folder) / name).read_text() == "mine" and not folder.exists()

    def test_a_link_there_is_refused_and_not_followed(self, store, folder, tmp_path):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "index").write_text("mine")
        partial_of(folder).symlink_to(tmp_path / "other")
        with pytest.raises(SnapshotError, match="is in the way"):
            take_snapshot(store, folder)
        assert (tmp_path / "other" / "index").read_text() == "mine"

    def test_one_that_is_being_written_is_left_alone(self, store, folder):
        partial = partial_of(folder)
        partial.mkdir()
        (partial / "pages.00000").write_bytes(b"x")
        fd = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with pytest.raises(SnapshotError, match="another process takes or reads this snapshot now"):
                take_snapshot(store, folder)
            assert (partial / "pages.00000").exists()
        finally:
            os.close(fd)
        take_snapshot(store, folder)


class TestWithoutAnExchange:
    """File systems that cannot exchange two folders, such as NFS."""

    @pytest.fixture(autouse=True)
    def no_exchange(self, monkeypatch):
        monkeypatch.setattr(folders, "_rename_exchange", lambda one, other: errno.EINVAL)

    def test_the_former_one_is_replaced(self, store, folder):
        take_snapshot(store, folder)
        assert take_snapshot(store, folder).replaced
        assert os.listdir(folder.parent) == ["snapshot"] and pages_in(folder) == PAGES

    @pytest.mark.slow
    def test_a_kill_in_between_leaves_the_former_one_for_a_restore(self, store, folder, pool):
        take_snapshot(store, folder)
        os.rename(folder, former_of(folder))
        shutil.copytree(former_of(folder), partial_of(folder))
        with EmbeddedStore(pool.with_name("other"), CAPACITY) as other, Snapshot(folder) as snapshot:
            assert restore(snapshot, other).pages == len(held_by(other)) == PAGES
            other.clear()
            assert take_snapshot(other, folder).pages == 0 and former_of(folder).exists(), "there is no other one"
        assert take_snapshot(store, folder).pages == PAGES
        assert os.listdir(folder.parent) == ["snapshot"] and pages_in(folder) == PAGES

    def test_what_a_restore_reads_stays_until_it_is_over(self, store, folder, pool):
        take_snapshot(store, folder)
        with EmbeddedStore(pool.with_name("other"), CAPACITY) as other, Snapshot(folder) as snapshot:
            assert take_snapshot(store, folder).replaced and former_of(folder).exists()
            before = below(folder)
            with pytest.raises(SnapshotError, match=r"former is in use: .*; try again"):
                take_snapshot(store, folder)
            assert below(folder) == before and not partial_of(folder).exists()
            assert restore(snapshot, other).pages == len(held_by(other)) == PAGES
        assert take_snapshot(store, folder).replaced
        assert os.listdir(folder.parent) == ["snapshot"] and pages_in(folder) == PAGES

    def test_so_does_what_a_killed_command_left(self, store, folder, pool):
        take_snapshot(store, folder)
        os.rename(folder, former_of(folder))
        with EmbeddedStore(pool.with_name("other"), CAPACITY) as other, Snapshot(folder) as snapshot:
            assert not take_snapshot(store, folder).replaced and former_of(folder).exists()
            assert restore(snapshot, other).pages == PAGES
        assert take_snapshot(store, folder).replaced and os.listdir(folder.parent) == ["snapshot"]

    @as_root
    def test_another_users_former_one_is_not_touched(self, store, folder):
        take_snapshot(store, folder)
        shutil.copytree(folder, former_of(folder))
        os.chown(former_of(folder), 12345, 12345)
        before = below(folder.parent)
        with pytest.raises(SnapshotError, match=r"former is in the way and was not touched \(it belongs to another"):
            take_snapshot(store, folder)
        assert below(folder.parent) == before

    def test_what_is_not_ours_at_the_former_ones_place_is_not_touched(self, store, folder):
        take_snapshot(store, folder)
        former_of(folder).mkdir()
        (former_of(folder) / "notes").write_text("mine")
        with pytest.raises(SnapshotError, match="is in the way and was not touched"):
            take_snapshot(store, folder)
        assert (former_of(folder) / "notes").exists() and pages_in(folder) == PAGES


class TestWhoMayHaveWritten:
    @pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
    def test_a_folder_that_others_may_write_is_not_believed(self, store, folder, mode):
        take_snapshot(store, folder)
        folder.chmod(mode)
        with pytest.raises(SnapshotError, match=f"has mode 0{mode:o}: others may have written to it"):
            Snapshot(folder)

    def test_one_that_others_may_read_is(self, store, folder):
        take_snapshot(store, folder)
        folder.chmod(0o755)
        assert pages_in(folder) == PAGES

    @as_root
    def test_one_of_another_user_is_not_believed(self, store, folder):
        take_snapshot(store, folder)
        os.chown(folder, 12345, 12345)
        with pytest.raises(SnapshotError, match="belongs to user 12345"):
            Snapshot(folder)


def test_what_is_no_snapshot_is_said(tmp_path, pool):
    for name in ("nowhere", "."):
        with pytest.raises(SnapshotError, match="name a folder that `mooncake-connector store snapshot` wrote"):
            Snapshot(tmp_path / name)
    saved(pool, tmp_path / "snapshot", chains=1, length=1)
    assert pages_in(tmp_path / "snapshot") == 3
