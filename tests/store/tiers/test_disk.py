"""What a disk keeps, and over what; and each way in which its folder or the disk itself can be of no use."""

import errno
import logging
import os
import random
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from causes import forget_causes
from store.pools import as_root, mounted

from mooncake_connector.config.tiers import DiskTier
from store_client.base import Put
from store_client.testing import PAGE_NBYTES, chain, page_bytes
from store_client.tiers.base import Sealed, Target, TierError
from store_client.tiers.disk import Disk, budget, tier
from store_client.tiers.disk.pagefile import GRANULE, PageFile
from store_client.tiers.testing import DEADLINE_S, SECRET, Memory, contains, new_space, read, seal, write

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_causes_of_others():
    forget_causes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def open_disk(folder: Path, capacity: int = 4 * MIB, **more) -> Disk:
    return Disk(DiskTier(path=folder, capacity=capacity, **more))


def used_up(disk: Disk, memory: Memory, count: int, name: str = "others") -> None:
    """So many pages of 64 KiB that nobody reads again."""
    assert Put.FAILED not in write(disk, memory, new_space(), chain(name, count))


def test_nothing_is_kept_of_a_model_whose_pages_are_gone(folder):
    space, memory = new_space(), Memory()
    disk = open_disk(folder)
    write(disk, memory, space, chain("a", 2))
    assert list(disk._pages._in_spaces.values()) == [2]
    disk.remove(space, chain("a", 1), deadline_s=DEADLINE_S)
    assert disk.shards(space.namespace, deadline_s=DEADLINE_S) == [space.shard]
    disk.clear(space.namespace, deadline_s=DEADLINE_S)
    assert disk.shards(space.namespace, deadline_s=DEADLINE_S) == [] and not disk._pages._in_spaces
    disk.close()


def test_pages_are_there_after_a_restart_in_the_order_of_their_last_use(folder):
    space, keys, memory = new_space(), chain("a", 40), Memory()
    disk = open_disk(folder)
    write(disk, memory, space, keys)
    read(disk, memory, space, keys[:8])
    before = disk.stats()
    disk.close()
    disk = open_disk(folder)
    assert disk.stats() == before and before.pages == 40 and before.used_nbytes == 40 * PAGE_NBYTES
    used_up(disk, memory, 40)
    assert contains(disk, space, keys)[:8] == [True] * 8
    assert read(disk, memory, space, keys[:8]) == [True] * 8
    disk.close()


def test_the_least_recently_used_pages_go_first_and_capacity_holds(folder):
    space, keys, memory = new_space(), chain("a", 20), Memory()
    disk = open_disk(folder)
    write(disk, memory, space, keys)
    for number in range(6):
        assert read(disk, memory, space, keys[:4]) == [True] * 4
        used_up(disk, memory, 20, f"others {number}")
        assert disk.stats().used_nbytes <= 4 * MIB
    assert contains(disk, space, keys) == [True] * 4 + [False] * 16
    assert disk.stats().evicted_pages >= 16
    assert (folder / "pages").stat().st_size <= 4 * MIB
    disk.close()


def test_a_page_larger_than_the_disk_is_not_stored_and_harms_nothing(folder):
    disk, memory, space = open_disk(folder, MIB), Memory(), new_space()
    assert write(disk, memory, space, chain("large", 1), 2 * MIB) == [Put.FAILED]
    assert write(disk, memory, space, chain("small", 1)) == [Put.STORED]
    disk.close()


def test_pages_of_all_sizes_share_the_space(folder):
    """They are whole or absent at any time, however the free space is cut up."""
    rng, disk = random.Random(14), open_disk(folder, 2 * MIB)
    spaces = {nbytes: new_space() for nbytes in (4096, 12288, 50000, 200_000, 900_000)}
    found = 0
    for number in range(100):
        nbytes = rng.choice(list(spaces))
        keys, memory = chain(f"{rng.randrange(12)}", rng.randint(1, 4)), Memory(12 * MIB)
        if rng.random() < 0.2:
            disk.remove(spaces[nbytes], keys[:1], deadline_s=DEADLINE_S)
        if rng.random() < 0.5:
            write(disk, memory, spaces[nbytes], keys, nbytes, pieces=rng.randint(1, 3))
        found += sum(read(disk, memory, spaces[nbytes], keys, nbytes, pieces=rng.randint(1, 3)))
        assert disk.stats().used_nbytes <= 2 * MIB, number
    assert found > 0 and disk.stats().evicted_pages > 0
    disk.close()


