"""Damage and exhaustion: no method of a store raises, no page is wrong, and one rebuild makes the pool work again.

What is mapped is damaged through the file, at random places, while the pool is open and while it is not.
"""

import errno
import itertools
import mmap
import os
import random
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from simulated.waiting import wait_for
from store import pools
from store.pools import CAPACITY, data_folder, garble, inside, run, space_in, works

from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore, Put, Space
from store_client.embedded.ledger import Ledger
from store_client.embedded.locks import FileLock
from store_client.embedded.table import HEADER_NBYTES
from store_client.testing import chain, get_page, namespace, page_bytes, parents_of, put_chain, put_pages

ROUNDS = int(os.environ.get("MOONCAKE_CONNECTOR_DAMAGE_ROUNDS", "4"))
NBYTES = 4096
EVERYTHING = 1 << 40


def use_everything(store: EmbeddedStore, rng: random.Random) -> None:
    """Call every method; a wrong byte fails, and so does any exception."""
    name = f"chain {rng.randrange(20)}"
    space, keys = space_in(store), chain(name, 8)
    pages = [page_bytes(key, NBYTES) for key in keys]
    space.lookup(keys)
    space.contains(keys)
    put_pages(space, keys, pages, parents=parents_of(keys), deadline_s=5)

    def fill(i: int, view: Any) -> None:
        view[:] = page_bytes(more[i], NBYTES)

    more = chain(name + " more", 4)
    space.write(more, fill, nbytes=NBYTES, parents=parents_of(more), deadline_s=5)
    right_bytes(space, keys + more)
    if rng.random() < 0.3:
        space.remove(keys[4:])
    if rng.random() < 0.1:
        space.clear()
    space.record_lookup(hit_pages=1, missed_pages=1, page_tokens=1)
    store.shards(namespace())
    with suppress(PoolError):  # what people ask, and nothing but this
        store.namespaces()
        store.stats()
        store.changes()
        if rng.random() < 0.3:
            store.verify()


def right_bytes(space: Space, keys: list[bytes]) -> int:
    seen: dict[int, bytes] = {}

    def consume(i: int, view: Any) -> None:
        seen[i] = view.tobytes()

    shown = space.read(keys, consume, nbytes=NBYTES)
    for i, key in enumerate(keys):
        assert not shown[i] or seen[i] == page_bytes(key, NBYTES).tobytes(), "wrong bytes"
    return sum(shown)


def scatter(path: Path, rng: random.Random, start: int, stop: int, spots: int) -> None:
    """Overwrite a few spots of the file with something else."""
    for _ in range(spots):
        at = rng.randrange(start, min(stop, path.stat().st_size))
        size = min(rng.choice([1, 8, 64, 512]), path.stat().st_size - at)
        garble(path, at, rng.choice([bytes(size), b"\xff" * size, rng.randbytes(size)]))


def live_rows(store: EmbeddedStore) -> list[int]:
    return list(inside(store).table.live_slots().tolist())


def damage(pool: Path, target: str, rng: random.Random, rows: list[int], *, is_open: bool) -> None:
    data = data_folder(pool)
    if target == "rows":
        for slot in rows[:5]:
            at = HEADER_NBYTES + 128 * slot
            scatter(data / "table", rng, at, at + 128, 1)
    elif target == "table":
        scatter(data / "table", rng, HEADER_NBYTES, EVERYTHING, 200)
    elif target == "header":
        scatter(data / "table", rng, 0, 1024, 4)
    elif target == "feed":
        scatter(data / "feed", rng, 0, 64, 4)
        scatter(data / "feed", rng, 4096, EVERYTHING, 200)
    elif target == "arena":
        scatter(data / "arena", rng, 0, EVERYTHING, 200)
    elif target == "spaces" and is_open:
        (data / "spaces").write_bytes(rng.randbytes(300) + b"[" * 100_000 + b"\n" + b'{"shard": 5}\n')
    elif target == "spaces":
        scatter(data / "spaces", rng, 0, EVERYTHING, 20)
    elif target == "owners":
        for file in (data / "owners").glob("?" * 32):
            scatter(file, rng, 0, 8192, 4)
        (data / "owners" / "somebody else's").write_bytes(b"")
        (data / "owners" / ("0" * 32)).write_bytes(rng.randbytes(9000))
    else:
        text = (pool / "pool.json").read_bytes()
        at = rng.randrange(len(text))
        garbled = text[:at] + rng.randbytes(4) + text[at + 4 :]
        (pool / "pool.json").write_bytes(rng.choice([text[:at], garbled, b"[" * 100_000]))


