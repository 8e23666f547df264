"""Files of the pool that somebody else deletes or cuts off under live processes: noticed, and the pool opened again."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store.audit import audit
from store.test_opening import CAPACITY, data_folder, until

from store_client import EmbeddedStore, Put
from store_client.testing import SHARD, chain, get_page, namespace, page_bytes, parents_of, put_chain

FILES = [
    "pool.json",
    "open.lock",
    "table",
    "feed",
    "arena",
    "spaces",
    "ledger/data.mdb",
    "ledger",
    "owners",
    "everything",
]
OTHER = (
    "import sys\n"
    "from store_client import EmbeddedStore\n"
    "from store_client.testing import *\n"
    "with EmbeddedStore(sys.argv[1]) as store:\n"
    "    print(*[outcome.value for outcome in put_chain(store.space(namespace(), SHARD), chain(sys.argv[2], 2))])\n"
)


def delete(pool: Path, name: str) -> None:
    if name in ("pool.json", "open.lock"):
        (pool / name).unlink()
    elif name == "everything":
        for file in [file for file in pool.rglob("*") if file.is_file()]:
            file.unlink()
    elif (data_folder(pool) / name).is_dir():
        shutil.rmtree(data_folder(pool) / name)
    else:
        (data_folder(pool) / name).unlink()


def put_elsewhere(pool: Path, name: str) -> list[str]:
    command = [sys.executable, "-c", OTHER, str(pool), name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("name", FILES)
def test_a_deleted_file_ends_in_reopening(pool: Path, name: str) -> None:
    keys = chain("a", 2)
    with EmbeddedStore(pool, CAPACITY) as store:
        space = store.space(namespace(), SHARD)
        put_chain(space, keys)
        delete(pool, name)

        def is_shared_again() -> bool:
            """This process and a fresh one see what the other stored: there are no two pools."""
            put_chain(space, keys)
            mine = f"after {time.monotonic()}"
            if space.lookup(keys).pages != 2 or put_elsewhere(pool, mine) != ["stored", "stored"]:
                return False
            return space.lookup(chain(mine, 2)).pages == 2

        assert until(is_shared_again, 60)
        audit(store)
        assert store.verify().corrupt == 0


def test_a_deleted_file_never_leaves_two_writers(pool: Path) -> None:
    """The lock is the table itself: who has another one has another pool, in which nothing of this one is changed."""
    with EmbeddedStore(pool, CAPACITY) as store:
        opened = store._handle._pool
        assert opened is not None
        space = store.space(namespace(), SHARD)
        put_chain(space, chain("a", 2))
        with opened.writer.locked(time.monotonic() + 5):
            delete(pool, "table")
            assert put_elsewhere(pool, "b") == ["stored", "stored"]
            audit_pages = opened.table.pages
        assert audit_pages == 2
        assert until(lambda: space.lookup(chain("b", 2)).pages == 2)


def test_a_writer_whose_owner_file_is_deleted_keeps_what_it_reserved(pool: Path) -> None:
    keys, others = chain("a", 3), chain("other", 3)
    code = (
        "import sys, time\n"
        "from store_client import EmbeddedStore\n"
        "from store_client.testing import *\n"
        "with EmbeddedStore(sys.argv[1]) as store:\n"
        "    put_chain(store.space(namespace(), SHARD), chain('other', 3))\n"
    )
    with EmbeddedStore(pool, CAPACITY) as store:
        space = store.space(namespace(), SHARD)

        def fill(i: int, view: object) -> None:
            if i == 1:
                for file in (data_folder(pool) / "owners").iterdir():
                    file.unlink()
                subprocess.run([sys.executable, "-c", code, str(pool)], check=True)
            view[:] = page_bytes(keys[i])  # type: ignore[index]

        outcome = space.write(keys, fill, nbytes=65536, parents=parents_of(keys), deadline_s=30)
        assert outcome == [Put.STORED] * 3
        assert all(get_page(space, key) is not None for key in keys + others)
        assert until(lambda: space.lookup(keys).pages == 3 and len(list((data_folder(pool) / "owners").iterdir())) == 1)
        audit(store)


@pytest.mark.parametrize("name", ["spaces", "arena"])
def test_a_file_that_was_cut_off_ends_in_reopening(pool: Path, name: str) -> None:
    """Where nobody has touched what was cut off: who does is killed by the system (SIGBUS)."""
    with EmbeddedStore(pool, CAPACITY) as store:
        space = store.space(namespace(), SHARD)
        put_chain(space, chain("a", 2))
        before = data_folder(pool)
    with EmbeddedStore(pool) as store:
        os.truncate(before / name, os.stat(before / name).st_size - (1 << 20 if name == "arena" else 10))
        space = store.space(namespace(), SHARD)
        assert until(lambda: space.lookup(chain("a", 1)).pages in (0, 1) and data_folder(pool) != before)
        assert until(lambda: put_chain(space, chain("b", 2)) == [Put.STORED] * 2)
