"""The feed of changes: a follower hears of what happened, of nothing else, and of a gap where it missed something."""

import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_form import LONG, examples
from simulated.waiting import wait_for
from store.audit import audit
from store.pools import garble, run, space_in
from store.test_kills import CAPACITY, Crew, start_workers

from store_client import EmbeddedStore, Put
from store_client.embedded.faults import Damaged
from store_client.embedded.feed import ENTRY_DTYPE, Feed
from store_client.embedded.row import ROW_DTYPE, ROW_NBYTES
from store_client.testing import SHARD, chain, follow, namespace, put_chain

RING = 16
KILLS = 5000 if LONG else 60
ROLES = ["write", "write", "evict", "mix", "clear", "resize", "open"]


# The ring


class Killed(Exception):
    pass


class Mortal:
    """An array whose writer dies before its n-th store."""

    def __init__(self, array: Any, stores: Iterator[int]) -> None:
        self._array, self._stores = array, stores

    def __getitem__(self, at: Any) -> Any:
        return self._array[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        if next(self._stores, None) is None:
            raise Killed
        self._array[at] = value

    def __len__(self) -> int:
        return len(self._array)


def rows_of(numbers: list[int]) -> Any:
    rows: Any = np.zeros(len(numbers), dtype=ROW_DTYPE)
    rows["space"], rows["nbytes"] = numbers, 4096
    return rows.view(np.uint8).reshape(len(numbers), ROW_NBYTES)


class Ring:
    """A ring, the ledger beside it (number of the last change that is committed), and what is true."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(4096 + RING * ENTRY_DTYPE.itemsize))
        self.path, self.committed = path, 0
        self.log: list[tuple[int, bool]] = []
        self.feed = self.open()

    def open(self) -> Feed:
        return Feed(self.path, 7)

    def change(self, gone: int, stored: int, stores: int) -> None:
        """A transaction of a writer that dies after so many stores; another process goes on."""
        first = random.getrandbits(60)
        pages = list(range(first, first + gone + stored))
        lives = iter(range(stores))
        writer: Any = self.open()
        writer._header, writer._entries = Mortal(writer._header, lives), Mortal(writer._entries, lives)
        try:
            if self.feed.told != self.committed:
                writer.publish(self.committed)
            writer.prepare(self.committed + 1, rows_of(pages[:gone]), rows_of(pages[gone:]))
            self.committed += 1
            self.log += [(page, i >= gone) for i, page in enumerate(pages)]
            writer.publish(self.committed)
        except Killed:
            pass

    def read(self, since: Any, limit: int) -> tuple[list[tuple[int, bool]] | None, Any]:
        entries, position = self.feed.read(since, limit)
        if entries is None:
            return None, position
        return list(zip(entries["space"].tolist(), entries["stored"].astype(bool).tolist(), strict=True)), position


changes = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 12))
reads = st.integers(1, 20)


@settings(max_examples=examples(300))
@given(st.lists(st.one_of(changes, reads), max_size=40))
def test_a_follower_hears_of_every_committed_change_and_no_other_however_writers_die(steps):
    with tempfile.TemporaryDirectory() as folder:
        ring = Ring(Path(folder) / "feed")
        _, position = ring.read(None, 1)
        heard = 0
        for step in steps:
            if isinstance(step, tuple):
                ring.change(*step)
                continue
            told, position = ring.read(position, step)
            if told is None:
                assert len(ring.log) + 8 - heard > RING, "a gap only where the ring, or who writes to it, was faster"
                heard = position[1]
            else:
                assert told == ring.log[heard : heard + len(told)]
                heard += len(told)
        ring.change(0, 0, 99)
        told, _ = ring.read(position, 2 * RING)
        assert told is None or told == ring.log[heard:]


def test_what_was_damaged_in_the_ring_is_a_gap(tmp_path):
    ring = Ring(tmp_path / "feed")
    _, start = ring.read(None, 1)
    ring.change(2, 3, 99)
    told, end = ring.read(start, 9)
    assert told == ring.log
    at = ring.path.stat().st_size - (RING - 2) * ENTRY_DTYPE.itemsize
    garble(ring.path, at, b"\x55")
    assert ring.read(start, 9) == (None, end)
    assert ring.read(start, 2)[0] == ring.log[:2]


@pytest.mark.parametrize("word", [0, 1 << 31, 1 << 63, (1 << 64) - 5])
def test_an_end_that_cannot_be_is_damage(tmp_path, word):
    ring = Ring(tmp_path / "feed")
    ring.change(0, 5, 99)
    garble(ring.path, 0, word.to_bytes(8, "little"))
    with pytest.raises(Damaged, match=f"ends at {word}"):
        ring.change(0, 1, 99)


# The pool


def test_a_position_that_no_answer_had_is_a_gap_and_costs_nobody_the_pool(store, space):
    put_chain(space, chain("a", 2), 64)
    ring, at = store.changes().position
    for wrong in (-1, at + 1, 1 << 80):
        assert store.changes((ring, wrong)).gap
    assert space.contains(chain("a", 2)) == [True, True]
    assert put_chain(space, chain("b", 2), 64) == [Put.STORED] * 2


def test_a_follower_that_was_too_slow_is_told_of_a_gap(store, space):
    start = store.changes().position
    put_chain(space, chain("a", 2), 64)
    assert not store.changes(start).gap
    keys = chain("many", 1024)
    for _ in range(16):
        put_chain(space, keys, 64)
        space.clear()
    answer = store.changes(start)
    assert answer.gap and not answer.changes
    put_chain(space, keys[:1], 64)
    told, _ = follow(store, answer.position)
    assert told == [(True, namespace().digest, SHARD, keys[0])]


def test_another_pool_in_the_same_place_is_a_gap(pool, store, space):
    put_chain(space, chain("a", 2))
    position = store.changes().position
    assert not store.changes(position).gap
    shutil.rmtree(pool)
    wait_for(lambda: store.changes(position).gap)
    wait_for((pool / "pool.json").exists)


@pytest.mark.parametrize("method", ["Table.apply", "Feed.publish"])
def test_a_change_whose_writer_was_killed_right_after_its_commit_is_told(pool, store, space, method):
    code = f"""
        from store_client.embedded.feed import Feed
        from store_client.embedded.table import Table
        {method} = lambda *arguments: os.kill(os.getpid(), 9)
        space.remove(chain('a', 3)[1:])
    """
    keys, other = chain("a", 3), chain("b", 1)
    put_chain(space, keys)
    start = store.changes().position
    assert run(code, pool).returncode == -signal.SIGKILL
    assert follow(store, start)[0] == []
    put_chain(space, other)
    told, _ = follow(store, start)
    digest = namespace().digest
    assert sorted(told[:2]) == sorted((False, digest, SHARD, key) for key in keys[1:])
    assert told[2:] == [(True, digest, SHARD, other[0])]


class Mirror:
    """A process that follows the pool (`workers.mirror`)."""

    def __init__(self, pool: Path) -> None:
        self._process = start_workers("mirror", pool)
        self.line()

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def compare(self) -> dict[str, int]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return dict(zip(("missing", "left", "told", "gaps"), map(int, self.line().split()), strict=True))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.mark.slow
def test_a_follower_mirrors_the_pool_however_its_writers_are_killed(pool, monkeypatch, tmp_path):
    report = tmp_path / "report"
    monkeypatch.setenv("WRONG_BYTES_FILE", str(report))
    rng = random.Random(1)
    with EmbeddedStore(pool, CAPACITY) as store:
        mirror = Mirror(pool)
        seen: dict[str, int] = {}
        try:
            for round_ in range(6):
                crew = Crew(pool, ROLES)
                try:
                    for _ in range(KILLS // 6):
                        time.sleep(rng.uniform(0.0, 0.05))
                        crew.kill(rng.randrange(len(ROLES)))
                finally:
                    crew.stop()
                assert not report.exists(), report.read_text()
                put_chain(space_in(store, "alive"), chain(f"{round_}", 1))  # does what the last kill left
                seen = mirror.compare()
                assert (seen["missing"], seen["left"]) == (0, 0), seen
        finally:
            mirror.end()
        assert seen["told"] > 100 and seen["gaps"] == 1, seen
        audit(store)
