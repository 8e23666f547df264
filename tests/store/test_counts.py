"""Counts of processes that never write, as vLLM's scheduler, reach whoever asks: alive, closed or killed."""

import os
import signal

import pytest
from store.pools import inside, running, space_in

from store_client import EmbeddedStore
from store_client.testing import chain, put_chain

READER = """
assert space.lookup(chain('a', 2)).pages == 2
space.record_lookup(hit_pages=2, missed_pages=1, page_tokens=64)
print('counted', flush=True)
sys.stdin.read()
if sys.argv[2] == 'killed': os.kill(os.getpid(), 9)
if sys.argv[2] == 'closed': store.close()
if sys.argv[2] == 'ended': sys.exit(0)
os._exit(0)
"""


def hits(store):
    stats = store.stats()
    return stats.hit_pages, stats.missed_pages, stats.hit_tokens, stats.missed_tokens


@pytest.mark.parametrize("end", ["killed", "closed", "ended"])
def test_a_process_that_only_reads_is_counted(pool, end):
    with EmbeddedStore(pool, 4 << 20) as store:
        put_chain(space_in(store), chain("a", 2))
        with running(READER, pool, end) as reader:
            assert hits(store) == (2, 1, 128, 64), "while it lives"
            reader.communicate()
        assert reader.returncode == (-signal.SIGKILL if end == "killed" else 0)
        assert hits(store) == (2, 1, 128, 64), "after its end"
    for _ in range(2):  # the first opening takes over what the dead have left
        with EmbeddedStore(pool) as store:
            assert hits(store) == (2, 1, 128, 64), "in a process that opens the pool later"


def test_counts_of_a_forked_child_are_not_its_parents(store, space):
    child = os.fork()
    if child == 0:
        space.record_lookup(hit_pages=5, missed_pages=5, page_tokens=1)
        os._exit(0)
    os.waitpid(child, 0)
    space.record_lookup(hit_pages=1, missed_pages=0, page_tokens=1)
    assert hits(store) == (1, 0, 1, 0)


def test_counts_outlive_the_file_that_they_are_in(store, space):
    space.record_lookup(hit_pages=1, missed_pages=0, page_tokens=1)
    opened = inside(store)
    (file,) = (opened.data / "owners").iterdir()
    file.unlink()
    assert opened._owners.restore()
    space.record_lookup(hit_pages=1, missed_pages=0, page_tokens=1)
    assert hits(store) == (2, 0, 2, 0)
