"""What a process does with a disk until it is killed, or the disk is: `python disk_worker.py`, then a line of JSON each
on stdin forks a worker and prints its PID; a worker prints to the file that it is given.

Every page's bytes follow from its key and size, so that any process can tell a right page from a wrong one.
"""

import json
import os
import random
import sys
import traceback
from pathlib import Path

from mooncake_connector.config.tiers import DiskTier
from store_client.base import Put
from store_client.testing import SHARD, chain
from store_client.tiers.base import SpaceName, TierError
from store_client.tiers.disk import Disk
from store_client.tiers.testing import DEADLINE_S, Memory, read, write

SIZES = (4096, 20480, 50000, 65536)
CAPACITY = 6 << 20
CHAINS, LENGTH = 24, 48
KEPT = [(chain("kept", 4), SIZES[number]) for number in range(len(SIZES))]
"""Written first, made to last and then read all the time, so never evicted."""


def space_of(nbytes: int) -> SpaceName:
    return SpaceName(nbytes.to_bytes(32, "big"), SHARD)


def chain_of(number: int) -> tuple[list[bytes], int]:
    """Keys and page size."""
    return chain(f"chain {number}", LENGTH), SIZES[number % len(SIZES)]


def open_disk(folder: Path) -> Disk:
    return Disk(DiskTier(path=folder, capacity=CAPACITY))


def work(folder: Path, seed: int, report: Path) -> None:
    """Write, read, remove and flush until the process or the disk ends; `report` says how far it is."""
    rng = random.Random(seed)
    disk = open_disk(folder)
    for keys, nbytes in KEPT:
        write(disk, Memory(2 << 20), space_of(nbytes), keys, nbytes)
    keys, nbytes = chain_of(seed % CHAINS)  # so that there is something to find, however soon the end comes
    write(disk, Memory(8 << 20), space_of(nbytes), keys, nbytes)
    disk.flush()
    report.write_text("kept")
    while True:
        memory = Memory(8 << 20)
        for keys, nbytes in KEPT:
            assert read(disk, memory, space_of(nbytes), keys, nbytes) == [True] * len(keys)
        keys, nbytes = chain_of(rng.randrange(CHAINS))
        keys = keys[: rng.randint(1, LENGTH)]
        if rng.random() < 0.3:
            disk.remove(space_of(nbytes), keys, deadline_s=DEADLINE_S)
        elif rng.random() < 0.3:
            read(disk, memory, space_of(nbytes), keys, nbytes)
        else:
            assert Put.FAILED not in write(disk, memory, space_of(nbytes), keys, nbytes, pieces=rng.randint(1, 3))
        if rng.random() < 0.1:
            disk.flush()


def check(disk: Disk) -> int:
    """Read all there is; any wrong byte is an error. Returns the pages of the chains; those that are kept are there."""
    for keys, nbytes in KEPT:
        assert read(disk, Memory(2 << 20), space_of(nbytes), keys, nbytes) == [True] * len(keys)
    found = 0
    for number in range(CHAINS):
        keys, nbytes = chain_of(number)
        found += sum(read(disk, Memory(8 << 20), space_of(nbytes), keys, nbytes))
    return found


def main() -> None:
    for line in sys.stdin:
        folder, seed, report = json.loads(line)
        pid = os.fork()
        if not pid:
            try:
                work(Path(folder), seed, Path(report))
            except TierError as error:
                Path(report).write_text(f"ended {error.cause}: {error}")
            except BaseException:
                Path(report).write_text(traceback.format_exc())
            os._exit(0)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("over", flush=True)


if __name__ == "__main__":
    main()
