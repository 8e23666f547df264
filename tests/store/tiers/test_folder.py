"""What a shared folder holds, what goes when, and what happens where the mount is of no use."""

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest
from causes import forget_causes
from store.tiers.fuse import fuse_mount

from mooncake_connector.config.tiers import FolderTier
from store_client.base import Put
from store_client.testing import PAGE_NBYTES, chain
from store_client.tiers.base import SEAL_NBYTES, SpaceName, Target, TierError
from store_client.tiers.folder import SharedFolder, layout, sweep
from store_client.tiers.folder.layout import MARKER, SWEPT, page_path, space_folder
from store_client.tiers.testing import DEADLINE_S, Memory, contains, new_space, read, write

DAY_S = 86400


@pytest.fixture(autouse=True)
def _no_causes_of_others():
    forget_causes()


def open_folder(path: Path, **settings) -> SharedFolder:
    return SharedFolder(FolderTier(path=path, **settings))


def file_of(path: Path, space: SpaceName, key: bytes) -> Path:
    return Path(page_path(space_folder(path, space), key))


def make_older(path: Path, seconds: float) -> None:
    was = path.stat().st_mtime
    os.utime(path, (was - seconds, was - seconds))


def sweep_now(path: Path, **settings) -> SharedFolder:
    """A host that comes when nobody has swept for long, and has time."""
    (path / SWEPT).unlink(missing_ok=True)
    host = open_folder(path, **settings)
    host.tidy(DEADLINE_S)
    return host


def all_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name not in (MARKER, SWEPT))


def test_a_page_is_one_private_file_with_its_seal_and_nothing_else_is_left(tmp_path):
    space, keys, memory, folder = new_space(), chain("a", 3), Memory(), open_folder(tmp_path)
    write(folder, memory, space, keys, pieces=3)
    files = [file_of(tmp_path, space, key) for key in keys]
    assert all_files(tmp_path) == sorted(files)
    assert {(file.stat().st_size, file.stat().st_mode & 0o777) for file in files} == {
        (PAGE_NBYTES + SEAL_NBYTES, 0o600)
    }
    folder.close()


@pytest.mark.parametrize("length", [0, 1, PAGE_NBYTES, PAGE_NBYTES + SEAL_NBYTES - 1, PAGE_NBYTES + SEAL_NBYTES + 1])
def test_half_a_page_is_a_miss_and_is_replaced(tmp_path, length):
    space, keys, memory, folder = new_space(), chain("a", 2), Memory(), open_folder(tmp_path)
    write(folder, memory, space, keys)
    os.truncate(file_of(tmp_path, space, keys[0]), length)
    assert contains(folder, space, keys) == read(folder, memory, space, keys) == [False, True]
    assert write(folder, memory, space, keys) == [Put.STORED, Put.PRESENT]
    assert read(folder, memory, space, keys) == [True, True] and len(all_files(tmp_path)) == 2
    folder.close()


@pytest.mark.parametrize("what", ["pipe", "folder", "link"])
def test_what_is_no_file_is_a_miss_and_holds_nobody_up(tmp_path, what):
    space, keys, memory, folder = new_space(), chain("a", 2), Memory(), open_folder(tmp_path)
    write(folder, memory, space, keys)
    file = file_of(tmp_path, space, keys[0])
    other = file.rename(tmp_path / "moved")
    {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda path: os.symlink(other, path)}[what](file)
    kept = other.read_bytes()
    assert contains(folder, space, keys) == read(folder, memory, space, keys) == [False, True]
    for path in (file, file_of(tmp_path, space, keys[1])):
        os.utime(path, (0, 0), follow_symlinks=False)
    sweep_now(tmp_path, keep_days=1).close()
    assert os.path.lexists(file) and not file_of(tmp_path, space, keys[1]).exists(), "no page of ours"
    outcome = Put.FAILED if what == "folder" else Put.STORED
    assert write(folder, memory, space, keys) == [outcome, Put.STORED]
    assert read(folder, memory, space, keys) == [what != "folder", True]
    assert other.read_bytes() == kept
    folder.close()


def test_a_page_that_another_host_removes_under_a_reader_is_a_miss(tmp_path, monkeypatch):
    """NFS says so with ESTALE."""
    space, keys, memory, folder = new_space(), chain("a", 2), Memory(), open_folder(tmp_path)
    write(folder, memory, space, keys)

    def stale(*arguments, **named):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "preadv", stale)
    assert read(folder, memory, space, keys) == [False, False]
    folder.close()


