"""The disk tier beside fio: the same page size, the same number of reads and writes under way, direct I/O both.

`python -m bench.tiers.disk FOLDER` prints what it measures; the file system of FOLDER is what is measured.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mooncake_connector.config.tiers import DiskTier
from store_client.base import Put
from store_client.testing import SHARD, chain
from store_client.tiers.base import SEAL_NBYTES, Sealed, SpaceName, Target, Tier
from store_client.tiers.disk import Disk
from store_client.tiers.disk.tier import AT_ONCE
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


def measure(folder: Path, scale: Scale, say: Callable[[str], None] = lambda line: None) -> list[Rates]:
    """Writes and reads of each page size. Raises FileNotFoundError where there is no fio."""
    found = []
    for nbytes in scale.pages:
        rates: dict[str, tuple[list[float], list[float]]] = {"write": ([], []), "read": ([], [])}
        for number in range(scale.rounds):
            with scratch(folder) as where:
                for what, rate in fio(where, nbytes, scale.nbytes):
                    rates[what][1].append(rate)
            with scratch(folder) as where:
                disk = Disk(DiskTier(path=where / "disk", capacity=scale.nbytes + (64 << 20)))
                for what, rate in tier_rates(disk, nbytes, scale.nbytes, number):
                    rates[what][0].append(rate)
                disk.close()
        for what, (ours, other) in rates.items():
            found.append(Rates(f"disk, {what}, pages of {nbytes >> 10} KiB", tuple(ours), tuple(other)))
            say(str(found[-1]))
    return found


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    where = Path(tempfile.mkdtemp(prefix="mooncake-connector-bench-", dir=folder))
    try:
        yield where
    finally:
        shutil.rmtree(where, ignore_errors=True)


def fio(where: Path, nbytes: int, total: int) -> Iterator[tuple[str, float]]:
    """Writes a new file in order, as the tier does, with all of it on the disk in the end; then reads it at random."""
    for what, how in (("write", ["--rw=write", "--end_fsync=1"]), ("read", ["--rw=randread"])):
        command = [
            "fio", "--name=pages", f"--filename={where / 'fio'}", f"--bs={nbytes}", f"--iodepth={AT_ONCE}", *how,
            "--ioengine=libaio", "--direct=1", f"--size={total}", "--output-format=json",
        ]  # fmt: skip
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        job = answer["jobs"][0]
        yield what, job[what]["io_bytes"] / (job["job_runtime"] / 1000)


def tier_rates(tier: Tier, nbytes: int, total: int, seed: int) -> Iterator[tuple[str, float]]:
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


if __name__ == "__main__":
    measure(Path(sys.argv[1]), Scale(rounds=int(os.environ.get("ROUNDS", "5"))), print)