def test_memory_that_begins_anywhere_goes_through_a_buffer(folder):
    disk, space, (key,), nbytes = open_disk(folder), new_space(), chain("a", 1), 70_001
    whole = np.zeros(nbytes + 3, dtype=np.uint8)[3:]
    whole[:] = page_bytes(key, nbytes)
    pieces = [whole[:10_001], whole[10_001:]]
    page = Sealed(key, pieces, seal(space, key, pieces, 0, SECRET))
    assert disk.write(space, [page], nbytes=nbytes, deadline_s=DEADLINE_S) == [Put.STORED]
    out = np.zeros(nbytes + 1, dtype=np.uint8)[1:]
    target = Target(key, [out[:333], out[333:]])
    assert disk.read(space, [target], nbytes=nbytes, deadline_s=DEADLINE_S) == [page.seal]
    assert np.array_equal(out, page_bytes(key, nbytes))
    disk.close()


def test_a_smaller_capacity_keeps_what_fits(folder):
    space, keys, memory = new_space(), chain("a", 40), Memory()
    disk = open_disk(folder)
    write(disk, memory, space, keys)
    disk.close()
    disk = open_disk(folder, MIB)
    there = contains(disk, space, keys)
    assert 8 <= sum(there) <= 16 and read(disk, memory, space, keys) == there
    assert (folder / "pages").stat().st_size <= MIB
    used_up(disk, memory, 12)
    disk.close()


def test_a_days_writes_hold_over_a_restart_and_a_crash(folder, monkeypatch):
    now_s = [1e9]
    monkeypatch.setattr(budget.time, "time", lambda: now_s[0])
    space, keys, memory = new_space(), chain("a", 40), Memory()
    disk = open_disk(folder, daily_writes=20 * PAGE_NBYTES)
    assert write(disk, memory, space, keys[:12]) == [Put.STORED] * 12
    disk.close()
    disk = open_disk(folder, daily_writes=20 * PAGE_NBYTES)
    assert disk.stats().notes["may be written today"] == "512.0 KiB"
    assert write(disk, memory, space, keys) == [Put.PRESENT] * 12 + [Put.STORED] * 8 + [Put.FAILED] * 20
    assert read(disk, memory, space, keys) == [True] * 20 + [False] * 20
    now_s[0] -= 86400
    assert write(disk, memory, space, keys[20:21]) == [Put.FAILED], "a clock that is set back is no new day"
    now_s[0] += 2 * 86400
    assert write(disk, memory, space, keys[20:30]) == [Put.STORED] * 10
    disk.flush()
    copy = folder.with_name("as a crash leaves it")
    shutil.copytree(folder, copy)
    disk.close()
    disk = open_disk(copy, daily_writes=20 * PAGE_NBYTES)
    assert write(disk, memory, space, keys[30:31]) == [Put.FAILED], "what is not known to be left is used up"
    disk.close()


def test_a_clock_that_was_far_ahead_stops_no_later_days_writes(folder, monkeypatch):
    now_s = [2.08e9]
    monkeypatch.setattr(budget.time, "time", lambda: now_s[0])
    space, keys, memory = new_space(), chain("a", 40), Memory()
    disk = open_disk(folder, daily_writes=12 * PAGE_NBYTES)
    assert write(disk, memory, space, keys[:8]) == [Put.STORED] * 8
    now_s[0] = 1e9
    assert write(disk, memory, space, keys[8:16]) == [Put.STORED] * 4 + [Put.FAILED] * 4, "what was written counts"
    disk.close()
    now_s[0] += 86400
    disk = open_disk(folder, daily_writes=12 * PAGE_NBYTES)
    assert write(disk, memory, space, keys[12:32]) == [Put.STORED] * 12 + [Put.FAILED] * 8
    disk.close()


def test_what_finds_no_place_takes_nothing_of_a_days_writes(folder):
    disk, memory = open_disk(folder, MIB, daily_writes=8 * MIB), Memory()
    for _ in range(8):
        assert write(disk, memory, new_space(), chain("large", 1), 2 * MIB) == [Put.FAILED]
    assert disk.stats().notes["may be written today"] == "8.0 MiB"
    disk.close()


def test_a_second_agent_is_refused_until_the_first_is_gone(folder):
    disk = open_disk(folder)
    with pytest.raises(TierError, match="in use by another agent") as caught:
        open_disk(folder)
    assert caught.value.cause == "unavailable" and not caught.value.lasting
    used_up(disk, Memory(), 1)
    disk.close()
    open_disk(folder).close()


@pytest.mark.parametrize("name, content", [("thesis.tex", b"x"), ("pages", b"x" * 8192), ("index/data.mdb", b"x")])
def test_a_folder_of_somebody_else_is_refused_and_left_alone(folder, name, content):
    file = folder / name
    file.parent.mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    file.write_bytes(content)
    with pytest.raises(TierError, match=r"holds something else already .* set `path` to an empty folder") as caught:
        open_disk(folder)
    assert caught.value.lasting and caught.value.cause == "denied"
    assert [path for path in folder.rglob("*") if path.is_file()] == [file] and file.read_bytes() == content


