"""Memory of the arena that is secured ahead of its use: how much, by whom, and what becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from store_client import EmbeddedStore
from store_client.embedded import securing
from store_client.embedded.arena import GRANULE
from store_client.embedded.securing import Securing
from store_client.testing import SHARD, chain, namespace, put_chain

MIB = 1 << 20
CAPACITY = 64 * MIB


@pytest.fixture
def file(pool: Path):
    pool.mkdir(parents=True, exist_ok=True)
    fd = os.open(pool / "arena", os.O_RDWR | os.O_CREAT, 0o600)
    os.truncate(fd, CAPACITY)
    yield fd
    os.close(fd)


def nothing(start: int, stop: int) -> None:
    pass


def held(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def until_held(fd: int, nbytes: int) -> None:
    give_up_s = time.monotonic() + 60
    while held(fd) < nbytes and time.monotonic() < give_up_s:
        time.sleep(0.005)
    assert held(fd) >= nbytes


def at_rest(one: Securing) -> None:
    give_up_s = time.monotonic() + 60
    while one._running and time.monotonic() < give_up_s:
        time.sleep(0.005)
    assert not one._running


def test_some_of_what_is_behind_is_secured_and_mapped_in_the_background(file):
    mapped: list[tuple[int, int]] = []
    one = Securing(file)
    one.secure(0, 2 * MIB, CAPACITY, lambda start, stop: mapped.append((start, stop)))
    until_held(file, 6 * MIB)
    at_rest(one)
    assert held(file) == 6 * MIB, "a sixteenth of the capacity, and no more"
    assert mapped == [(2 * MIB, 6 * MIB)]


def test_nothing_is_secured_beyond_the_limit(file):
    one = Securing(file)
    one.secure(0, 7 * MIB, 8 * MIB, nothing)
    at_rest(one)
    assert 7 * MIB <= held(file) <= 8 * MIB
    one.secure(7 * MIB, 8 * MIB, 8 * MIB, nothing)
    at_rest(one)
    assert held(file) == 8 * MIB


def test_what_was_secured_ahead_is_not_secured_again(file, monkeypatch):
    one = Securing(file)
    one.secure(0, MIB, CAPACITY, nothing)
    at_rest(one)
    secured: list[tuple[int, int]] = []
    secure = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: secured.append(args[1:]) or secure(*args))
    monkeypatch.setattr(securing, "start_thread", lambda *args: False)
    one.secure(MIB, 3 * MIB, CAPACITY, nothing)
    assert secured == []
    one.secure(3 * MIB, 6 * MIB, CAPACITY, nothing)
    assert secured == [(5 * MIB, MIB)]
    one.secure(32 * MIB, 33 * MIB, CAPACITY, nothing)  # another process was there in between
    assert secured[1:] == [(32 * MIB, MIB)]


def test_a_full_file_system_is_an_error_of_who_needs_the_memory_alone(file, monkeypatch):
    def full(fd: int, start: int, nbytes: int) -> None:
        raise OSError(28, "full")

    one = Securing(file)
    with monkeypatch.context() as now:
        now.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="full"):
            one.secure(0, MIB, CAPACITY, nothing)
    assert held(file) == 0
    monkeypatch.setattr(securing, "fallocate", lambda *args: -1)
    one.secure(0, MIB, CAPACITY, nothing)
    at_rest(one)
    assert held(file) == MIB


def test_a_profiler_keeps_nobody_from_more_memory(file, monkeypatch):
    """Where the kernel gives back a step that a signal meets, one that lasts longer than they are apart never ends."""
    steps, secure = [], os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: steps.append(args[2]) or secure(*args))
    monkeypatch.setattr(securing, "start_thread", lambda *args: False)
    Securing(file).secure(4096, 33 * MIB, CAPACITY, nothing)
    assert held(file) == sum(steps) == 33 * MIB - 4096
    assert max(steps) <= 8 * MIB


def test_no_byte_of_what_lies_ahead_is_written_where_the_file_system_cannot_secure_it(file, monkeypatch):
    """The C library's posix_fallocate would: but the ledger may have given that to another process since."""
    posix: list[str] = []
    one, secure = Securing(file), os.posix_fallocate
    monkeypatch.setattr(
        os, "posix_fallocate", lambda *args: posix.append(threading.current_thread().name) or secure(*args)
    )
    one.secure(0, MIB, CAPACITY, nothing)
    at_rest(one)
    assert held(file) == 5 * MIB
    assert posix == [threading.current_thread().name]


def test_after_its_end_nothing_more_is_secured(file):
    one = Securing(file)
    one.secure(0, MIB, 16 * CAPACITY, lambda start, stop: one.close())
    at_rest(one)
    assert held(file) <= MIB + securing._STEP_NBYTES


def test_a_process_that_is_killed_leaves_nothing_secured_to_the_next_one_that_is_alone(pool):
    """It is killed with pages of 4 KiB in the pool and memory secured ahead of them."""
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from store_client import EmbeddedStore\n"
        "from store_client.testing import SHARD, chain, namespace, put_chain\n"
        f"store = EmbeddedStore(Path(sys.argv[1]), {1024 * MIB})\n"
        "put_chain(store.space(namespace(), SHARD), chain('a', 2))\n"
        "while store._handle._pool.arena._securing._running: time.sleep(0.01)\n"
        "print('ready', flush=True); time.sleep(600)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(pool)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        (arena,) = pool.glob("*/arena")
        before = os.stat(arena).st_blocks * 512
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert before > 64 * MIB, "growth, and what lies ahead of it"
    with EmbeddedStore(pool, 1024 * MIB) as store:
        opened = store._handle._pool
        assert opened is not None
        assert os.stat(arena).st_blocks * 512 == opened.writer.secured(time.monotonic() + 60) * GRANULE == 64 * MIB
        assert store.space(namespace(), SHARD).lookup(chain("a", 2)).pages == 2
        put_chain(store.space(namespace(), SHARD), chain("b", 2))
        assert store.verify().corrupt == 0
