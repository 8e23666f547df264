"""Whose is a folder: nothing but what is provably a pool's is ever removed, and no folder of anything else is used."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mooncake_connector.cli.pool import destroy
from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore, Put
from store_client.testing import SHARD, chain, namespace, put_chain

CAPACITY = 4 << 20


def make(pool: Path) -> None:
    with EmbeddedStore(pool, CAPACITY) as store:
        assert put_chain(store.space(namespace(), SHARD), chain("a", 2)) == [Put.STORED] * 2


def works(pool: Path) -> bool:
    with EmbeddedStore(pool, CAPACITY) as store:
        put_chain(store.space(namespace(), SHARD), chain("a", 2))
        return store.space(namespace(), SHARD).lookup(chain("a", 2)).pages == 2


def data_folder(pool: Path) -> Path:
    return pool / str(json.loads((pool / "pool.json").read_text())["id"])


def tree(folder: Path) -> dict[str, "bytes | None"]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def a_home(pool: Path) -> None:
    (pool / "letters" / "deep").mkdir(parents=True)
    (pool / "letters" / "deep" / "one").write_text("dear")
    (pool / ".profile").write_text("umask 077")


def a_pool_json_of_another_program(pool: Path) -> None:
    (pool / "pool.json").write_text('{"name": "swimming", "id": 7}')
    (pool / "lanes").mkdir()


def a_broken_pool_json_alone(pool: Path) -> None:
    (pool / "pool.json").write_text("{")


def a_folder_named_like_our_data(pool: Path) -> None:
    (pool / ("ab" * 16)).mkdir()
    (pool / ("ab" * 16) / "table").write_text("set for four")


def a_link_to_somebodys_data(pool: Path) -> None:
    target = pool.with_name("elsewhere")
    make(target)
    (pool / data_folder(target).name).symlink_to(data_folder(target))


@pytest.mark.parametrize(
    "found",
    [
        a_home, a_pool_json_of_another_program, a_broken_pool_json_alone, a_folder_named_like_our_data,
        a_link_to_somebodys_data,
    ],
)  # fmt: skip
def test_a_folder_of_something_else_is_refused_and_left_alone(pool: Path, found: Callable[[Path], None]) -> None:
    pool.mkdir(mode=0o700)
    found(pool)
    before = tree(pool.parent)
    with pytest.raises(PoolError, match=r"is not empty and is not a pool .*nothing in it was touched: set `pool`"):
        EmbeddedStore(pool, CAPACITY)
    assert tree(pool.parent) == before


def test_a_home_is_not_advised_to_change_its_mode(pool: Path) -> None:
    pool.mkdir()
    pool.chmod(0o755)
    a_home(pool)
    with pytest.raises(PoolError, match="is not empty and is not a pool"):
        EmbeddedStore(pool, CAPACITY)


@pytest.mark.parametrize("reason", ["another boot", "older format", "damage", "destroyed"])
def test_what_others_put_beside_a_pool_and_into_it_outlives_it(pool: Path, reason: str) -> None:
    make(pool)
    a_home(pool)
    (pool / ("ef" * 16)).mkdir()
    (pool / ("ef" * 16) / "table").write_text("set for four")
    old = data_folder(pool)
    (old / "notes").mkdir()
    (old / "notes" / "one").write_text("mine")
    description = json.loads((pool / "pool.json").read_text())
    if reason == "another boot":
        (pool / "pool.json").write_text(json.dumps({**description, "boot_id": "another"}))
    elif reason == "older format":
        (pool / "pool.json").write_text(json.dumps({**description, "format": 1}))
    elif reason == "damage":
        os.truncate(old / "table", 100)
    if reason == "destroyed":
        with pytest.raises(PoolError, match="also holds"):
            destroy(pool)
    else:
        assert works(pool)
        assert data_folder(pool) != old
    assert (pool / "letters" / "deep" / "one").read_text() == "dear"
    assert (pool / ("ef" * 16) / "table").read_text() == "set for four"
    assert (old / "notes" / "one").read_text() == "mine"
    assert not (old / "arena").exists(), "what is ours went"


def test_a_link_in_a_data_folder_leads_nobody_out_of_it(pool: Path) -> None:
    make(pool)
    data = data_folder(pool)
    outside = pool.with_name("outside")
    shutil.copytree(data / "ledger", outside)
    shutil.rmtree(data / "ledger")
    (data / "ledger").symlink_to(outside)
    assert works(pool)
    assert (outside / "data.mdb").exists()


@pytest.mark.parametrize("lost", ["missing", "broken"])
def test_a_pool_whose_description_is_lost_is_made_anew(pool: Path, lost: str) -> None:
    make(pool)
    old = data_folder(pool)
    (pool / "pool.json").unlink()
    if lost == "broken":
        (pool / "pool.json").write_bytes(bytes(100))
    assert works(pool)
    assert not old.exists()


@pytest.mark.parametrize("step", range(12))
def test_what_a_killed_creation_leaves_is_taken_over(pool: Path, step: int) -> None:
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
    assert works(pool)
    assert len([path for path in pool.iterdir() if path.is_dir()]) == 1, "the half-made one is gone"


def test_a_volume_that_holds_only_lost_and_found_is_empty(pool: Path) -> None:
    pool.mkdir(mode=0o700)
    (pool / "lost+found").mkdir()
    assert works(pool)
    assert (pool / "lost+found").exists()


def test_whoever_cleans_up_old_files_leaves_a_pool_that_is_made_anew(pool: Path) -> None:
    """No file in it is needed to prove whose it is."""
    make(pool)
    for file in pool.rglob("*"):
        if file.is_file() and file.name != "arena":
            file.unlink()
    assert works(pool)


def test_destroying_waits_for_an_opening_under_way(pool: Path) -> None:
    make(pool)
    openers = [subprocess.Popen([sys.executable, "-c", OPENER, pool], stdout=subprocess.PIPE) for _ in range(3)]
    for opener in openers:
        assert opener.stdout is not None and opener.stdout.readline()
    for _ in range(10):
        with contextlib.suppress(PoolError):
            destroy(pool)
        time.sleep(0.02)
    for opener in openers:
        opener.kill()
        opener.wait()
    assert works(pool)


OPENER = """
import sys
from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore
print("runs", flush=True)
while True:
    try:
        EmbeddedStore(sys.argv[1], 4 << 20).close()
    except PoolError:
        pass
"""
