"""kill -9 at any moment loses what was being written, and nothing else."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from store.audit import audit

from store_client import EmbeddedStore, Put
from store_client.embedded.ledger import Reservation
from store_client.testing import SHARD, chain, get_page, namespace, parents_of, put_chain, put_pages

WORKERS = Path(__file__).with_name("workers.py")


def start(role: str, pool: Path, seed: int, seconds: float = 600) -> "subprocess.Popen[str]":
    command = [sys.executable, str(WORKERS), role, str(pool), str(seed), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(process: "subprocess.Popen[str]", word: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == word


@pytest.mark.slow
def test_many_processes_under_eviction_never_read_a_wrong_byte(
    pool: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WRONG_BYTES_FILE", str(tmp_path / "wrong"))
    seconds = float(os.environ.get("MOONCAKE_CONNECTOR_STRESS_S", "20"))
    with EmbeddedStore(pool, 6 << 20) as store:
        running = [start("mix", pool, seed, seconds) for seed in range(6)]
        outputs = [process.communicate()[0] for process in running]
        assert [process.returncode for process in running] == [0] * 6, outputs
        assert all(int(output.split()[-1]) > 0 for output in outputs)
        stats = store.stats()
        assert stats.evicted_pages > 0
        assert stats.corrupt_pages == 0
        audit(store)


def test_a_stopped_lock_holder_stalls_puts_only_until_their_deadline(pool: Path) -> None:
    keys = chain("a", 3)
    with EmbeddedStore(pool, 4 << 20) as store:
        space = store.space(namespace(), SHARD)
        put_chain(space, keys[:2])
        holder = start("hold", pool, 0)
        try:
            wait_for(holder, "ready")
            wait_for(holder, "locked")
            holder.send_signal(signal.SIGSTOP)
            page = get_page(space, keys[0])
            assert page is not None
            assert put_pages(space, keys, [page] * 3, parents=parents_of(keys), deadline_s=0.2) == [Put.FAILED] * 3
            assert store.stats().failures == {"busy": 3}
            assert space.lookup(keys).pages == 2
            assert get_page(space, keys[1]) is not None
        finally:
            holder.kill()
            holder.wait()
        assert put_chain(space, keys) == [Put.PRESENT, Put.PRESENT, Put.STORED]


def test_a_killed_writers_reservation_comes_back(pool: Path) -> None:
    code = (
        "import os, sys\n"
        "from store_client import EmbeddedStore\n"
        "from store_client.testing import *\n"
        "store = EmbeddedStore(sys.argv[1])\n"
        "keys = chain('doomed', 20)\n"
        "def fill(i, view):\n"
        "    view[:] = 7\n"
        "    if i == 10: os.kill(os.getpid(), 9)\n"
        "store.space(namespace(), SHARD).write(keys, fill, nbytes=65536, parents=parents_of(keys), deadline_s=5)\n"
    )
    with EmbeddedStore(pool, 4 << 20) as store:
        process = subprocess.run([sys.executable, "-c", code, str(pool)], check=False)
        assert process.returncode == -signal.SIGKILL
        space = store.space(namespace(), SHARD)
        assert space.lookup(chain("doomed", 20)).pages == 0
        audit(store)
        assert store.stats().reclaimed_nbytes == 20 * 65536


def test_a_redo_record_that_was_not_applied_is_applied_by_the_next_writer(pool: Path) -> None:
    code = (
        "import os, sys\n"
        "from store_client import EmbeddedStore\n"
        "from store_client.embedded.table import Table\n"
        "from store_client.testing import *\n"
        "store = EmbeddedStore(sys.argv[1])\n"
        "Table.apply = lambda *arguments: os.kill(os.getpid(), 9)\n"
        "put_chain(store.space(namespace(), SHARD), chain('a', 3))\n"
    )
    with EmbeddedStore(pool, 4 << 20) as store:
        assert subprocess.run([sys.executable, "-c", code, str(pool)], check=False).returncode == -signal.SIGKILL
        space = store.space(namespace(), SHARD)
        assert space.lookup(chain("a", 3)).pages == 0
        put_chain(space, chain("b", 1))
        assert space.lookup(chain("a", 3)).pages == 3
        assert get_page(space, chain("a", 3)[2]) is not None
        audit(store)


def test_every_reservation_is_found_whatever_its_owners_name(pool: Path) -> None:
    with EmbeddedStore(pool, 4 << 20) as store:
        opened = store._handle._pool
        assert opened is not None
        ledger = opened.writer._ledger
        owners = [bytes([first]) * 16 for first in range(256)]
        none = np.zeros((0, 2), dtype=np.uint32)
        with opened.writer.locked(time.monotonic() + 5):
            with ledger.transaction() as draft:
                for owner in owners:
                    draft.reserve(Reservation(owner, 1, none, none))
            with ledger.peek() as draft:
                assert [reservation.owner for reservation in draft.reservations()] == owners
