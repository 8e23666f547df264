"""Damage and exhaustion: no method of a store raises, no page is wrong, and one rebuild makes the pool work again.

What is mapped is damaged through the file, at random places, while the pool is open and while it is not.
"""

import errno
import json
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from store.audit import audit
from store.test_opening import CAPACITY, data_folder, until

from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore, Put, Space
from store_client.embedded.ledger import Ledger
from store_client.embedded.locks import FileLock
from store_client.embedded.table import HEADER_NBYTES
from store_client.testing import (
    SHARD,
    chain,
    get_page,
    namespace,
    page_bytes,
    parents_of,
    put_chain,
    put_pages,
)

ROUNDS = int(os.environ.get("MOONCAKE_CONNECTOR_DAMAGE_ROUNDS", "4"))
NBYTES = 4096


def use_everything(store: EmbeddedStore, rng: random.Random) -> None:
    """Call every method; a wrong byte fails, and so does any exception."""
    name = f"chain {rng.randrange(20)}"
    space, keys = store.space(namespace(), SHARD), chain(name, 8)
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


def works(store: EmbeddedStore) -> bool:
    """A chain that nobody has stored is stored and read."""
    keys = chain(os.urandom(8).hex(), 4)
    space = store.space(namespace(), SHARD)
    if put_chain(space, keys, NBYTES) != [Put.STORED] * 4 or space.lookup(keys).pages != 4:
        return False
    return all(get_page(space, key, NBYTES) is not None for key in keys)


def garble(path: Path, rng: random.Random, start: int, stop: int, spots: int) -> None:
    """Overwrite a few spots of the file with something else."""
    with open(path, "r+b", buffering=0) as file:
        stop = min(stop, path.stat().st_size)
        for _ in range(spots):
            file.seek(rng.randrange(start, stop))
            size = min(rng.choice([1, 8, 64, 512]), stop - file.tell())
            file.write(rng.choice([bytes(size), b"\xff" * size, rng.randbytes(size)]))


def live_rows(store: EmbeddedStore) -> list[int]:
    opened = store._handle._pool
    assert opened is not None
    return list(opened.table.live_slots().tolist())


@pytest.mark.slow
@pytest.mark.parametrize("target", ["rows", "table", "header", "feed", "arena", "spaces", "owners"])
def test_damage_under_an_open_store(pool: Path, target: str) -> None:
    rng = random.Random(target)
    for round_ in range(ROUNDS):
        with EmbeddedStore(pool, CAPACITY) as store:
            for _ in range(6):
                use_everything(store, rng)
            data = data_folder(pool)
            if target == "rows":
                for slot in live_rows(store)[:5]:
                    at = HEADER_NBYTES + 128 * slot
                    garble(data / "table", rng, at, at + 128, 1)
            elif target == "table":
                garble(data / "table", rng, HEADER_NBYTES, 1 << 40, 200)
            elif target == "header":
                garble(data / "table", rng, 0, 1024, 4)
            elif target == "feed":
                garble(data / "feed", rng, 0, 64, 4)
                garble(data / "feed", rng, 4096, 1 << 40, 200)
            elif target == "owners":
                for file in (data / "owners").iterdir():
                    garble(file, rng, 0, 8192, 4)
            elif target == "spaces":
                (data / "spaces").write_bytes(rng.randbytes(300) + b"[" * 100_000 + b"\n" + b'{"shard": 5}\n')
            else:
                garble(data / "arena", rng, 0, 1 << 40, 200)
            for _ in range(4):
                use_everything(store, rng)
            assert until(lambda: works(store), 60), round_
            use_everything(store, rng)
        with EmbeddedStore(pool, CAPACITY) as store:
            assert until(lambda: works(store), 60)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["rows", "table", "header", "feed", "arena", "spaces", "owners", "pool.json"])
