"""One host of many on a shared folder: `python folder_worker.py FOLDER REPORTS`; then each line "SEED" on stdin forks a
host and prints its PID. A host writes, reads, removes and sweeps until it is killed, and counts in REPORTS/SEED. At the
end of stdin this ends once no host is left.
"""

import os
import random
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from mooncake_connector.config.tiers import FolderTier
from store_client.testing import SHARD, chain
from store_client.tiers.base import SpaceName
from store_client.tiers.folder import SharedFolder
from store_client.tiers.testing import DEADLINE_S, Memory, read, write

SIZES = (4096, 50000, 65536)
CAPACITY = 2 << 20
CHAINS, LENGTH = 18, 6


def space_of(nbytes: int) -> SpaceName:
    return SpaceName(nbytes.to_bytes(32, "big"), SHARD)


def chain_of(number: int) -> tuple[list[bytes], int]:
    """Keys and page size."""
    return chain(f"chain {number}", LENGTH), SIZES[number % len(SIZES)]


def open_folder(path: Path) -> SharedFolder:
    return SharedFolder(FolderTier(path=path, capacity=CAPACITY))


def live(path: Path, seed: int, report: Path) -> None:
    rng = random.Random(seed)
    if seed % 2:  # this host's clock is wrong
        time.time = lambda: rng.uniform(0, 4e9)
    folder = open_folder(path)
    rounds = hits = 0
    while True:
        memory = Memory(1 << 20)
        keys, nbytes = chain_of(rng.randrange(CHAINS))
        keys = keys[: rng.randint(1, LENGTH)]
        choice = rng.random()
        if choice < 0.5:
            write(folder, memory, space_of(nbytes), keys, nbytes, pieces=rng.randint(1, 3))
        elif choice < 0.85:
            hits += sum(read(folder, memory, space_of(nbytes), keys, nbytes))
        elif choice < 0.9:
            folder.remove(space_of(nbytes), keys[:1], deadline_s=DEADLINE_S)
        elif choice < 0.91:
            folder.clear(space_of(nbytes).namespace, deadline_s=DEADLINE_S)
        else:
            folder.tidy(DEADLINE_S)
        rounds += 1
        report.write_text(f"{rounds} {hits} {folder.stats().evicted_pages}")


def main() -> None:
    path, reports = map(Path, sys.argv[1:])
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            try:
                live(path, int(line), reports / line.strip())
            except BaseException:
                (reports / "wrong").write_text(traceback.format_exc())
            os._exit(0)
        print(pid, flush=True)
    with suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    main()
