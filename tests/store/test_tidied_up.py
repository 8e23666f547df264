"""Files of the pool that somebody else deletes or cuts off under live processes: noticed, and the pool opened again."""

import os
import shutil
import time

import pytest
from simulated.waiting import wait_for
from store.pools import data_folder, fill, inside, run, space_in

from store_client import EmbeddedStore, Put
from store_client.testing import chain, get_page, page_bytes, parents_of, put_chain

pytestmark = pytest.mark.slow

FILES = [
    "pool.json", "open.lock", "table", "feed", "arena", "spaces", "ledger/data.mdb", "ledger", "owners", "everything",
]  # fmt: skip


def delete(pool, name):
    if name in ("pool.json", "open.lock"):
        (pool / name).unlink()
    elif name == "everything":
        for file in [file for file in pool.rglob("*") if file.is_file()]:
            file.unlink()
    elif (data_folder(pool) / name).is_dir():
        shutil.rmtree(data_folder(pool) / name)
    else:
        (data_folder(pool) / name).unlink()


def put_elsewhere(pool, name):
    code = "print(*[put.value for put in put_chain(space, chain(sys.argv[2], 2))]); store.close()"
    return run(code, pool, name).stdout.split()


@pytest.mark.parametrize("name", FILES)
def test_a_deleted_file_ends_in_reopening(pool, store, space, name):
    keys = chain("a", 2)
    put_chain(space, keys)
    delete(pool, name)

    def is_shared_again() -> bool:
        """This process and a fresh one see what the other stored: there are no two pools."""
        put_chain(space, keys)
        mine = f"after {time.monotonic()}"
        if space.lookup(keys).pages != 2 or put_elsewhere(pool, mine) != ["stored", "stored"]:
            return False
        return space.lookup(chain(mine, 2)).pages == 2

    wait_for(is_shared_again)
    assert store.verify().corrupt == 0


def test_a_pool_that_was_replaced_gives_its_memory_back_without_a_collector_of_cycles(pool):
    """Engines freeze theirs: what is in a cycle by then stays for ever."""
    code = """
        import gc, shutil
        gc.disable()
        put_chain(space, chain("a", 3))
        shutil.rmtree(sys.argv[1])
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            put_chain(space, chain("a", 3))
            mapped = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if sys.argv[1] in line}
            arenas = [name for name in mapped if "/arena" in name]
            if len(arenas) == 1 and not any("(deleted)" in name for name in mapped):
                break
            time.sleep(0.05)
        print(*arenas)
    """
    fill(pool)
    mapped = run(code, pool).stdout.split("\n")[0]
    assert mapped == str(data_folder(pool) / "arena")


def test_a_deleted_file_never_leaves_two_writers(pool, store, space):
    """The lock is the table itself: who has another one has another pool, in which nothing of this one is changed."""
    put_chain(space, chain("a", 2))
    opened = inside(store)
    with opened.writer.locked(time.monotonic() + 60):
        delete(pool, "table")
        assert put_elsewhere(pool, "b") == ["stored", "stored"]
        assert opened.table.pages == 2
    wait_for(lambda: space.lookup(chain("b", 2)).pages == 2)


def test_a_writer_whose_owner_file_is_deleted_keeps_what_it_reserved(pool, space):
    keys, others = chain("a", 3), chain("other", 2)

    def write(i, view):
        if i == 1:
            for file in (data_folder(pool) / "owners").iterdir():
                file.unlink()
            assert put_elsewhere(pool, "other") == ["stored", "stored"]
        view[:] = page_bytes(keys[i])

    outcome = space.write(keys, write, nbytes=65536, parents=parents_of(keys), deadline_s=120)
    assert outcome == [Put.STORED] * 3
    assert all(get_page(space, key) is not None for key in keys + others)
    wait_for(lambda: space.lookup(keys).pages == 3 and len(list((data_folder(pool) / "owners").iterdir())) == 1)


@pytest.mark.parametrize("name", ["spaces", "arena"])
def test_a_file_that_was_cut_off_ends_in_reopening(pool, name):
    """Where nobody has touched what was cut off: who does is killed by the system (SIGBUS)."""
    fill(pool, 2)
    before = data_folder(pool)
    with EmbeddedStore(pool) as store:
        os.truncate(before / name, os.stat(before / name).st_size - (1 << 20 if name == "arena" else 10))
        space = space_in(store)
        wait_for(lambda: space.lookup(chain("a", 1)).pages in (0, 1) and data_folder(pool) != before)
        wait_for(lambda: put_chain(space, chain("b", 2)) == [Put.STORED] * 2)
