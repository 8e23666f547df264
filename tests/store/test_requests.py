"""What engines tell of requests is kept for a while, by many processes without a lock, and is whole or not there."""

import os
import random

import pytest
from long_form import LONG
from store.pools import as_root, data_folder, fill, garble, mounted, run, running, space_in

from store_client import EmbeddedStore
from store_client.embedded import folder
from store_client.embedded.requests import MOST_NBYTES, REQUESTS_NBYTES
from store_client.testing import chain, put_chain


def test_a_request_is_kept_and_the_file_is_made_with_the_first(pool, store):
    path = data_folder(pool) / "requests"
    assert store.noted_requests() == []
    assert not path.exists()
    store.note_request("a", b"told of a")
    assert store.noted_requests() == [b"told of a"]
    assert (path.stat().st_size, path.stat().st_mode & 0o777) == (REQUESTS_NBYTES, 0o600)
    store.note_request("a", b"later")
    assert store.noted_requests() == [b"later"]


def test_the_latest_are_kept_and_all_of_them_are_few(store):
    for i in range(3000):
        store.note_request(f"request {i}", f"told of {i}".encode() * 20)
    kept = store.noted_requests()
    assert 400 < len(kept) <= 512
    assert b"told of 2999" * 20 in kept


@pytest.mark.parametrize("nbytes, kept", [(1, 1), (MOST_NBYTES, 1), (MOST_NBYTES + 1, 0)])
def test_what_is_too_long_is_left_out(store, nbytes, kept):
    store.note_request("a", b"x" * nbytes)
    assert len(store.noted_requests()) == kept


@pytest.mark.long
def test_requests_are_told_across_processes_that_are_killed(pool, store):
    code = """
        print("ready", flush=True)
        for i in range(10**9):
            store.note_request(f"{i}", f"{i} ".encode() * (i % 500 + 1))
    """
    kept = 0
    for _ in range(20 if LONG else 2):
        with running(code, pool), running(code, pool):
            for _ in range(30):
                told = store.noted_requests()
                kept += len(told)
                assert all(len(set(each.split())) == 1 for each in told), "a mixture"
    assert kept


def test_random_bytes_and_a_file_of_another_size_are_no_requests(pool):
    fill(pool)
    path = data_folder(pool) / "requests"
    path.write_bytes(random.Random(1).randbytes(100_000))
    with EmbeddedStore(pool) as store:
        assert store.noted_requests() == []
        store.note_request("a", b"told")
        assert store.noted_requests() == [b"told"]
        garble(path, 0, random.Random(2).randbytes(REQUESTS_NBYTES))
        assert store.noted_requests() == []


@as_root
def test_a_full_file_system_keeps_no_requests_and_harms_nobody(pool):
    with mounted(pool, "size=64m"), EmbeddedStore(pool, 4 << 20) as store:
        with open(pool / "ballast", "wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, folder.free_nbytes(pool) - 65536)
        store.note_request("a", b"told")
        assert store.noted_requests() == []
        (pool / "ballast").unlink()
        assert put_chain(space_in(store), chain("a", 2))


def test_a_pool_that_is_destroyed_takes_them_along(pool):
    with EmbeddedStore(pool, 4 << 20) as store:
        store.note_request("a", b"told")
    assert run("print(*store.noted_requests())", pool).stdout == "b'told'\n"
    assert folder.remove_pool(pool) == []
