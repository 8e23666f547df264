"""The folder tier beside plain reads and writes of files of the same size, by as many threads.

`python -m bench.tiers.folder FOLDER` prints what it measures; the file system of FOLDER is what is measured.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from bench.tiers.measure import SPACE, Measured, Rates, Scale, compare, tier_rates
from mooncake_connector.config.tiers import FolderTier
from store_client.tiers.folder import SharedFolder, layout
from store_client.tiers.folder.tier import AT_ONCE
from store_client.tiers.workers import give_way


def measure(folder: Path, scale: Scale, say: Callable[[str], None] = lambda line: None) -> list[Rates]:
    """Writes and reads of each page size; what is read was written before, and so lies in the host's page cache."""
    return compare("folder", scale, folder, partial(ours, scale), partial(plain, scale), say)


def ours(scale: Scale, where: Path, nbytes: int, number: int) -> Measured:
    folder = SharedFolder(FolderTier(path=where))
    pages = layout.space_folder(where, SPACE)
    for fan in range(256):  # as those of the plain files are, and of any folder after a while
        os.makedirs(f"{pages}/{fan:02x}", mode=0o700)
    yield from tier_rates(folder, nbytes, scale.nbytes, number)
    folder.close()


def plain(scale: Scale, where: Path, nbytes: int, number: int) -> Measured:
    """Files that are written, forced to the disk and closed, and read again as a whole, in the same folders: by threads
    that give way to others as those of the tier do, from and into as much memory."""
    files = [where / f"{one % 256:02x}" / str(one) for one in range(scale.nbytes // nbytes)]
    for file in files:
        file.parent.mkdir(exist_ok=True)
    places = SharedFolder.parallel * max(1, SharedFolder.batch_nbytes // nbytes)
    memory = np.full((places, nbytes), 0xA5, dtype=np.uint8)

    def write(one: int) -> None:
        fd = os.open(files[one], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        assert os.pwritev(fd, [memory[one % places].data], 0) == nbytes
        os.fsync(fd)
        os.close(fd)

    def read(one: int) -> None:
        fd = os.open(files[one], os.O_RDONLY)
        assert os.preadv(fd, [memory[one % places].data], 0) == nbytes
        os.close(fd)

    order = list(range(len(files)))
    with ThreadPoolExecutor(AT_ONCE, initializer=give_way) as threads:
        for what, work in (("write", write), ("read", read)):
            started_s = time.perf_counter()
            list(threads.map(work, order))
            yield what, len(files) * nbytes / (time.perf_counter() - started_s)
            random.Random(number).shuffle(order)


if __name__ == "__main__":
    measure(Path(sys.argv[1]), Scale(nbytes=512 << 20), print)