def test_damage_while_nobody_looks(pool: Path, target: str) -> None:
    rng = random.Random(target)
    for _ in range(ROUNDS):
        with EmbeddedStore(pool, CAPACITY) as store:
            for _ in range(6):
                use_everything(store, rng)
            rows = live_rows(store)
        data = data_folder(pool)
        if target == "rows":
            for slot in rows[:5]:
                garble(data / "table", rng, HEADER_NBYTES + 128 * slot, HEADER_NBYTES + 128 * slot + 128, 1)
        elif target == "pool.json":
            text = (pool / "pool.json").read_bytes()
            at = rng.randrange(len(text))
            garbled = text[:at] + rng.randbytes(4) + text[at + 4 :]
            (pool / "pool.json").write_bytes(rng.choice([text[:at], garbled, b"[" * 100_000]))
        elif target == "owners":
            (data / "owners" / "a stranger's").write_bytes(b"")
            (data / "owners" / ("0" * 32)).write_bytes(rng.randbytes(9000))
        else:
            places = {"header": (0, 1024, 4), "feed": (0, 64, 4), "spaces": (0, 1 << 40, 20)}
            spots = places.get(target, (HEADER_NBYTES, 1 << 40, 200))
            garble(data / ("table" if target == "header" else target), rng, *spots)
        with EmbeddedStore(pool, CAPACITY) as store:
            for _ in range(4):
                use_everything(store, rng)
            assert until(lambda: works(store), 60)


def test_a_broken_row_is_not_met_for_ever(pool: Path) -> None:
    """Its key is whole, so that it would be neither read nor stored again."""
    keys = chain("a", 3)
    with EmbeddedStore(pool, CAPACITY) as store:
        space = store.space(namespace(), SHARD)
        put_chain(space, keys)
        opened = store._handle._pool
        assert opened is not None
        (slot,) = opened.table.slots(np.frombuffer(keys[1], np.uint8).reshape(1, 32), space._number)
        opened.table.rows[slot, 60] ^= 255
        assert get_page(space, keys[1]) is None
        assert until(lambda: put_chain(space, keys).count(Put.FAILED) == 0 and get_page(space, keys[1]) is not None)
        audit(store)


@pytest.mark.parametrize("ask", ["verify", "clear"])
def test_who_asks_a_damaged_pool_is_told_so(pool: Path, ask: str) -> None:
    """And not that all of its no pages are intact, or that none had to be removed."""
    keys = chain("a", 3)
    with EmbeddedStore(pool, CAPACITY) as store:
        put_chain(store.space(namespace(), SHARD), keys)
        data, (slot, *_) = data_folder(pool), live_rows(store)
    garble(data / "table", random.Random(1), HEADER_NBYTES + 128 * slot + 60, HEADER_NBYTES + 128 * slot + 61, 1)
    with EmbeddedStore(pool, rebuild=False) as store:
        for key in keys:
            get_page(store.space(namespace(), SHARD), key)
        for _ in range(2):
            with pytest.raises(PoolError, match=r"gives no answer: it is damaged .*row.*makes it anew.*store destroy"):
                getattr(store, ask)()


