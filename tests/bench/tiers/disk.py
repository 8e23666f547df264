"""The disk tier beside fio: the same page size, the same number of reads and writes under way, direct I/O both, and the
same niceness: where other programs use the cores, whoever gives way to them waits for its turn between two requests.

`python -m bench.tiers.disk FOLDER` prints what it measures; the file system of FOLDER is what is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.tiers.measure import Measured, Rates, Scale, compare, tier_rates
from mooncake_connector.config.tiers import DiskTier
from store_client.tiers.disk import Disk
from store_client.tiers.disk.tier import AT_ONCE
from store_client.tiers.workers import NICENESS


def measure(folder: Path, scale: Scale, say: Callable[[str], None] = lambda line: None) -> list[Rates]:
    """Writes and reads of each page size. Raises FileNotFoundError where there is no fio."""
    return compare("disk", scale, folder, partial(ours, scale), partial(fio, scale), say)


def ours(scale: Scale, where: Path, nbytes: int, number: int) -> Measured:
    disk = Disk(DiskTier(path=where / "disk", capacity=scale.nbytes + (64 << 20)))
    yield from tier_rates(disk, nbytes, scale.nbytes, number)
    disk.close()


def fio(scale: Scale, where: Path, nbytes: int, number: int) -> Measured:
    """Writes a new file in order, as the tier does, with all of it on the disk in the end; then reads it at random."""
    for what, how in (("write", ["--rw=write", "--end_fsync=1"]), ("read", ["--rw=randread"])):
        command = [
            "nice", "-n", str(NICENESS), "fio", "--name=pages", f"--filename={where / 'fio'}", f"--bs={nbytes}",
            f"--iodepth={AT_ONCE}", *how, "--ioengine=libaio", "--direct=1", f"--size={scale.nbytes}",
            f"--randseed={number}", "--output-format=json",
        ]  # fmt: skip
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        job = answer["jobs"][0]
        yield what, job[what]["io_bytes"] / (job["job_runtime"] / 1000)


if __name__ == "__main__":
    measure(Path(sys.argv[1]), Scale(), print)