@pytest.mark.parametrize("nbytes_at_hand", [0, 5000, None])
def test_pages_that_the_page_cache_has_in_part_or_that_nobody_can_tell_of_are_read_whole(
    tmp_path, monkeypatch, nbytes_at_hand
):
    """None: the file system does not know the flag."""
    space, keys, memory, folder = new_space(), chain("a", 3), Memory(), open_folder(tmp_path)
    write(folder, memory, space, keys)
    preadv, asked = os.preadv, []

    def read_in_part(fd, buffers, offset, flags=0):
        if not flags:
            return preadv(fd, buffers, offset)
        asked.append(flags)
        if nbytes_at_hand is None or offset >= nbytes_at_hand:
            code = errno.EOPNOTSUPP if nbytes_at_hand is None else errno.EAGAIN
            raise OSError(code, os.strerror(code))
        return preadv(fd, [memoryview(buffers[0])[: nbytes_at_hand - offset]], offset)

    monkeypatch.setattr(os, "preadv", read_in_part)
    assert read(folder, memory, space, keys) == [True] * 3
    assert len(asked) >= 3
    folder.close()


def test_a_file_system_without_links_will_do(tmp_path, monkeypatch):
    def refuse(*arguments, **named):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    space, keys, memory, folder = new_space(), chain("a", 3), Memory(), open_folder(tmp_path)
    assert write(folder, memory, space, keys) == [Put.STORED] * 3
    assert write(folder, memory, space, keys) == [Put.PRESENT] * 3
    assert read(folder, memory, space, keys) == [True] * 3 and len(all_files(tmp_path)) == 3
    folder.close()


def test_an_answer_that_nfs_has_lost_is_no_page_of_somebody_else(tmp_path, monkeypatch):
    """NFS repeats a link whose answer did not come, and then finds what it has made itself."""
    link = os.link

    def twice(*arguments, **named):
        link(*arguments, **named)
        link(*arguments, **named)

    monkeypatch.setattr(os, "link", twice)
    space, keys, memory, folder = new_space(), chain("a", 1), Memory(), open_folder(tmp_path)
    assert write(folder, memory, space, keys) == [Put.STORED]
    assert read(folder, memory, space, keys) == [True] and len(all_files(tmp_path)) == 1
    folder.close()


def test_a_page_whose_folder_is_cleared_while_it_is_written_is_not_stored_and_that_is_no_fault(tmp_path, monkeypatch):
    link = os.link
    space, keys, memory, folder = new_space(), chain("a", 2), Memory(), open_folder(tmp_path)

    def cleared(*arguments, **named):
        sweep.remove_all(tmp_path, None)
        link(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", cleared)
        assert write(folder, memory, space, keys[:1]) == [Put.FAILED]
    assert write(folder, memory, space, keys) == [Put.STORED] * 2
    folder.close()


@pytest.mark.parametrize("call", ["fsync", "pwritev", "link"])
def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch, call):
    space, keys, memory, folder = new_space(), chain("a", 2), Memory(), open_folder(tmp_path)
    write(folder, memory, space, keys[:1])

    def fail(*arguments, **named):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(TierError, match="Disk quota exceeded") as caught:
            write(folder, memory, space, keys)
    assert caught.value.cause == "full" and len(all_files(tmp_path)) == 1
    assert write(folder, memory, space, keys) == [Put.PRESENT, Put.STORED]
    folder.close()


def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(TierError, match=r"holds something else already \(thesis.tex\)") as caught:
        open_folder(tmp_path)
    assert caught.value.lasting and os.listdir(tmp_path) == ["thesis.tex"]


def test_a_folder_that_another_host_claims_and_fills_just_now_is_no_strangers(tmp_path, monkeypatch):
    """Of hosts that start together on a new folder, one looks what is in it when another has its first pages there."""
    refuse = layout.refuse_foreign

    def late(*args) -> None:
        monkeypatch.setattr(layout, "refuse_foreign", refuse)
        open_folder(tmp_path).close()
        refuse(*args)

    monkeypatch.setattr(layout, "refuse_foreign", late)
    open_folder(tmp_path).close()


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    """It would be made on the wrong disk where something is not mounted."""
    with pytest.raises(TierError, match=f"mkdir -m 700 {tmp_path}/none") as caught:
        open_folder(tmp_path / "none")
    assert caught.value.cause == "unavailable" and os.listdir(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match=f"{tmp_path}/file is no folder; set `path` to a folder"):
        open_folder(tmp_path / "file")


