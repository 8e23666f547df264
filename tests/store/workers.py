"""What the processes of the crash and stress tests do; run as `python workers.py ROLE POOL SEED SECONDS`,
or as `python workers.py serve POOL`: then every line "ROLE SEED" on stdin forks a worker and prints its PID;
or as `python workers.py mirror POOL`: then it follows the pool's changes, and compares on every line on stdin.

Every page's bytes follow from its key, so any process can tell a right page from a wrong one.
"""

import contextlib
import functools
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore, Put, Space
from store_client.base import Bytes, Pieces
from store_client.embedded import putting
from store_client.embedded.arena import spread
from store_client.embedded.policies import POLICIES
from store_client.testing import SHARD, chain, get_pages, namespace, page_bytes, parents_of, put_pages

SIZES = (4096, 20480, 65536, 100000)
CAPACITIES = (2 << 20, 4 << 20, 8 << 20)
PATIENT = 60.0
"""Seconds that anything may take on a machine that is busy with other things."""
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
    outcome = put_pages(space_of(store, nbytes), keys[:count], pages, parents=parents_of(keys[:count]), deadline_s=5)
    return outcome.count(Put.STORED)


def receive_some(store: EmbeddedStore, rng: random.Random) -> int:
    """As `write_some`, a batch at a time; now and then a page does not come."""
    keys, nbytes = keys_of(rng.randrange(CHAINS))
    count = rng.randint(1, LENGTH)
    missing = rng.randrange(2 * LENGTH)

    def fill(places: Sequence[tuple[int, Pieces]]) -> list[int | None]:
        for i, pieces in places:
            spread(page_of(keys[i], nbytes), pieces)
        return [None if i == missing else xxhash.xxh3_64_intdigest(page_of(keys[i], nbytes).data) for i, _ in places]

    space = store.space(namespace(f"size {nbytes}"), SHARD)
    outcome = space.receive(keys[:count], fill, nbytes=nbytes, parents=parents_of(keys[:count]), deadline_s=5)
    return outcome.count(Put.STORED)


def begin_some(store: EmbeddedStore, rng: random.Random) -> int:
    """As `write_some`, by a device that writes as late as it may, and now and then fails; some pages at a time."""
    keys, nbytes = keys_of(rng.randrange(CHAINS))
    count, broken = rng.randint(1, LENGTH), rng.randrange(8 * LENGTH)
    at_a_time = rng.choice([1, 3, 8])
    putting._BATCH_PAGES, putting._BEGUN_NBYTES, putting._BEGUN_SHARE = at_a_time, at_a_time * nbytes, 1
    begun: list[tuple[int, Bytes]] = []

    def fill(i: int, view: Bytes) -> None:
        begun.append((i, view))
        view[:] = 0xEE
        if i == broken:
            raise RuntimeError("broken source")

    def settle(count: int) -> list[int]:
        settled, begun[:count] = begun[:count], []
        for i, view in settled:
            view[:] = page_of(keys[i], nbytes)
        if broken // LENGTH == 1 and settled[0][0] > broken % LENGTH:
            raise RuntimeError("broken device")
        return [xxhash.xxh3_64_intdigest(page_of(keys[i], nbytes).data) for i, _ in settled]

    outcome: list[Put] = []
    with contextlib.suppress(RuntimeError):
        outcome = space_of(store, nbytes).write(
            keys[:count], fill, nbytes=nbytes, parents=parents_of(keys[:count]), deadline_s=5, settle=settle
        )
    if begun:
        report("a save ended before its device did")
    return outcome.count(Put.STORED)


@functools.lru_cache(maxsize=CHAINS * LENGTH)
def page_of(key: bytes, nbytes: int) -> Bytes:
    return page_bytes(key, nbytes)


def read_some(store: EmbeddedStore, rng: random.Random) -> int:
    """Pages read; ends this process at the first wrong byte."""
    keys, nbytes = keys_of(rng.randrange(CHAINS))
    space = space_of(store, nbytes)
    present = space.lookup(keys).pages
    out = np.zeros((LENGTH, nbytes), dtype=np.uint8)
    read = get_pages(space, keys[:present], list(out[:present]), nbytes=nbytes)
    for key, page, right in zip(keys, out, read, strict=False):
        if right and not np.array_equal(page, page_of(key, nbytes)):
            report(f"wrong bytes of {key.hex()}")
    return sum(read)


def evict_some(store: EmbeddedStore, rng: random.Random) -> int:
    """Force eviction with pages that nobody reads again, and remove a chain now and then."""
    keys = [os.urandom(32) for _ in range(8)]
    pages = [page_bytes(key) for key in keys]
    put_pages(space_of(store, 65536), keys, pages, parents=[None] * 8, deadline_s=5)
    if rng.random() < 0.1:
        chained, nbytes = keys_of(rng.randrange(CHAINS))
        space_of(store, nbytes).remove(chained[rng.randrange(LENGTH) :])
    return len(keys)


def mix(store: EmbeddedStore, rng: random.Random) -> int:
    return write_some(store, rng) if rng.random() < 0.5 else read_some(store, rng)


def resize(store: EmbeddedStore, rng: random.Random) -> int:
    """Shrink or grow, while this process has the pool open."""
    with contextlib.suppress(NoRoom), no_room():
        EmbeddedStore(store.path, rng.choice(CAPACITIES), deadline_s=PATIENT).close()
    return mix(store, rng)


def open_again(store: EmbeddedStore, rng: random.Random) -> int:
    """Open the pool once more, in a process of its own that may shrink or grow it; it is killed with this one."""
    child = os.fork()
    if child == 0:
        with reported():
            capacity = rng.choice([None, *CAPACITIES])
            with contextlib.suppress(NoRoom), no_room(), EmbeddedStore(store.path, capacity, deadline_s=PATIENT) as own:
                mix(own, rng)
        os._exit(0)
    expect_success(os.waitpid(child, 0)[1])
    return 1