TARGETS = ["rows", "table", "header", "feed", "arena", "spaces", "owners"]


@pytest.mark.slow
@pytest.mark.parametrize("target, is_open", [*itertools.product(TARGETS, [True, False]), ("pool.json", False)])
def test_a_damaged_pool_shows_no_wrong_byte_raises_nothing_and_works_again(pool, target, is_open):
    rng = random.Random(target)

    def use_until_it_works(store: EmbeddedStore) -> None:
        for _ in range(4):
            use_everything(store, rng)
        wait_for(lambda: works(store))
        use_everything(store, rng)

    for _ in range(ROUNDS):
        with EmbeddedStore(pool, CAPACITY) as store:
            for _ in range(6):
                use_everything(store, rng)
            rows = live_rows(store)
            if is_open:
                damage(pool, target, rng, rows, is_open=True)
                use_until_it_works(store)
        if not is_open:
            damage(pool, target, rng, rows, is_open=False)
        with EmbeddedStore(pool, CAPACITY) as store:
            use_until_it_works(store)


def test_a_broken_row_is_not_met_for_ever(store, space):
    """Its key is whole, so that it would be neither read nor stored again."""
    keys = chain("a", 3)
    put_chain(space, keys)
    table = inside(store).table
    (slot,) = table.slots(np.frombuffer(keys[1], np.uint8).reshape(1, 32), space._number)
    table.rows[slot, 60] ^= 255
    assert get_page(space, keys[1]) is None
    wait_for(lambda: put_chain(space, keys).count(Put.FAILED) == 0 and get_page(space, keys[1]) is not None)


@pytest.mark.parametrize("ask", ["verify", "clear"])
def test_who_asks_a_damaged_pool_is_told_so(pool, ask):
    """And not that all of its no pages are intact, or that none had to be removed."""
    keys = pools.fill(pool, 3)
    with EmbeddedStore(pool) as store:
        slot = live_rows(store)[0]
    scatter(data_folder(pool) / "table", random.Random(1), at := HEADER_NBYTES + 128 * slot + 60, at + 1, 1)
    with EmbeddedStore(pool, rebuild=False) as store:
        for key in keys:
            get_page(space_in(store), key)
        for _ in range(2):
            with pytest.raises(PoolError, match=r"gives no answer: it is damaged .*row.*makes it anew.*store destroy"):
                getattr(store, ask)()


@pytest.mark.parametrize(
    "error",
    [lmdb.CorruptedError("x"), lmdb.PageNotFoundError("x"), ValueError("space is free already"), KeyError(1)],
)
def test_damage_in_the_ledger_leads_to_one_rebuild(pool, store, space, error, monkeypatch, caplog):
    keys = chain("a", 2)
    put_chain(space, keys)
    broken, opened, peek = data_folder(pool), inside(store), Ledger.peek

    def fail(ledger: Ledger) -> Any:
        if ledger is opened._ledger:
            raise error
        return peek(ledger)

    monkeypatch.setattr(Ledger, "peek", fail)
    assert put_chain(space, chain("b", 2)) == [Put.FAILED] * 2
    assert space.lookup(keys).pages == 0, "what is known to be damaged is not read either"
    wait_for(lambda: put_chain(space, keys) == [Put.STORED] * 2)
    assert data_folder(pool) != broken
    assert caplog.text.count("is rebuilt, empty") == 1
    assert opened.table.max_pages == store.stats().max_pages, "as large as before"


