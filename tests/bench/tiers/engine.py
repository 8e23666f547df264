"""What tiers cost the process of an engine: this one, which asks a real agent with a tier on a disk.

`python -m bench.tiers.engine FOLDER` prints what it measures; pool and tier are made in FOLDER.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import load_config
from mooncake_connector.errors import PoolError
from store_client import Put, Space, Store
from store_client.agent.visit import ask_report, ask_to_stop
from store_client.base import Bytes
from store_client.open import open_store
from store_client.testing import SHARD, chain, namespace

_NBYTES = 1 << 20
_CHAIN, _LONG_CHAIN = 16, 64
"""Pages of a prompt."""
_DEADLINE_S = 120.0
_STEP_S = 0.002
"""Between two lookups of a request that waits, as in an engine that has other work."""
_FORGOTTEN_S = 7.0
"""An ask that has just ended serves further lookups for seconds."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Microseconds, but for what is a ratio."""

    page_us: float
    """CPU time of this process for a page that came from the tier: asking, hearing, looking; not reading. Prompts of
    16 pages."""
    here_us: float
    """The same where the pages are in the pool."""
    long_page_us: float
    """Prompts of 64 pages, whose cost for a prompt is spread over more of them."""
    long_here_us: float
    miss: Sequence[float]
    """A lookup of pages that nobody has, each."""
    plain_miss: Sequence[float]
    """The same in a pool without tiers."""
    beside: Sequence[float]
    """A read of a page of 1 MiB while the agent fetches others as fast as it can, each."""
    beside_plain: Sequence[float]
    """The same while a plain program reads and hashes as fast as it can."""
    alone: Sequence[float]


def measure(folder: Path, *, quick: bool = False) -> Figures:
    """Raises BenchError."""
    pages, misses = (32, 50) if quick else (512, 2000)
    with tempfile.TemporaryDirectory(prefix="mooncake-connector-bench-", dir=folder) as name:
        where = Path(name)
        with open_store(_config(where / "plain", pages)) as store:
            plain = _misses(store, misses)
        config = _config(where / "pool", pages, where / "disk")
        try:
            with open_store(config) as store:
                space = _open(store, "pages")
                _until(lambda: _report(where) is not None, "an agent answers")
                keys = chain("pages", pages)
                _put(space, keys)
                _until(lambda: _tier(where, "written_pages") >= pages, "the tier has all pages")
                missed = _misses(store, misses)
                page_us, here_us = _fetched(space, keys, min(_CHAIN, pages))
                long_page_us, long_here_us = _fetched(space, keys, min(_LONG_CHAIN, pages))
                alone, beside, beside_plain = _reads(space, keys, where / "disk" / "pages", turns=1 if quick else 6)
        finally:
            with contextlib.suppress(PoolError):
                ask_to_stop(where / "pool", 30.0)
    return Figures(page_us, here_us, long_page_us, long_here_us, missed, plain, beside, beside_plain, alone)


def _config(pool: Path, pages: int, disk: Path | None = None) -> Config:
    capacity = (2 * pages + 64) * _NBYTES
    tiers = [] if disk is None else [{"kind": "disk", "path": str(disk), "capacity": capacity}]
    return load_config({"pool": str(pool), "capacity": capacity, "tiers": tiers, "agent_idle_s": 30}, {})


def _open(store: Store, name: str) -> Space:
    return store.space(namespace(name), SHARD, _NBYTES)


