"""Whose is a folder: nothing but what is provably a pool's is ever removed, and no folder of anything else is used."""

import contextlib
import os
import shutil
import sys

import pytest
from simulated.waiting import wait_for
from store.pools import CAPACITY, data_folder, edit, fill, running, works

from mooncake_connector.cli.pool import destroy
from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore


def still_works(pool):
    with EmbeddedStore(pool, CAPACITY) as store:
        return works(store)


def tree(folder):
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def a_home(pool):
    (pool / "letters" / "deep").mkdir(parents=True)
    (pool / "letters" / "deep" / "one").write_text("dear")
    (pool / ".profile").write_text("umask 077")


def a_pool_json_of_another_program(pool):
    (pool / "pool.json").write_text('{"name": "swimming", "id": 7}')
    (pool / "lanes").mkdir()


def a_broken_pool_json_alone(pool):
    (pool / "pool.json").write_text("{")


def a_folder_named_like_our_data(pool):
    (pool / ("ab" * 16)).mkdir()
    (pool / ("ab" * 16) / "table").write_text("set for four")


def a_link_to_somebodys_data(pool):
    target = pool.with_name("elsewhere")
    fill(target)
    (pool / data_folder(target).name).symlink_to(data_folder(target))


@pytest.mark.parametrize(
    "found",
    [
        a_home, a_pool_json_of_another_program, a_broken_pool_json_alone, a_folder_named_like_our_data,
        a_link_to_somebodys_data,
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_folder_of_something_else_is_refused_and_left_alone(pool, found, mode):
    """And nobody is advised to change its mode."""
    pool.mkdir()
    pool.chmod(mode)
    found(pool)
    before = tree(pool.parent)
    with pytest.raises(PoolError, match=r"is not empty and is not a pool .*nothing in it was touched: set `pool`"):
        EmbeddedStore(pool, CAPACITY)
    assert tree(pool.parent) == before


@pytest.mark.parametrize("reason", ["another boot", "older format", "damage", "destroyed"])
def test_what_others_put_beside_a_pool_and_into_it_outlives_it(pool, reason):
    fill(pool)
    a_home(pool)
    (pool / ("ef" * 16)).mkdir()
    (pool / ("ef" * 16) / "table").write_text("set for four")
    old = data_folder(pool)
    (old / "notes").mkdir()
    (old / "notes" / "one").write_text("mine")
    if reason == "another boot":
        edit(pool, boot_id="another")
    elif reason == "older format":
        edit(pool, format=1)
    elif reason == "damage":
        os.truncate(old / "table", 100)
    if reason == "destroyed":
        with pytest.raises(PoolError, match="also holds"):
            destroy(pool)
    else:
        assert still_works(pool)
        assert data_folder(pool) != old
    assert (pool / "letters" / "deep" / "one").read_text() == "dear"
    assert (pool / ("ef" * 16) / "table").read_text() == "set for four"
    assert (old / "notes" / "one").read_text() == "mine"
    assert not (old / "arena").exists(), "what is ours went"


def test_a_link_in_a_data_folder_leads_nobody_out_of_it(pool):
    fill(pool)
    data = data_folder(pool)
    outside = pool.with_name("outside")
    shutil.copytree(data / "ledger", outside)
    shutil.rmtree(data / "ledger")
    (data / "ledger").symlink_to(outside)
    assert still_works(pool)
    assert (outside / "data.mdb").exists()


@pytest.mark.parametrize("step", range(12))
def test_what_a_killed_creation_leaves_is_taken_over(pool, step):
    """A creation is cut off after each of its system calls on files."""
    calls = 0
    child = os.fork()
    if child == 0:

        def count(event: str, arguments: object) -> None:
            nonlocal calls
            if event in ("os.mkdir", "os.rename", "os.truncate") or (event == "open" and str(pool) in str(arguments)):
                calls += 1
                if calls > step + 2:
                    os._exit(9)

        sys.addaudithook(count)
        EmbeddedStore(pool, CAPACITY)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert still_works(pool)
    assert len([path for path in pool.iterdir() if path.is_dir()]) == 1, "the half-made one is gone"


def test_a_volume_that_holds_only_lost_and_found_is_empty(pool):
    pool.mkdir(mode=0o700)
    (pool / "lost+found").mkdir()
    assert still_works(pool)
    assert (pool / "lost+found").exists()


def test_whoever_cleans_up_old_files_leaves_a_pool_that_is_made_anew(pool):
    """No file in it is needed to prove whose it is."""
    fill(pool)
    for file in pool.rglob("*"):
        if file.is_file() and file.name != "arena":
            file.unlink()
    assert still_works(pool)


def test_destroying_waits_for_an_opening_under_way(pool):
    opener = """
        print("runs", flush=True)
        while True:
            try:
                EmbeddedStore(sys.argv[1], 4 << 20).close()
            except PoolError:
                pass
    """
    fill(pool)
    with contextlib.ExitStack() as openers:
        for _ in range(3):
            openers.enter_context(running(opener, pool, opened=False))
        for _ in range(10):
            wait_for(pool.exists)  # one of them has made it again
            with contextlib.suppress(PoolError):
                destroy(pool)
    assert still_works(pool)
