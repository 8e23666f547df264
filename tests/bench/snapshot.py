"""A snapshot and back beside `cp` of the same bytes on the same disk, in turns.

    PYTHONPATH=tests .venv/bin/python -m bench.snapshot [--folder DIR] [--nbytes 1GiB] [--rounds 3]

`cp` reads from shared memory and is followed by `sync` of the file system, since a snapshot is on the disk when it is
done; on the way back both read files that are in no memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from mooncake_connector.sizes import parse_nbytes
from store_client import EmbeddedStore, Put
from store_client.snapshot import Snapshot, restore, take_snapshot
from store_client.testing import SHARD, chain, namespace, put_chain

CHAIN_PAGES = 16


def measure(disk: Path, memory: Path, nbytes: int, page_nbytes: int, rounds: int) -> dict[str, list[float]]:
    """GB/s of each way in each round."""
    figures = defaultdict(list)
    pages = fill(memory / "pool", nbytes, page_nbytes)
    size = pages * page_nbytes
    with EmbeddedStore(memory / "pool") as store:
        take_snapshot(store, memory / "copied")

    def timed(name: str, run: Callable[[], object]) -> None:
        started_s = time.perf_counter()
        run()
        figures[name].append(size / (time.perf_counter() - started_s) / 1e9)

    for _ in range(rounds):
        with EmbeddedStore(memory / "pool") as store:
            timed("snapshot", lambda store=store: take_snapshot(store, disk / "snapshot"))
        timed("cp to the disk", lambda: copy(memory / "copied", disk / "copied", sync=True))
        forget(disk / "snapshot")
        with EmbeddedStore(memory / "restored", size * 5 // 4) as store:
            timed("restore", lambda store=store: restore_all(disk / "snapshot", store, pages))
        shutil.rmtree(memory / "restored")
        forget(disk / "copied")
        timed("cp from the disk", lambda: copy(disk / "copied", memory / "back", sync=False))
        shutil.rmtree(memory / "back")
        shutil.rmtree(disk / "copied")
    return figures


def fill(pool: Path, nbytes: int, page_nbytes: int) -> int:
    """Chains of pages in a new pool; returns the pages."""
    chains = max(1, nbytes // page_nbytes // CHAIN_PAGES)
    with EmbeddedStore(pool, max(8 << 20, chains * CHAIN_PAGES * page_nbytes * 5 // 4)) as store:
        space = store.space(namespace(), SHARD)
        for number in range(chains):
            assert put_chain(space, chain(str(number), CHAIN_PAGES), page_nbytes) == [Put.STORED] * CHAIN_PAGES
    return chains * CHAIN_PAGES


def restore_all(folder: Path, store: EmbeddedStore, pages: int) -> None:
    with Snapshot(folder) as snapshot:
        assert restore(snapshot, store).pages == pages


def copy(source: Path, target: Path, *, sync: bool) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    if sync:
        subprocess.run(["sync", "-f", target], check=True)


def forget(folder: Path) -> None:
    """Have the system drop the files from its memory."""
    for file in folder.iterdir():
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk")
    parser.add_argument("--nbytes", type=parse_nbytes, default=1 << 30)
    parser.add_argument("--page", type=parse_nbytes, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=chosen.folder) as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        figures = measure(Path(disk), Path(memory), chosen.nbytes, chosen.page, chosen.rounds)
    for name, values in figures.items():
        shown = ", ".join(f"{value:.3f}" for value in values)
        print(f"{name:17} {statistics.median(values):7.3f} GB/s  (each round: {shown})")


if __name__ == "__main__":
    main()
