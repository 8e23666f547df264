"""Writes docs/images/top.svg: `mooncake-connector top` on a real pool that processes use, as rich draws it.

`PYTHONPATH=tests .venv/bin/python tests/tools/record_top.py docs/images/top.svg` takes about a minute.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path

from rich.console import Console

from mooncake_connector.cli.top.figures import Figures
from mooncake_connector.cli.top.screen import Screen
from mooncake_connector.cli.top.sources import Sources
from store_client import EmbeddedStore
from store_client.testing import SHARD, chain, namespace, put_chain

WIDTH, RECORDED_S, INTERVAL_S = 100, 45.0, 1.0
CAPACITY, NBYTES, TURNS = 512 << 20, 1 << 20, 12


def use(pool: Path, seed: int) -> None:
    """Conversations that go on, and more of them than the pool has room for."""
    source = random.Random(seed)
    with EmbeddedStore(pool) as store:
        space = store.space(namespace("a model"), SHARD)
        began_s = time.monotonic()
        while time.monotonic() - began_s < RECORDED_S + 60:
            age = int(source.expovariate(1 / 8))
            keys = chain(f"{max(0, int((time.monotonic() - began_s) * 4) - age)}", source.randint(2, TURNS))
            hit = space.lookup(keys).pages
            space.record_lookup(hit_pages=hit, missed_pages=len(keys) - hit, page_tokens=64)
            space.read(keys[:hit], lambda number, view: None, nbytes=NBYTES)
            put_chain(space, keys, NBYTES)
            time.sleep(source.uniform(0.01, 0.12))


def record(pool: Path, to: Path) -> None:
    sources = Sources(pool, [], INTERVAL_S)
    figures = Figures(sources)
    end_s = time.monotonic() + RECORDED_S
    while time.monotonic() < end_s or figures.now().hit_share is None:
        figures.now()
        time.sleep(INTERVAL_S / 5)
    console = Console(width=WIDTH, record=True, file=StringIO(), force_terminal=True, highlight=False)
    for line in Screen(WIDTH).lines(figures.now()):
        console.print(line, soft_wrap=True)
    sources.close()
    to.write_text(console.export_svg(title="mooncake-connector top", unique_id="top"), "utf-8")


def start(pool: Path, number: int) -> subprocess.Popen[bytes]:
    """Under a name without this machine's paths, which is shown."""
    here = Path(__file__)
    command = ["python", here.name, "--use", str(pool), str(number)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, executable=sys.executable, cwd=here.parent, env=env)


def main() -> None:
    if sys.argv[1] == "--use":
        use(Path(sys.argv[2]), int(sys.argv[3]))
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mooncake-") as folder:
        pool = Path(folder) / "pool"
        with EmbeddedStore(pool, CAPACITY):
            users = [start(pool, number) for number in range(2)]
            try:
                record(pool, Path(sys.argv[1]))
            finally:
                for user in users:
                    user.kill()
                    user.wait()


if __name__ == "__main__":
    main()