def test_a_folder_that_others_may_reach_is_refused(folder):
    folder.mkdir(mode=0o755)
    with pytest.raises(TierError, match=f"mode 0755: others may reach it; chmod 700 {folder}"):
        open_disk(folder)
    folder.chmod(0o700)
    (folder / "lost+found").mkdir()
    open_disk(folder).close()


def test_a_folder_of_its_own_is_private_and_what_it_lies_in_is_not_made(folder):
    """That would be on the wrong disk where something is not mounted."""
    with pytest.raises(TierError, match=f"mkdir -p {folder} ") as caught:
        open_disk(folder / "below")
    assert caught.value.cause == "unavailable" and not caught.value.lasting and not folder.exists()
    folder.mkdir()
    open_disk(folder / "below").close()
    assert (folder / "below").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in (folder / "below").rglob("*")} == {0}


def test_what_is_no_folder_and_a_link_to_nothing_are_named(folder):
    folder.write_bytes(b"thesis")
    with pytest.raises(TierError, match="is no folder; set `path` to a folder") as caught:
        open_disk(folder)
    assert caught.value.lasting and folder.read_bytes() == b"thesis"
    folder.unlink()
    folder.symlink_to(folder.parent / "mount")
    with pytest.raises(TierError, match=f"is a link to {folder.parent / 'mount'}, which is not there") as caught:
        open_disk(folder)
    assert not caught.value.lasting
    (folder.parent / "mount").mkdir(mode=0o700)
    open_disk(folder).close()
    assert {path.name for path in (folder.parent / "mount").iterdir()} == {"pages", "index"}


def test_a_capacity_out_of_range_is_refused(folder):
    with pytest.raises(TierError, match="capacity 1000 B is out of range"):
        open_disk(folder, 1000)
    assert not folder.exists()


@pytest.mark.parametrize("damage", ["garbled", "cut off", "gone", "of another file", "pages gone", "pages cut off"])
def test_a_damaged_folder_starts_empty(folder, tmp_path, damage, caplog):
    space, keys, memory = new_space(), chain("a", 8), Memory()
    disk = open_disk(folder)
    write(disk, memory, space, keys)
    disk.close()
    index, pages = folder / "index" / "data.mdb", folder / "pages"
    if damage == "garbled":
        index.write_bytes(b"\xff" * index.stat().st_size)
    elif damage == "cut off":
        index.write_bytes(index.read_bytes()[:8192])
    elif damage == "gone":
        shutil.rmtree(index.parent)
    elif damage == "of another file":
        open_disk(tmp_path / "other").close()
        shutil.copy(tmp_path / "other" / "pages", pages)
    elif damage == "pages gone":
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    else:
        pages.write_bytes(pages.read_bytes()[:8192])
    with caplog.at_level(logging.WARNING):
        disk = open_disk(folder)
    assert caplog.text.count("starts empty") == (damage not in ("gone", "pages gone"))
    assert disk.stats().pages == 0 and contains(disk, space, keys) == [False] * 8
    assert write(disk, memory, space, keys) == [Put.STORED] * 8
    assert read(disk, memory, space, keys) == [True] * 8
    disk.close()
    open_disk(folder).close()


def test_a_folder_that_is_deleted_turns_the_tier_off(folder):
    space, keys, memory = new_space(), chain("a", 2), Memory()
    disk = open_disk(folder)
    write(disk, memory, space, keys)
    shutil.rmtree(folder)
    for call in (lambda: read(disk, memory, space, keys), lambda: write(disk, memory, space, keys), disk.stats):
        with pytest.raises(TierError, match="was deleted or replaced") as caught:
            call()
        assert caught.value.cause == "unavailable" and caught.value.lasting
    disk.close()
    disk = open_disk(folder)
    assert write(disk, memory, space, keys) == [Put.STORED] * 2
    disk.close()


@as_root
def test_a_disk_leaves_some_of_its_file_system_free_and_evicts(tmp_path):
    where, space, keys, memory = tmp_path / "mount", new_space(), chain("a", 320), Memory(64 * MIB)
    with mounted(where, "size=16m"):
        disk = open_disk(where / "disk", 64 * MIB)
        for first in range(0, 320, 8):
            assert write(disk, memory, space, keys[first : first + 8]) == [Put.STORED] * 8
            assert read(disk, memory, space, keys[:8]) == [True] * 8
        used, seen = disk.stats(), os.statvfs(where)
        assert used.pages < 320 and used.evicted_pages > 0 and used.used_nbytes > 8 * MIB
        assert seen.f_bavail * seen.f_frsize > MIB // 4  # the index takes some of the 0.8 MiB
        disk.close()


