"""Checksums of many pages at once, in a few threads of this process: hashing lets go of the interpreter lock."""

import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import xxhash

from mooncake_connector.log import get_logger, log_once
from store_client.base import Bytes, Digests
from store_client.embedded.faults import CallersOwn

logger = get_logger(__name__)

_MOST_THREADS = 8
"""More wait for memory, or take cores from other ranks of the host."""
_CORES_A_THREAD = 2

T = TypeVar("T")
R = TypeVar("R")

_lock = threading.Lock()
_threads: ThreadPoolExecutor | None = None


def digest(page: Bytes) -> int:
    """XXH3-64 of a page."""
    return xxhash.xxh3_64_intdigest(page.data)


def each(work: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
    """`work` of every item, in order; several threads do it ahead of who takes the results, where there are cores.

    What nobody has begun when the iterator is closed is left undone.
    """
    most = num_threads()
    if most == 1 or len(items) < 2:
        yield from map(work, items)
        return
    try:
        results: Iterator[R] = _started(most).map(work, items)
    except RuntimeError as error:  # also while the interpreter ends
        _tell(error)
        results = map(work, items)
    yield from results


def completed(digests: Digests | None, pages: Sequence[Bytes]) -> list[int]:
    """The digest of each page: those that somebody has taken on the way, and the others, which are taken now."""
    if digests is None:
        return list(each(digest, pages))
    if len(digests) != len(pages):
        raise CallersOwn from ValueError(f"{len(digests)} digests for {len(pages)} pages")
    taken = each(digest, [page for page, one in zip(pages, digests, strict=True) if one is None])
    return [next(taken) if one is None else one for one in digests]


def _tell(error: RuntimeError) -> None:
    log_once("store.thread", "no thread can be started (%s); raise the limit (`ulimit -u`)", error, logger=logger)


def num_threads() -> int:
    """Threads that hash beside each other: one for two cores that this process may use, at most eight."""
    return min(_MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // _CORES_A_THREAD))


def _started(most: int) -> ThreadPoolExecutor:
    global _threads
    with _lock:
        if _threads is None:
            _threads = ThreadPoolExecutor(most, thread_name_prefix="mooncake-connector-hash")
        return _threads


def _after_fork_in_child() -> None:
    """The threads are the parent's, one of which may have held the lock."""
    global _lock, _threads
    _lock, _threads = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork_in_child)