def expect_success(status: int) -> None:
    """Report a child that a signal ended: by SIGBUS, above all."""
    if status:
        report(f"a child ended with {os.waitstatus_to_exitcode(status)}")


def fork(store: EmbeddedStore, rng: random.Random) -> int:
    """Fork while a thread of this process writes: the child opens the pool itself, reads and writes."""
    writer = threading.Thread(target=write_some, args=(store, random.Random(rng.random())))
    writer.start()
    child = os.fork()
    if child == 0:
        with reported(), EmbeddedStore(store.path, deadline_s=PATIENT) as own:
            mix(own, rng)
        os._exit(0)
    deadline = time.monotonic() + PATIENT
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            report("a forked child hangs")
        time.sleep(0.001)
    expect_success(ended[1])
    writer.join()
    return 1


def turn_clock(store: EmbeddedStore, rng: random.Random) -> int:
    """Go on with all clocks set to another time."""
    for name in ("time", "time_ns", "clock_gettime_ns"):
        original = ORIGINAL_CLOCKS[name]
        shift_s = rng.uniform(-7200, 7200)
        shift = shift_s if name == "time" else int(shift_s * 1e9)
        setattr(time, name, lambda *which, original=original, shift=shift: max(0, original(*which) + shift))
    return mix(store, rng)


def fill_disk(store: EmbeddedStore, rng: random.Random) -> int:
    """Take all that the file system has left, for a moment, or give it back."""
    ballast = store.path.parent / "ballast"
    with contextlib.suppress(OSError):
        if rng.random() < 0.4:
            ballast.unlink()
        else:
            with open(ballast, "ab", buffering=0) as file:
                while file.write(bytes(1 << 18)):
                    pass
    time.sleep(rng.uniform(0, 0.05))
    for _ in range(3):
        space = store.space(namespace(f"many {rng.randrange(300)}"), SHARD)  # the list of namespaces grows as well
        key = os.urandom(32)
        put_pages(space, [key], [page_bytes(key, 4096)], parents=[None], deadline_s=PATIENT)
    return 1


def choose_policy(store: EmbeddedStore, rng: random.Random) -> int:
    """Go on with another eviction policy, for all processes."""
    store.choose_eviction(rng.choice(sorted(POLICIES)), deadline_s=PATIENT)
    return mix(store, rng)


def clear_some(store: EmbeddedStore, rng: random.Random) -> int:
    """Forget all pages of one size, now and then."""
    if rng.random() < 0.1:
        store.clear(namespace(f"size {rng.choice(SIZES)}").digest)
    return write_some(store, rng)


ROLES = {
    "write": write_some, "read": read_some, "evict": evict_some, "mix": mix, "resize": resize,
    "open": open_again, "fork": fork, "clock": turn_clock, "ballast": fill_disk, "clear": clear_some,
    "receive": receive_some, "policy": choose_policy, "begin": begin_some,
}  # fmt: skip
ORIGINAL_CLOCKS = {name: getattr(time, name) for name in ("time", "time_ns", "clock_gettime_ns")}


def report(what: str) -> None:
    """Tell the test what should not be, and end."""
    Path(os.environ["WRONG_BYTES_FILE"]).write_text(what)
    os._exit(3)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    try:
        yield
    except BaseException:
        report(traceback.format_exc())


class NoRoom(Exception):
    """The file system is too full for another capacity."""


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    try:
        yield
    except PoolError as error:
        if "the file system has room for" in str(error):
            raise NoRoom from None
        raise


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
            os.setpgid(0, 0)
            with reported():
                main(role, pool, seed, "600")
            os._exit(0)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        print(pid, flush=True)


def mirror(pool: str) -> None:
    """Know which of the chains' pages are there by following what changes; look at the pool only after a gap."""
    with EmbeddedStore(pool, deadline_s=PATIENT) as store:
        digests = {nbytes: namespace(f"size {nbytes}").digest for nbytes in SIZES}
        names = {(digests[nbytes], key) for keys, nbytes in map(keys_of, range(CHAINS)) for key in keys}

        def look() -> set[tuple[bytes, bytes]]:
            there = set()
            for number in range(CHAINS):
                keys, nbytes = keys_of(number)
                present = space_of(store, nbytes).contains(keys)
                there |= {(digests[nbytes], key) for key, found in zip(keys, present, strict=True) if found}
            return there

        known: set[tuple[bytes, bytes]] = set()
        position, told, gaps = None, 0, 0
        print("ready", flush=True)
        while True:
            asked = bool(select.select([sys.stdin], [], [], 0.0005)[0])
            if asked and not sys.stdin.readline():
                return
            while True:
                answer = store.changes(position, random.randint(1, 200))
                position = answer.position
                if answer.gap:
                    gaps += 1
                    known = look()
                for change in answer.changes:
                    pages = {(change.namespace_digest, key) for key in change.keys} & names
                    known = known | pages if change.stored else known - pages
                    told += len(pages)
                if not answer.changes:
                    break
            if asked:
                print(len(look() - known), len(known - look()), told, gaps, flush=True)


def main(role: str, pool: str, seed: str, seconds: str) -> None:
    rng = random.Random(int(seed))
    done = 0
    with EmbeddedStore(pool, deadline_s=PATIENT) as store:
        print("ready", flush=True)
        stop = time.monotonic() + float(seconds)
        while time.monotonic() < stop:
            done += ROLES[role](store, rng)
    print(f"done {done}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    elif sys.argv[1] == "mirror":
        mirror(sys.argv[2])
    else:
        main(*sys.argv[1:])
