"""kill -9 at any moment, while everything happens that may, loses nothing but the work of the killed."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from long_form import LONG
from simulated.waiting import wait_for
from store.audit import audit
from store.pools import as_root, mounted, space_in
from store.workers import CAPACITIES, CHAINS, PATIENT, keys_of, page_of, space_of

from store_client import EmbeddedStore, Put
from store_client.embedded import pool_users
from store_client.testing import chain, get_pages, page_bytes, put_chain

WORKERS = Path(__file__).with_name("workers.py")
KILLS = 10_000 if LONG else 300
CAPACITY = max(CAPACITIES)
ROLES = ["write", "receive", "begin", "read", "evict", "mix", "resize", "open", "fork", "clock", "policy"]


def start_workers(*arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, str(WORKERS), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class Crew:
    """Workers forked from a server process that has everything imported; one of each role at a time."""

    def __init__(self, pool: Path, roles: list[str]) -> None:
        self._pool, self._others = pool, len(pool_users(pool) or [])
        self._server = start_workers("serve", pool)
        self._roles, self._seed = roles, 0
        self._running = [self._start(role) for role in roles]

    def _start(self, role: str) -> int:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._seed += 1
        self._server.stdin.write(f"{role} {self._seed}\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def kill(self, number: int) -> None:
        """Kill one, with the children it forked, and start another in its role."""
        os.killpg(self._running[number], signal.SIGKILL)  # ProcessLookupError: the worker had ended by itself
        self._running[number] = self._start(self._roles[number])

    def stop(self) -> None:
        for worker in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker, signal.SIGKILL)
        self._server.kill()
        self._server.wait()
        wait_for(lambda: (users := pool_users(self._pool)) is not None and len(users) <= self._others)


def check_pages(store: EmbeddedStore, chains: Iterable[int]) -> int:
    """Read what there is of what the workers write; returns the pages."""
    read = 0
    for number in chains:
        keys, nbytes = keys_of(number)
        space = space_of(store, nbytes)
        out = np.empty((len(keys), nbytes), dtype=np.uint8)
        for key, page, right in zip(keys, out, get_pages(space, keys, list(out), nbytes=nbytes), strict=True):
            assert not right or np.array_equal(page, page_of(key, nbytes)), key.hex()
            read += right
    return read


def check_a_put(store: EmbeddedStore, number: int, ballast: Path) -> None:
    keys = chain(f"alive {number}", 2)
    space = space_in(store, "alive")
    deadline = time.monotonic() + PATIENT
    while Put.FAILED in put_chain(space, keys):
        # A pool that cannot grow by a page, or in which others hold all there is at the moment, may say so.
        assert time.monotonic() < deadline, store.stats().failures
        ballast.unlink(missing_ok=True)
        time.sleep(0.1)
    out = np.empty((2, 65536), dtype=np.uint8)
    for key, page, right in zip(keys, out, get_pages(space, keys, list(out), nbytes=65536), strict=True):
        assert not right or np.array_equal(page, page_bytes(key))


def kill_at_random(pool: Path, roles: list[str], kills: int, report: Path) -> None:
    rng = random.Random(1)
    ballast = pool.parent / "ballast"
    with EmbeddedStore(pool, CAPACITY) as store:
        made = (pool / "pool.json").stat().st_ino
        crew = Crew(pool, roles)
        pages = 0
        try:
            killed = 0
            while killed < kills:
                time.sleep(rng.uniform(0.0, 0.05))
                for victim in rng.sample(range(len(roles)), rng.randint(1, 4)):
                    crew.kill(victim)
                    killed += 1
                assert not report.exists(), report.read_text()
                audit(store, idle=False)
                check_a_put(store, killed, ballast)
                stats = store.stats()
                assert stats.used_nbytes <= stats.capacity_nbytes in CAPACITIES
                pages += check_pages(store, range(CHAINS) if rng.random() < 0.1 else rng.sample(range(CHAINS), 3))
        finally:
            crew.stop()
        ballast.unlink(missing_ok=True)
        audit(store)
        assert pages > 0, "the checks had something to read"
        assert store.stats().evicted_pages > 0
        assert store.verify().corrupt == store.stats().corrupt_pages == 0
        assert not report.exists(), report.read_text()
    with EmbeddedStore(pool, CAPACITY, deadline_s=PATIENT) as store:
        audit(store)
        check_pages(store, range(CHAINS))
    assert (pool / "pool.json").stat().st_ino == made, "no opening had to make the pool anew"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("disk", ["roomy", pytest.param("full", marks=as_root)])
def test_kills_lose_nothing_but_the_work_of_the_killed(pool, disk, monkeypatch, tmp_path):
    """`full`: the file system holds little more than the pool at its largest, and others take what is left."""
    report = tmp_path / "report"
    monkeypatch.setenv("WRONG_BYTES_FILE", str(report))
    if disk == "roomy":
        kill_at_random(pool, ROLES, KILLS // 2, report)
        return
    with mounted(pool, "size=20m"):
        kill_at_random(pool / "pool", [*ROLES, "ballast"], KILLS // 2, report)