@pytest.mark.parametrize(
    "error",
    [lmdb.CorruptedError("x"), lmdb.PageNotFoundError("x"), ValueError("space is free already"), KeyError(1)],
)
def test_damage_in_the_ledger_leads_to_one_rebuild(
    pool: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = chain("a", 2)
    with EmbeddedStore(pool, CAPACITY) as store:
        space = store.space(namespace(), SHARD)
        put_chain(space, keys)
        broken, peek = data_folder(pool), Ledger.peek
        opened = store._handle._pool
        assert opened is not None

        def fail(ledger: Ledger) -> Any:
            if ledger is opened._ledger:
                raise error
            return peek(ledger)

        monkeypatch.setattr(Ledger, "peek", fail)
        assert put_chain(space, chain("b", 2)) == [Put.FAILED] * 2
        assert space.lookup(keys).pages == 0, "what is known to be damaged is not read either"
        assert until(lambda: put_chain(space, keys) == [Put.STORED] * 2)
        assert data_folder(pool) != broken
        assert len([record for record in caplog.records if "is rebuilt, empty" in record.message]) == 1
        assert opened.table.max_pages == store.stats().max_pages, "as large as before"


def exhausted(*arguments: object, **named: object) -> Any:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("missing", ["memory", "threads", "lock", "descriptors"])
def test_what_the_system_refuses_is_a_miss_and_passes(
    pool: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(missing)
    with EmbeddedStore(pool, CAPACITY) as store:
        use_everything(store, rng)
        before = data_folder(pool)
        with monkeypatch.context() as refusing:
            if missing == "memory":
                refusing.setattr(mmap, "mmap", exhausted)
            elif missing == "threads":
                refusing.setattr(threading.Thread, "start", no_thread)
            elif missing == "descriptors":
                refusing.setattr(os, "open", exhausted)
                refusing.setattr(os, "stat", os.stat)
            else:
                refusing.setattr(FileLock, "acquire", exhausted)
            with EmbeddedStore(pool, 2 * CAPACITY if missing == "memory" else None):
                for _ in range(5):
                    use_everything(store, rng)
                    garble(data_folder(pool) / "arena", rng, 0, 1 << 20, 20)
        assert until(lambda: works(store))
        assert data_folder(pool) == before, "that is no damage"


def test_a_thread_that_cannot_start_is_started_later(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = chain("a", 1)
    with EmbeddedStore(pool, CAPACITY) as store:
        space = store.space(namespace(), SHARD)
        put_chain(space, keys)
        arena = data_folder(pool) / "arena"
        with open(arena, "r+b") as file:
            file.write(b"\xff" * 100)
        with monkeypatch.context() as refusing:
            refusing.setattr(threading.Thread, "start", no_thread)
            assert get_page(space, keys[0]) is None
        assert get_page(space, keys[0]) is None
        assert until(lambda: not space.contains(keys)[0]), "dropped once a thread can start"
        (pool / "pool.json").unlink()
        with monkeypatch.context() as refusing:
            refusing.setattr(threading.Thread, "start", no_thread)
            store._handle._follow(store._handle._pool)  # type: ignore[arg-type]
        assert until(lambda: bool(put_chain(space, keys)) and (pool / "pool.json").exists())


CALLERS: list[tuple[str, Callable[[Space, list[bytes], Any], Any]]] = [
    ("fill", lambda space, keys, fail: space.write(keys, fail, nbytes=9, parents=[None], deadline_s=5)),
    ("consume", lambda space, keys, fail: space.read(keys, fail, nbytes=65536)),
]


@pytest.mark.parametrize("error", [ValueError, KeyError, OSError, lmdb.CorruptedError])
def test_an_exception_of_the_callers_passes_and_is_no_damage(pool: Path, error: type[Exception]) -> None:
    with EmbeddedStore(pool, CAPACITY) as store:
        space = store.space(namespace(), SHARD)
        put_chain(space, chain("a", 1))

        def fail(i: int, view: object) -> None:
            raise error("the caller's own")

        for (_, call), keys in zip(CALLERS, (chain("b", 1), chain("a", 1)), strict=True):
            with pytest.raises(error, match="the caller's own"):
                call(space, keys, fail)
        assert space.lookup(chain("a", 1)).pages == 1
        assert store.stats().failures == {}


def test_a_wrong_key_among_others_is_the_callers_mistake_and_no_damage(pool: Path) -> None:
    keys = chain("a", 2)
    with EmbeddedStore(pool, CAPACITY) as store:
        space = store.space(namespace(), SHARD)
        put_chain(space, keys)
        with pytest.raises(ValueError, match="31 bytes: expected 32"):
            space.lookup([keys[0], keys[1][:31]])
        opened = store._handle._pool
        assert opened is not None
        assert opened.damage is None
        assert space.lookup(keys).pages == 2


def test_limits_of_processes_and_descriptors(pool: Path) -> None:
    """A process that is at its limits misses and fails, and raises nothing."""
    code = (
        "import os, resource, sys\n"
        "from store_client import EmbeddedStore\n"
        "from store_client.testing import *\n"
        "store = EmbeddedStore(sys.argv[1], 8 << 20)\n"
        "space = store.space(namespace(), SHARD)\n"
        "put_chain(space, chain('a', 2))\n"
        "space.lookup([]), space.remove([])\n"
        "highest = max(map(int, os.listdir('/proc/self/fd')))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (highest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "used = 1 << 40\n"
        "assert get_page(space, chain('a', 2)[1]) is not None\n"
        "put_chain(space, chain('b', 2)), store.stats(), store.namespaces(), store.verify(), store.clear()\n"
        "assert put_chain(store.space(namespace('other'), SHARD), chain('b', 2)) is not None\n"
        "store.close()\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(pool)], check=False).returncode == 0


def test_the_fuzz_knows_a_wrong_page(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedStore(pool, CAPACITY) as store:
        space, keys = store.space(namespace(), SHARD), chain("a", 1)
        put_pages(space, keys, [page_bytes(chain("b", 1)[0], NBYTES)], parents=[None], deadline_s=5)
        with pytest.raises(AssertionError, match="wrong bytes"):
            right_bytes(space, keys)
        assert json.loads((pool / "pool.json").read_text())["id"]
