"""What is measured of a tier: bytes a second of the calls that the agent makes, beside something that does the same."""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from store_client.base import Put
from store_client.testing import SHARD, chain
from store_client.tiers.base import SEAL_NBYTES, Sealed, SpaceName, Target, Tier
from store_client.tiers.testing import Memory

DEADLINE_S = 600.0
SPACE = SpaceName(bytes(32), SHARD)


@dataclass(frozen=True, slots=True)
class Scale:
    """Args:
    nbytes: written and read in one round.
    """

    nbytes: int = 1 << 30
    rounds: int = 5
    pages: tuple[int, ...] = (256 << 10, 1 << 20, 4 << 20)


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second of each round, ours beside the other's."""

    what: str
    ours: tuple[float, ...]
    other: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios: what a round's neighbours on the machine do, they do to both."""
        return statistics.median(mine / yours for mine, yours in zip(self.ours, self.other, strict=True))

    def __str__(self) -> str:
        ours, other = (f"{statistics.median(rates) / 1e9:.2f} GB/s" for rates in (self.ours, self.other))
        return f"{self.what}: {ours}, beside {other}: {self.ratio:.2f}"


Measured = Iterator[tuple[str, float]]
"""("write", "read" or a way to do it, bytes a second)."""


def compare(
    title: str, scale: Scale, folder: Path, ours: Callable[[Path, int, int], Measured],
    other: Callable[[Path, int, int], Measured], say: Callable[[str], None] = lambda line: None,
) -> list[Rates]:  # fmt: skip
    """Each page size in rounds, who is first in turn; both are given a folder of their own, the page size, and the
    number of the round."""
    found = []
    for nbytes in scale.pages:
        rates: dict[str, tuple[list[float], list[float]]] = {}
        for number in range(scale.rounds):
            for column in (0, 1) if number % 2 else (1, 0):  # a disk that is fast in bursts is so for both
                measure = other if column else ours
                with scratch(folder) as where:
                    for what, rate in measure(where, nbytes, number):
                        rates.setdefault(what, ([], []))[column].append(rate)
        for what, (mine, theirs) in rates.items():
            found.append(Rates(f"{title}, {what}, pages of {nbytes >> 10} KiB", tuple(mine), tuple(theirs)))
            say(str(found[-1]))
    return found


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    where = Path(tempfile.mkdtemp(prefix="mooncake-connector-bench-", dir=folder))
    try:
        yield where
    finally:
        shutil.rmtree(where, ignore_errors=True)


def tier_rates(tier: Tier, nbytes: int, total: int, seed: int) -> Measured:
    """As the agent does it: batches of `batch_nbytes`, `parallel` of them at once, in memory that is registered."""
    count = total // nbytes
    keys = chain(f"pages {nbytes}", count)
    batch = max(1, tier.batch_nbytes // nbytes)
    memory = Memory((nbytes + 4096) * batch * tier.parallel)
    tier.register(memory.all)
    places = [[memory.page(nbytes) for _ in range(batch)] for _ in range(tier.parallel)]

    def write(number: int, some: Sequence[bytes]) -> None:
        pages = [
            Sealed(key, place, key + bytes(SEAL_NBYTES - 32)) for key, place in zip(some, places[number], strict=False)
        ]
        assert tier.write(SPACE, pages, nbytes=nbytes, deadline_s=DEADLINE_S) == [Put.STORED] * len(some)

    def read(number: int, some: Sequence[bytes]) -> None:
        targets = [Target(key, place) for key, place in zip(some, places[number], strict=False)]
        seals = tier.read(SPACE, targets, nbytes=nbytes, deadline_s=DEADLINE_S)
        assert [seal[:32] for seal in seals if seal] == list(some)

    started_s = time.perf_counter()
    side_by_side(write, keys, batch, tier.parallel)
    tier.tidy(DEADLINE_S)
    yield "write", count * nbytes / (time.perf_counter() - started_s)
    random.Random(seed).shuffle(keys)
    started_s = time.perf_counter()
    side_by_side(read, keys, batch, tier.parallel)
    yield "read", count * nbytes / (time.perf_counter() - started_s)


def side_by_side(work: Callable[[int, Sequence[bytes]], None], keys: Sequence[bytes], batch: int, threads: int) -> None:
    """Each thread takes the next batch until there is none. Raises what one of them raised."""
    batches = iter([keys[first : first + batch] for first in range(0, len(keys), batch)])
    faults: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for some in batches:
                work(number, some)
        except BaseException as error:
            faults.append(error)

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if faults:
        raise faults[0]
