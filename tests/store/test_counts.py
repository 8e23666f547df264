"""Counts of processes that never write, as vLLM's scheduler, reach whoever asks: alive, closed or killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from store_client import EmbeddedStore, StoreStats
from store_client.testing import SHARD, chain, namespace, put_chain

READER = (
    "import os, sys, signal\n"
    "from store_client import EmbeddedStore\n"
    "from store_client.testing import *\n"
    "store = EmbeddedStore(sys.argv[1])\n"
    "space = store.space(namespace(), SHARD)\n"
    "assert space.lookup(chain('a', 2)).pages == 2\n"
    "space.record_lookup(hit_pages=2, missed_pages=1, page_tokens=64)\n"
    "print('counted', flush=True)\n"
    "sys.stdin.read()\n"
    "if sys.argv[2] == 'killed': os.kill(os.getpid(), signal.SIGKILL)\n"
    "if sys.argv[2] == 'closed': store.close()\n"
    "if sys.argv[2] == 'ended': sys.exit(0)\n"
    "os._exit(0)\n"
)


def hits(stats: StoreStats) -> tuple[int, int, int, int]:
    return stats.hit_pages, stats.missed_pages, stats.hit_tokens, stats.missed_tokens


@pytest.mark.parametrize("end", ["killed", "closed", "ended"])
def test_a_process_that_only_reads_is_counted(pool: Path, end: str) -> None:
    with EmbeddedStore(pool, 4 << 20) as store:
        put_chain(store.space(namespace(), SHARD), chain("a", 2))
        command = [sys.executable, "-c", READER, str(pool), end]
        reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert reader.stdout is not None and reader.stdout.readline() == "counted\n"
        assert hits(store.stats()) == (2, 1, 128, 64), "while it lives"
        reader.communicate()
        assert reader.returncode == (-signal.SIGKILL if end == "killed" else 0)
        assert hits(store.stats()) == (2, 1, 128, 64), "after its end"
    for _ in range(2):  # the first opening takes over what the dead have left
        with EmbeddedStore(pool) as store:
            assert hits(store.stats()) == (2, 1, 128, 64), "in a process that opens the pool later"


def test_counts_of_a_forked_child_are_not_its_parents(pool: Path) -> None:
    with EmbeddedStore(pool, 4 << 20) as store:
        space = store.space(namespace(), SHARD)
        child = os.fork()
        if child == 0:
            space.record_lookup(hit_pages=5, missed_pages=5, page_tokens=1)
            os._exit(0)
        os.waitpid(child, 0)
        space.record_lookup(hit_pages=1, missed_pages=0, page_tokens=1)
        assert hits(store.stats()) == (1, 0, 1, 0)


def test_counts_outlive_the_file_that_they_are_in(pool: Path) -> None:
    with EmbeddedStore(pool, 4 << 20) as store:
        space = store.space(namespace(), SHARD)
        space.record_lookup(hit_pages=1, missed_pages=0, page_tokens=1)
        opened = store._handle._pool
        assert opened is not None
        (file,) = (opened.data / "owners").iterdir()
        file.unlink()
        assert opened._owners.restore()
        space.record_lookup(hit_pages=1, missed_pages=0, page_tokens=1)
        assert hits(store.stats()) == (2, 0, 2, 0)
