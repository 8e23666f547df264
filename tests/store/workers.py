"""What the processes of the crash and stress tests do; run as `python workers.py ROLE POOL SEED SECONDS`,
or as `python workers.py serve POOL`: then every line "ROLE SEED" on stdin forks a worker and prints its PID.

Every page's bytes follow from its key, so any process can tell a right page from a wrong one.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from store_client import EmbeddedStore, Put, Space, Verify
from store_client.testing import SHARD, chain, namespace, page_bytes, parents_of

SIZES = (4096, 20480, 65536, 100000)
CHAINS = 24
LENGTH = 24


def keys_of(number: int) -> tuple[list[bytes], int]:
    """Keys and page size of a chain."""
    return chain(f"chain {number}", LENGTH), SIZES[number % len(SIZES)]


def space_of(store: EmbeddedStore, nbytes: int) -> Space:
    return store.space(namespace(f"size {nbytes}"), SHARD)


def write_some(store: EmbeddedStore, rng: random.Random) -> int:
    keys, nbytes = keys_of(rng.randrange(CHAINS))
    count = rng.randint(1, LENGTH)
    pages = [page_bytes(key, nbytes) for key in keys[:count]]
    outcome = space_of(store, nbytes).put(keys[:count], pages, parents=parents_of(keys[:count]), deadline_s=5)
    return outcome.count(Put.STORED)


def read_some(store: EmbeddedStore, rng: random.Random) -> int:
    """Pages read; exits with status 3 at the first wrong byte."""
    keys, nbytes = keys_of(rng.randrange(CHAINS))
    space = space_of(store, nbytes)
    present = space.prefix(keys)
    verify = rng.choice(list(Verify))
    out = np.zeros((LENGTH, nbytes), dtype=np.uint8)
    read = space.get(keys[:present], list(out[:present]), nbytes=nbytes, verify=verify)
    for key, page, right in zip(keys, out, read, strict=False):
        if right and not np.array_equal(page, page_bytes(key, nbytes)):
            Path(os.environ["WRONG_BYTES_FILE"]).write_text(key.hex())
            os._exit(3)
    return sum(read)


def evict_some(store: EmbeddedStore, rng: random.Random) -> int:
    """Force eviction with pages that nobody reads again, and remove a chain now and then."""
    keys = [os.urandom(32) for _ in range(8)]
    pages = [page_bytes(key) for key in keys]
    space_of(store, 65536).put(keys, pages, parents=[None] * 8, deadline_s=5)
    if rng.random() < 0.1:
        chained, nbytes = keys_of(rng.randrange(CHAINS))
        space_of(store, nbytes).remove(chained[rng.randrange(LENGTH) :])
    return len(keys)


def mix(store: EmbeddedStore, rng: random.Random) -> int:
    return write_some(store, rng) if rng.random() < 0.5 else read_some(store, rng)


def hold_lock(store: EmbeddedStore, rng: random.Random) -> int:
    """Take the write lock and keep it until killed."""
    pool = store._handle._pool
    assert pool is not None
    with pool.writer.locked(time.monotonic() + 5):
        print("locked", flush=True)
        time.sleep(600)
    return 0


ROLES = {"write": write_some, "read": read_some, "evict": evict_some, "mix": mix, "hold": hold_lock}


def serve(pool: str) -> None:
    """Start workers by fork, a hundred times faster than from scratch; this process opens no pool itself."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        role, seed = line.split()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            main(role, pool, seed, "600")
            os._exit(0)
        print(pid, flush=True)


def main(role: str, pool: str, seed: str, seconds: str) -> None:
    rng = random.Random(int(seed))
    done = 0
    with EmbeddedStore(pool) as store:
        print("ready", flush=True)
        stop = time.monotonic() + float(seconds)
        while time.monotonic() < stop:
            done += ROLES[role](store, rng)
    print(f"done {done}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        main(*sys.argv[1:])
