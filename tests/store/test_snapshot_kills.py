"""kill -9 at any moment of a snapshot or a restore: the former snapshot or the new one, and a sound pool."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from long_form import LONG
from simulated.waiting import wait_for
from store.audit import audit
from store.pools import CAPACITY, space_in
from store.snapshots import held_by, put_some

from store_client import EmbeddedStore
from store_client.snapshot import Snapshot, restore, take_snapshot
from store_client.testing import chain, put_chain

KILLS = 1000 if LONG else 25
SERVER = """
import os, signal, sys
from pathlib import Path
from store_client import EmbeddedStore
from store_client.snapshot import Snapshot, restore, take_snapshot
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
role, pool, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
for line in sys.stdin:
    if os.fork() == 0:
        os.close(0)
        with EmbeddedStore(pool) as store:
            os.write(1, b"%d\\n" % os.getpid())
            while True:
                if role == "snapshot":
                    take_snapshot(store, folder)
                else:
                    with Snapshot(folder) as snapshot:
                        restore(snapshot, store)
                    store.clear()
"""


@contextmanager
def forking(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that has everything imported, and forks one that works for each line."""
    command = [sys.executable, "-c", SERVER, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server
        finally:
            server.kill()


def kill_many(server: subprocess.Popen[str], look: Callable[[], bool]) -> None:
    """Kill one after the other in its work, at random moments, and `look` at what is left.

    It says whether that was the middle of the work. Where it never is, on a busy machine, they are given longer.
    """
    rng = random.Random(1)
    reach_s, in_the_middle, kills = 0.06, 0, 0
    deadline = time.monotonic() + 600
    while kills < KILLS or not in_the_middle:
        assert time.monotonic() < deadline, "none was killed in the middle of its work"
        kill_one(server, rng.uniform(0, reach_s))
        in_the_middle += look()
        kills += 1
        if not in_the_middle and not kills % 10:
            reach_s *= 2


def kill_one(server: subprocess.Popen[str], after_s: float) -> None:
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write("\n")
    server.stdin.flush()
    pid = int(server.stdout.readline())
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)  # ProcessLookupError: it had ended by itself
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_snapshot_leaves_the_former_one_or_itself(pool, tmp_path):
    folder = tmp_path / "snapshot"
    with EmbeddedStore(pool, CAPACITY) as store, EmbeddedStore(pool.with_name("other"), CAPACITY) as other:
        put_some(store)
        right = held_by(store)
        take_snapshot(store, folder)

        def look() -> bool:
            other.clear()
            with Snapshot(folder) as snapshot:
                assert restore(snapshot, other).pages == len(right)
            assert held_by(other).keys() == right.keys()
            return folder.with_name("snapshot.partial").exists()

        with forking("snapshot", pool, folder) as server:
            kill_many(server, look)
        take_snapshot(store, folder)
        assert os.listdir(tmp_path) == ["snapshot"]


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_restore_leaves_a_sound_pool_with_some_of_the_pages(pool, tmp_path):
    folder = tmp_path / "snapshot"
    with EmbeddedStore(pool, CAPACITY) as store:
        put_some(store)
        right = held_by(store)
        take_snapshot(store, folder)
        store.clear()
        made = (pool / "pool.json").stat().st_ino

        def look() -> bool:
            audit(store, idle=False)
            held = held_by(store)
            assert held.keys() <= right.keys()
            keys = chain(os.urandom(8).hex(), 2)
            put_chain(space_in(store, "alive"), keys)
            assert space_in(store, "alive").lookup(keys).pages == 2
            store.clear()
            return 0 < len(held) < len(right)

        with forking("restore", pool, folder) as server:
            kill_many(server, look)
        audit(store)
        with Snapshot(folder) as snapshot:
            assert restore(snapshot, store).pages == len(right)
        assert held_by(store).keys() == right.keys()
        assert (pool / "pool.json").stat().st_ino == made, "no opening had to make the pool anew"
