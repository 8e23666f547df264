"""One client process of a real Mooncake Store; run as a script by the interpreter that has the wheel.

It imports nothing of this project: that interpreter need not have it. Argument: one JSON object (see `main`).
Roles: ``hold`` owns a segment until its standard input is closed; ``measure`` times calls and writes seconds.
"""

import ctypes
import gc
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from outcome import write_outcome


def main(order: dict[str, Any]) -> None:
    """``order``: role, master (host:port), segment_nbytes, num_pages, page_nbytes, piece_nbytes, prefix_keys,
    rounds, outcome (path of the JSON file to write: seconds by figure, and ``ready`` once that is complete)."""
    store = connect(order)
    seconds: dict[str, Any] = {}
    if order["role"] == "measure":
        for name, value in measure(store, order):
            seconds[name] = value
            write_outcome(order["outcome"], seconds)
    write_outcome(order["outcome"], {**seconds, "ready": True})
    if order["role"] == "hold":
        sys.stdin.read()
    store.close()


def connect(order: dict[str, Any]) -> Any:
    """A client that offers ``segment_nbytes`` to the cluster; 0 makes it a pure client."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    status = store.setup("127.0.0.1", "P2PHANDSHAKE", order["segment_nbytes"], 64 << 20, "tcp", "", order["master"])
    if status != 0:
        raise SystemExit(f"the Mooncake client could not join the master at {order['master']}: status {status}")
    return store


class Buffer:
    """Private memory of ``nbytes``, written once so that it is there, and registered with the store."""

    def __init__(self, store: Any, nbytes: int, content: bytes) -> None:
        self.memory = mmap.mmap(-1, nbytes)
        for start in range(0, nbytes, len(content)):
            self.memory[start : start + len(content)] = content
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        check([store.register_buffer(self.address, nbytes)], [0], "register_buffer")


def measure(store: Any, order: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Best seconds of each figure, as they come."""
    pages, nbytes = order["num_pages"], order["page_nbytes"]
    page = os.urandom(nbytes)
    source = Buffer(store, pages * nbytes, page)
    target = Buffer(store, pages * nbytes, b"\0" * nbytes)
    keys = [f"{number:064x}" for number in range(pages)]
    sizes = [nbytes] * pages
    sources = [source.address + number * nbytes for number in range(pages)]
    targets = [target.address + number * nbytes for number in range(pages)]

    def put() -> None:
        check(store.batch_put_from(keys, sources, sizes), [0] * pages, "batch_put_from")

    def get() -> None:
        check(store.batch_get_into(keys, targets, sizes), sizes, "batch_get_into")

    yield "put", best_seconds(put, order["rounds"], lambda: store.remove_all(True))
    yield "get", best_seconds(get, order["rounds"])
    if target.memory[:nbytes] != page or target.memory[-nbytes:] != page:
        raise SystemExit("the Mooncake Store returned other bytes than were put")
    yield from measure_lookups(store, order)
    yield "get scattered", measure_scattered(store, order, keys, target)


def measure_scattered(store: Any, order: dict[str, Any], keys: list[str], target: Buffer) -> float:
    """Seconds to get all pages into shuffled pieces, in calls of at most 256 pieces: a TCP lane takes 1,024 at most."""
    nbytes, piece = order["page_nbytes"], order["piece_nbytes"]
    pieces = [target.address + start for start in range(0, len(keys) * nbytes, piece)]
    random.Random(0).shuffle(pieces)
    per_page = nbytes // piece
    scattered = [pieces[start : start + per_page] for start in range(0, len(pieces), per_page)]
    batch = max(1, 256 // per_page)

    def get_scattered() -> None:
        for start in range(0, len(keys), batch):
            some = slice(start, start + batch)
            count = len(keys[some])
            got = store.batch_get_into_multi_buffers(keys[some], scattered[some], [[piece] * per_page] * count)
            check(got, [nbytes] * count, "batch_get_into_multi_buffers")

    return best_seconds(get_scattered, order["rounds"])


def measure_lookups(store: Any, order: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Seconds of one ``is_exist`` and of one ``batch_is_exist`` over all prefix keys, all present."""
    keys = [f"lookup-{number:057x}" for number in range(order["prefix_keys"])]
    for key in keys:
        check([store.put(key, b"x" * 64)], [0], "put")
    single = keys[:256]

    def one_by_one() -> None:
        for key in single:
            store.is_exist(key)

    def prefix() -> None:
        check(store.batch_is_exist(keys), [1] * len(keys), "batch_is_exist")

    yield "lookup", best_seconds(one_by_one, order["rounds"]) / len(single)
    yield "prefix lookup", best_seconds(prefix, order["rounds"])


def best_seconds(run: Callable[[], Any], rounds: int, prepare: Callable[[], Any] | None = None) -> float:
    """The same method as `measure.best_seconds`: one run that does not count, then the best of ``rounds``."""
    best = float("inf")
    gc.disable()
    for number in range(rounds + 1):
        if prepare is not None:
            prepare()
        start = time.perf_counter()
        run()
        if number:
            best = min(best, time.perf_counter() - start)
    gc.enable()
    return best


def check(got: list[int], expected: list[int], call: str) -> None:
    """Ends the process where a call did not do all of its work: its time would mean nothing."""
    if list(got) != expected:
        wrong = next(value for value, wanted in zip(got, expected, strict=True) if value != wanted)
        raise SystemExit(f"{call} of the Mooncake Store failed: status {wrong}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