def _put(space: Space, keys: Sequence[bytes]) -> None:
    source: Bytes = np.arange(_NBYTES // 4, dtype=np.uint32).view(np.uint8)

    def fill(number: int, page: Bytes) -> None:
        page[:] = source

    done = space.write(keys, fill, nbytes=_NBYTES, parents=[None, *keys[:-1]], deadline_s=_DEADLINE_S)
    if done != [Put.STORED] * len(keys):
        raise BenchError("the pool did not take all pages")


def _misses(store: Store, count: int) -> list[float]:
    """Each of a prompt that is new."""
    space, taken = _open(store, "nothing"), []
    for number in range(count):
        keys = chain(f"miss {number}", _CHAIN)
        started_s = time.perf_counter()
        space.prefetch(keys, prefill_tokens_s=1e4)
        found = space.lookup(keys)
        taken.append((time.perf_counter() - started_s) * 1e6)
        if found.pages or found.coming:
            raise BenchError("a page was found that nobody stored")
        if number % 8 == 0:
            time.sleep(_STEP_S)
    return taken


def _fetched(space: Space, keys: Sequence[bytes], length: int) -> tuple[float, float]:
    """Prompts of that many pages one after the other, each until its pages are there, and again; CPU microseconds for
    a page, the pauses aside."""
    _forget(space, keys)
    prompts = [(keys[at : at + length], keys[at - 1] if at else None) for at in range(0, len(keys), length)]

    def ask() -> float:
        began_s, give_up_s, paused_s = time.process_time(), time.monotonic() + _DEADLINE_S, 0.0
        for prompt, parent in prompts:
            space.prefetch(prompt, parent=parent, prefill_tokens_s=1e3)
            while space.lookup(prompt).pages < len(prompt):
                paused_s += _pause()
                if time.monotonic() > give_up_s:
                    raise BenchError(f"a prompt's pages do not land within {_DEADLINE_S:g} s")
            paused_s += _pause()
        return (time.process_time() - began_s - paused_s) / len(keys) * 1e6

    return ask(), ask()


def _pause() -> float:
    """Wait as long as a step takes; the CPU seconds that this takes by itself, more of them beside a busy agent."""
    began_s = time.thread_time()
    time.sleep(_STEP_S)
    return time.thread_time() - began_s


def _reads(space: Space, keys: Sequence[bytes], file: Path, turns: int) -> tuple[list[float], ...]:
    """Reads of pages of another chain: in quiet, while all of `keys` are fetched, and while a program that has nothing
    of ours reads the tier's file; in turns."""
    hot, target = chain("hot", 8), np.zeros(_NBYTES, dtype=np.uint8)
    _put(space, hot)

    def consume(number: int, page: Bytes) -> None:
        target[:] = page

    def read(taken: list[float], until: Callable[[], bool]) -> None:
        number = 0
        while not until():
            started_s = time.perf_counter()
            if not space.read([hot[number % len(hot)]], consume, nbytes=_NBYTES)[0]:
                raise BenchError("a page that was just stored is gone")
            taken.append((time.perf_counter() - started_s) * 1e6)
            number += 1

    def read_for_a_second(taken: list[float]) -> None:
        end_s = time.perf_counter() + 1.0
        read(taken, lambda: time.perf_counter() > end_s)

    alone, beside, beside_plain = list[float](), list[float](), list[float]()
    for _ in range(turns):
        read_for_a_second(alone)
        with _plain_reader(file):
            read_for_a_second(beside_plain)
        _forget(space, keys)
        space.prefetch(keys, prefill_tokens_s=1.0)
        end_s = time.perf_counter() + _DEADLINE_S
        read(beside, lambda end_s=end_s: space.lookup(keys).pages == len(keys) or time.perf_counter() > end_s)
    return alone, beside, beside_plain


@contextlib.contextmanager
def _plain_reader(file: Path) -> Iterator[None]:
    script = Path(__file__).with_name("plain_reader.py")
    with subprocess.Popen([sys.executable, script, file], stdout=subprocess.PIPE, text=True) as reader:
        try:
            assert reader.stdout is not None
            if not reader.stdout.readline():
                raise BenchError(f"{script.name} does not run")
            yield
        finally:
            reader.kill()


def _forget(space: Space, keys: Sequence[bytes]) -> None:
    """In the pool alone."""
    space.remove(keys)
    time.sleep(_FORGOTTEN_S)


def _report(where: Path) -> dict[str, object] | None:
    with contextlib.suppress(PoolError):
        return ask_report(where / "pool")
    return None


def _tier(where: Path, name: str) -> int:
    report = _report(where) or {}
    return sum(tier[name] for tier in report.get("tiers", []))  # type: ignore[attr-defined, misc]


def _until(check: Callable[[], bool], what: str, pause_s: float = 0.05) -> None:
    give_up_s = time.monotonic() + _DEADLINE_S
    while not check():
        if time.monotonic() > give_up_s:
            raise BenchError(f"{what}: not within {_DEADLINE_S:g} s")
        time.sleep(pause_s)


def percentile(taken: Sequence[float], percent: int) -> float:
    return statistics.quantiles(taken, n=100)[percent - 1]


if __name__ == "__main__":
    found = measure(Path(sys.argv[1] if len(sys.argv) > 1 else "/dev/shm"), quick="--quick" in sys.argv)
    for length, page_us, here_us in (
        (_CHAIN, found.page_us, found.here_us), (_LONG_CHAIN, found.long_page_us, found.long_here_us)
    ):  # fmt: skip
        print(f"{length} pages a prompt: {page_us:.1f} us of CPU time for a page that was fetched, {here_us:.1f} here")
    for what in ("plain_miss", "miss", "alone", "beside", "beside_plain"):
        taken = getattr(found, what)
        print(f"{what}: p50 {percentile(taken, 50):.1f} us, p99 {percentile(taken, 99):.1f} us, of {len(taken)}")