def test_a_mount_that_is_gone_is_an_error_and_nothing_is_written_below_it(tmp_path):
    space, keys, memory, folder = new_space(), chain("a", 2), Memory(), open_folder(tmp_path)
    write(folder, memory, space, keys)
    mount = tmp_path.rename(tmp_path.with_name("elsewhere"))
    tmp_path.mkdir()
    for call in (contains, lambda *rest: read(folder, memory, space, keys)):
        with pytest.raises(TierError, match="not mounted any more") as caught:
            call(folder, space, keys)
        assert caught.value.cause == "unavailable" and not caught.value.lasting
    with pytest.raises(TierError, match="not mounted any more"):
        write(folder, memory, space, chain("b", 2))
    with pytest.raises(TierError, match="not mounted any more"):
        folder.clear(space.namespace, deadline_s=DEADLINE_S)
    with pytest.raises(TierError, match="not mounted any more"):
        folder.purge(None, older_than_s=0.0, deadline_s=DEADLINE_S)
    with pytest.raises(TierError, match="not mounted any more"):
        folder.tidy(DEADLINE_S)
    assert os.listdir(tmp_path) == [], "something on the wrong disk"
    tmp_path.rmdir()
    mount.rename(tmp_path)
    assert read(folder, memory, space, keys) == [True] * 2
    folder.close()


def test_a_mount_that_goes_away_while_it_is_cleared_was_not_cleared(tmp_path, monkeypatch):
    space, memory, folder = new_space(), Memory(), open_folder(tmp_path)
    write(folder, memory, space, chain("a", 2))

    def went_away(*arguments):
        tmp_path.rename(tmp_path.with_name("elsewhere"))
        return remove_all(*arguments)

    remove_all = sweep.remove_all
    monkeypatch.setattr("store_client.tiers.folder.tier.remove_all", went_away)
    with pytest.raises(TierError, match="not mounted any more"):
        folder.clear(None, deadline_s=DEADLINE_S)
    folder.close()


@pytest.mark.parametrize("level", ["namespace", "shard", "digits"])
def test_no_link_leads_out_of_the_folder(tmp_path, level):
    """Who may write there could make another's files ours."""
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    shared.mkdir()
    space, keys, memory, folder = new_space(), chain("a", 2), Memory(), open_folder(shared)
    write(folder, memory, space, keys[:1])
    page = file_of(shared, space, keys[0])
    below = {"namespace": page.parents[2], "shard": page.parents[1], "digits": page.parents[0]}[level]
    below.rename(victim)
    below.symlink_to(victim)
    theirs = victim / page.relative_to(below)
    short = theirs.with_name(f"{'0' * 64}")
    old = theirs.with_name(f"{theirs.name}.{'a' * 16}.new")
    for file in (theirs, short, old):
        file.write_bytes(b"dear diary")
        make_older(file, DAY_S)

    def seen():
        return {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in victim.rglob("*")}

    before = seen()
    assert write(folder, memory, space, keys[:1]) == [Put.FAILED]
    folder.remove(space, [*keys, bytes(32)], deadline_s=DEADLINE_S)
    folder.clear(space.namespace, deadline_s=DEADLINE_S)
    folder.clear(None, deadline_s=DEADLINE_S)
    folder.purge(None, older_than_s=60, deadline_s=DEADLINE_S)
    sweep_now(shared, capacity=1, keep_days=0.1).close()
    assert seen() == before
    assert all(file.read_bytes() == b"dear diary" for file in (theirs, short, old))
    folder.close()


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_what_lies_where_the_time_of_a_sweep_should_is_not_written_to(tmp_path, what):
    shared, theirs = tmp_path / "shared", tmp_path / "theirs"
    shared.mkdir()
    theirs.write_text("dear diary")
    folder = open_folder(shared)
    {"pipe": os.mkfifo, "link": lambda path: os.symlink(theirs, path)}[what](shared / SWEPT)
    for path in (theirs, shared / SWEPT):
        os.utime(path, (0, 0), follow_symlinks=False)
    with pytest.raises(TierError, match="sweeping failed") as caught:
        folder.tidy(DEADLINE_S)
    assert caught.value.cause != "timeout" and theirs.read_text() == "dear diary"
    folder.close()


def test_a_new_folders_mark_is_not_written_through_a_link(tmp_path):
    shared, theirs = tmp_path / "shared", tmp_path / "theirs"
    shared.mkdir()
    (shared / MARKER).symlink_to(theirs)
    open_folder(shared).close()
    assert not theirs.exists()


def test_the_pages_that_were_not_used_for_longest_go_first(tmp_path):
    space, keys, memory, folder = new_space(), chain("a", 20), Memory(), open_folder(tmp_path)
    write(folder, memory, space, keys)
    for number, key in enumerate(keys):
        make_older(file_of(tmp_path, space, key), DAY_S * (20 - number))
    assert contains(folder, space, keys[:4]) == [True] * 4
    folder.close()
    host = sweep_now(tmp_path, capacity=16 * PAGE_NBYTES)
    assert contains(host, space, keys) == [True] * 4 + [False] * 6 + [True] * 10
    assert (host.stats().pages, host.stats().used_nbytes, host.stats().evicted_pages) == (14, 14 * PAGE_NBYTES, 6)
    host.close()