def exhausted(*arguments: object, **named: object) -> Any:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


MISSING = {
    "memory": (mmap, "mmap", exhausted),
    "threads": (threading.Thread, "start", no_thread),
    "lock": (FileLock, "acquire", exhausted),
    "descriptors": (os, "open", exhausted),
}


@pytest.mark.parametrize("missing", MISSING)
def test_what_the_system_refuses_is_a_miss_and_passes(pool, store, missing, monkeypatch):
    rng = random.Random(missing)
    use_everything(store, rng)
    before = data_folder(pool)
    with monkeypatch.context() as refusing:
        refusing.setattr(*MISSING[missing])
        with EmbeddedStore(pool, 2 * CAPACITY if missing == "memory" else None):
            for _ in range(5):
                use_everything(store, rng)
                scatter(data_folder(pool) / "arena", rng, 0, 1 << 20, 20)
    wait_for(lambda: works(store))
    assert data_folder(pool) == before, "that is no damage"


def test_a_thread_that_cannot_start_is_started_later(pool, store, space, monkeypatch):
    keys = chain("a", 1)
    put_chain(space, keys)
    garble(data_folder(pool) / "arena", 0, b"\xff" * 100)
    with monkeypatch.context() as refusing:
        refusing.setattr(*MISSING["threads"])
        assert get_page(space, keys[0]) is None
    assert get_page(space, keys[0]) is None
    wait_for(lambda: not space.contains(keys)[0])  # dropped once a thread can start
    (pool / "pool.json").unlink()
    with monkeypatch.context() as refusing:
        refusing.setattr(*MISSING["threads"])
        store._handle._follow(inside(store))
    wait_for(lambda: put_chain(space, keys) and (pool / "pool.json").exists())


@pytest.mark.parametrize("error", [ValueError, KeyError, OSError, lmdb.CorruptedError])
def test_an_exception_of_the_callers_passes_and_is_no_damage(store, space, error):
    put_chain(space, chain("a", 1))

    def fail(i: int, view: object) -> None:
        raise error("the caller's own")

    with pytest.raises(error, match="the caller's own"):
        space.write(chain("b", 1), fail, nbytes=9, parents=[None], deadline_s=60)
    with pytest.raises(error, match="the caller's own"):
        space.read(chain("a", 1), fail, nbytes=65536)
    assert space.lookup(chain("a", 1)).pages == 1
    assert store.stats().failures == {}


def test_a_wrong_key_among_others_is_the_callers_mistake_and_no_damage(store, space):
    keys = chain("a", 2)
    put_chain(space, keys)
    with pytest.raises(ValueError, match="31 bytes: expected 32"):
        space.lookup([keys[0], keys[1][:31]])
    assert inside(store).damage is None
    assert space.lookup(keys).pages == 2


def test_limits_of_processes_and_descriptors(pool, store):
    """A process that is at its limits misses and fails, and raises nothing."""
    code = """
        import resource
        put_chain(space, chain('a', 2))
        space.lookup([]), space.remove([])
        highest = max(map(int, os.listdir('/proc/self/fd')))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        assert get_page(space, chain('a', 2)[1]) is not None
        put_chain(space, chain('b', 2)), store.stats(), store.namespaces(), store.verify(), store.clear()
        assert put_chain(store.space(namespace('other'), SHARD), chain('b', 2)) is not None
        store.close()
    """
    assert run(code, pool).returncode == 0


@pytest.mark.slow
def test_the_fuzz_knows_a_wrong_page(space):
    keys = chain("a", 1)
    put_pages(space, keys, [page_bytes(chain("b", 1)[0], NBYTES)], parents=[None], deadline_s=60)
    with pytest.raises(AssertionError, match="wrong bytes"):
        right_bytes(space, keys)