@as_root
def test_a_disk_that_others_fill_says_so_and_goes_on_with_what_it_has(tmp_path):
    where, space, keys, memory = tmp_path / "mount", new_space(), chain("a", 200), Memory()
    with mounted(where, "size=16m"):
        disk = open_disk(where / "disk", 64 * MIB, daily_writes=64 * MIB)
        filler = where / "of others"
        left = os.statvfs(where)
        filler.write_bytes(bytes(left.f_bavail * left.f_frsize - MIB // 4))
        for _ in range(3):
            with pytest.raises(TierError, match="No space left on device") as caught:
                write(disk, memory, space, keys[:8])
            assert caught.value.cause == "full" and not caught.value.lasting
        assert disk.stats().notes["may be written today"] == "64.0 MiB", "nothing was written"
        assert "left on device but what is kept free (5 % of the file system)" in disk.stats().notes["no room"]
        os.truncate(filler, 12 * MIB)
        assert write(disk, memory, space, keys[:8]) == [Put.STORED] * 8
        for first in range(8, 200, 8):
            assert write(disk, memory, space, keys[first : first + 8]) == [Put.STORED] * 8
            assert read(disk, memory, space, keys[:8]) == [True] * 8
        assert disk.stats().evicted_pages > 0
        disk.close()


def test_a_disk_that_cannot_grow_loses_no_place_and_evicts_only_for_want_of_room(folder, monkeypatch):
    """A quota says so only when it is tried."""
    space, keys, memory, disk = new_space(), chain("a", 120), Memory(48 * MIB), open_disk(folder, 64 * MIB)
    grow, fault = PageFile.grow, errno.EIO

    def up_to_2_mib(file, start, stop):
        if stop > 2 * MIB // GRANULE:
            raise OSError(fault, os.strerror(fault))
        grow(file, start, stop)

    monkeypatch.setattr(PageFile, "grow", up_to_2_mib)
    with pytest.raises(TierError, match="Input/output error"):
        write(disk, memory, space, keys[:8])
    fault = errno.EDQUOT
    assert write(disk, memory, space, keys[:8]) == [Put.STORED] * 8
    for first in range(8, 120, 3):
        assert Put.FAILED not in write(disk, memory, space, keys[first : first + 3])
        assert read(disk, memory, space, keys[:8]) == [True] * 8
    evicted, fault = disk.stats().evicted_pages, errno.EIO
    assert evicted > 0 and disk.stats().pages > 24
    assert disk.stats().notes["no room"].endswith(" of its capacity of 64.0 MiB: Disk quota exceeded")
    disk.remove(space, keys[:1], deadline_s=DEADLINE_S)
    disk.flush()
    with pytest.raises(TierError, match="Input/output error"):
        write(disk, memory, new_space(), chain("more than there is room for", 20))
    assert disk.stats().evicted_pages == evicted
    disk.clear(None, deadline_s=DEADLINE_S)
    assert disk._pages.free_granules == disk._size - 1, "all but the file's head"
    disk.close()


@as_root
def test_a_disk_that_is_read_only_says_so(tmp_path):
    where = tmp_path / "mount"
    with mounted(where, "size=4m"):
        open_disk(where / "disk").close()
        subprocess.run(["mount", "-o", "remount,ro", where], check=True)
        with pytest.raises(TierError, match="Read-only file system") as caught:
            open_disk(where / "disk")
        assert caught.value.cause == "denied"


def test_a_disk_whose_commit_does_not_come_back_is_left_open_by_close(folder, monkeypatch, caplog):
    monkeypatch.setattr(tier, "_CLOSE_S", 0.05)
    begun, goes_on = threading.Event(), threading.Event()
    disk = open_disk(folder)

    def hang() -> None:
        begun.set()
        goes_on.wait(DEADLINE_S)

    monkeypatch.setattr(disk, "flush", hang)
    disk._set_due(0)
    assert begun.wait(DEADLINE_S)
    disk.close()
    assert "is left open" in caplog.text
    monkeypatch.undo()
    assert disk._file.is_in_place(), "the commit under way has its files"
    goes_on.set()
    disk._committer.join()
    disk._index.close()
    disk._file.close()


def test_the_calls_that_suit_a_disk_keep_it_busy_with_large_pages_as_well():
    """As many as it reads at once, of pages of 4 MiB."""
    assert Disk.parallel * (Disk.batch_nbytes // (4 * MIB)) >= tier.AT_ONCE