def test_pages_that_were_not_used_for_some_days_go(tmp_path):
    space, keys, memory, folder = new_space(), chain("a", 6), Memory(), open_folder(tmp_path)
    write(folder, memory, space, keys)
    for number, key in enumerate(keys):
        make_older(file_of(tmp_path, space, key), DAY_S * number - 60)
    folder.close()
    host = sweep_now(tmp_path, keep_days=3)
    assert contains(host, space, keys) == [True] * 4 + [False] * 2
    host.close()


def test_what_dead_writers_left_goes_and_what_is_no_page_stays(tmp_path):
    space, keys, memory, folder = new_space(), chain("a", 2), Memory(), open_folder(tmp_path)
    write(folder, memory, space, keys)
    page = file_of(tmp_path, space, keys[0])
    left, fresh = (page.with_name(f"{page.name}.{digit * 16}.new") for digit in "ab")
    clock, notes = tmp_path / f"{'c' * 16}.clock", page.with_name("notes.txt")
    empty = page.parent.with_name("00" if page.parent.name != "00" else "01")
    empty.mkdir(exist_ok=True)
    for file in (left, fresh, clock, notes):
        file.write_text("x")
    for path in (left, clock, notes, empty):
        make_older(path, DAY_S)
    sweep_now(tmp_path, capacity=1 << 40).close()
    assert [path.exists() for path in (left, clock, empty, fresh, notes)] == [False, False, False, True, True]
    assert read(folder, memory, space, keys) == [True] * 2
    assert folder.clear(None, deadline_s=DEADLINE_S) == 2
    assert all_files(tmp_path) == [notes]
    folder.close()


def test_one_host_sweeps_for_all_unless_it_writes_much(tmp_path):
    first, second, memory, space = open_folder(tmp_path), open_folder(tmp_path, capacity=1 << 20), Memory(), new_space()
    first.tidy(DEADLINE_S)
    assert first.stats().pages == 0
    second.tidy(DEADLINE_S)
    assert second.stats().pages is None, "it was done a moment ago"
    write(second, memory, space, chain("a", 20))
    for number, page in enumerate(all_files(tmp_path)):
        make_older(page, 60.0 * number)  # or those that were written in one tick of the clock would go together
    second.tidy(DEADLINE_S)
    assert sum(contains(first, space, chain("a", 20))) == second.stats().pages == 14
    first.close()
    second.close()


def test_a_sweep_goes_on_where_its_time_was_up(tmp_path):
    memory, folder = Memory(), open_folder(tmp_path, capacity=1 << 40)
    for number in range(4):
        write(folder, memory, new_space(), chain(str(number), 3))
    tidied = 0
    while folder.stats().pages is None or tidied == 0:
        folder._sweep_until(0.0)
        tidied += 1
        assert tidied < 1000
    assert folder.stats().pages == 12 and tidied > 10
    folder.close()


def test_no_hosts_clock_is_asked(tmp_path, monkeypatch):
    space, keys, memory, folder = new_space(), chain("a", 3), Memory(), open_folder(tmp_path)
    write(folder, memory, space, keys)

    def wrong():
        raise AssertionError("the time of this host")

    monkeypatch.setattr(time, "time", wrong)
    monkeypatch.setattr(time, "time_ns", wrong)
    host = sweep_now(tmp_path, capacity=1 << 40, keep_days=1)
    assert host.stats().pages == 3 and read(host, memory, space, keys) == [True] * 3
    host.close()
    folder.close()


def test_a_mount_that_hangs_costs_the_time_of_the_call_and_no_memory_is_touched_afterwards(tmp_path):
    with fuse_mount(tmp_path) as mount:
        space, keys, memory, folder = new_space(), chain("a", 4), Memory(), open_folder(mount.path)
        write(folder, memory, space, keys)
        mount.hang()
        place = memory.page(PAGE_NBYTES)
        before = place[0].copy()
        for call in (
            lambda: folder.read(space, [Target(keys[0], place)], nbytes=PAGE_NBYTES, deadline_s=0.2),
            lambda: folder.contains(space, chain("b", 8), nbytes=PAGE_NBYTES, deadline_s=0.2),
            lambda: folder.remove(space, keys[3:], deadline_s=0.2),
            lambda: folder.tidy(0.2),
        ):
            with pytest.raises(TierError) as caught:
                call()
            assert caught.value.cause == "timeout"
        mount.go_on()
        assert read(folder, memory, space, keys[:3]) == [True] * 3
        assert np.array_equal(place[0], before)
        mount.die()
        with pytest.raises(TierError, match="not connected") as caught:
            contains(folder, space, chain("no cache knows", 2))
        assert caught.value.cause == "unavailable"
        folder.close()


def test_sweeps_happen_often_enough_for_a_day():
    assert sweep.EVERY_S < sweep.LEFT_BEHIND_S < DAY_S
