"""kill -9 at any moment loses what was being written, and nothing else."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from lock_holder import stopped_holder
from long_form import LONG
from store.audit import audit
from store.pools import inside, run

from store_client import EmbeddedStore, Put
from store_client.embedded.ledger import Reservation
from store_client.testing import chain, get_page, page_bytes, parents_of, put_chain, put_pages

WORKERS = Path(__file__).with_name("workers.py")


@pytest.mark.slow
@pytest.mark.long
def test_many_processes_under_eviction_never_read_a_wrong_byte(pool, monkeypatch, tmp_path):
    monkeypatch.setenv("WRONG_BYTES_FILE", str(tmp_path / "wrong"))
    seconds = "60" if LONG else "8"
    with EmbeddedStore(pool, 6 << 20) as store:
        commands = [[sys.executable, str(WORKERS), "mix", str(pool), str(seed), seconds] for seed in range(6)]
        workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        outputs = [worker.communicate()[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0] * 6, outputs
        assert all(int(output.split()[-1]) > 0 for output in outputs)
        stats = store.stats()
        assert stats.evicted_pages > 0
        assert stats.corrupt_pages == 0
        audit(store)


def test_a_stopped_lock_holder_stalls_puts_only_until_their_deadline(pool, store, space):
    keys = chain("a", 3)
    put_chain(space, keys[:2])
    with stopped_holder(pool):
        pages = [page_bytes(key) for key in keys]
        assert put_pages(space, keys, pages, parents=parents_of(keys), deadline_s=0.2) == [Put.FAILED] * 3
        assert store.stats().failures == {"busy": 3}
        assert space.lookup(keys).pages == 2
        assert get_page(space, keys[1]) is not None
    assert put_chain(space, keys) == [Put.PRESENT, Put.PRESENT, Put.STORED]


def test_a_killed_writers_reservation_comes_back(pool, store, space):
    keys = chain("doomed", 20)
    code = """
        keys = chain('doomed', 20)
        def fill(i, view):
            view[:] = 7
            if i == 10: os.kill(os.getpid(), 9)
        space.write(keys, fill, nbytes=65536, parents=parents_of(keys), deadline_s=60)
    """
    assert run(code, pool).returncode == -signal.SIGKILL
    assert space.lookup(keys).pages == 0
    audit(store)
    assert store.stats().reclaimed_nbytes == 20 * 65536


def test_a_redo_record_that_was_not_applied_is_applied_by_the_next_writer(pool, space):
    code = """
        from store_client.embedded.table import Table
        Table.apply = lambda *arguments: os.kill(os.getpid(), 9)
        put_chain(space, chain('a', 3))
    """
    assert run(code, pool).returncode == -signal.SIGKILL
    assert space.lookup(chain("a", 3)).pages == 0
    put_chain(space, chain("b", 1))
    assert space.lookup(chain("a", 3)).pages == 3
    assert get_page(space, chain("a", 3)[2]) is not None


def test_every_reservation_is_found_whatever_its_owners_name(pool):
    with EmbeddedStore(pool, 4 << 20) as store:
        writer = inside(store).writer
        owners = [bytes([first]) * 16 for first in range(256)]
        none = np.zeros((0, 2), dtype=np.uint32)
        with writer.locked(time.monotonic() + 60):
            with writer._ledger.transaction() as draft:
                for owner in owners:
                    draft.reserve(Reservation(owner, 1, none, none))
            with writer._ledger.peek() as draft:
                assert [reservation.owner for reservation in draft.reservations()] == owners
