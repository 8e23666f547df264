"""Checksums of many pages at once, in a few threads of this process: hashing lets go of the interpreter lock."""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from mooncake_connector.log import get_logger, log_once
from store_client.base import Bytes, Digests
from store_client.embedded.faults import CallersOwn

logger = get_logger(__name__)

_MOST_THREADS = 8
"""More wait for memory, or take cores from other ranks of the host."""
_CORES_A_THREAD = 2

_lock = threading.Lock()
_threads: ThreadPoolExecutor | None = None


def digest(page: Bytes) -> int:
    """XXH3-64 of a page."""
    return xxhash.xxh3_64_intdigest(page.data)


def digests_of(pages: Sequence[Bytes]) -> list[int]:
    """Of many pages, by several threads where there are cores."""
    most = num_threads()
    if most == 1 or len(pages) < 2:
        return list(map(digest, pages))
    try:
        return list(_started(most).map(digest, pages))
    except RuntimeError as error:  # also while the interpreter ends
        said = "no thread can be started (%s); raise the limit (`ulimit -u`)"
        log_once("store.thread", said, error, logger=logger)
        return list(map(digest, pages))


def completed(digests: Digests | None, pages: Sequence[Bytes]) -> list[int]:
    """The digest of each page: those that somebody has taken on the way, and the others, which are taken now."""
    if digests is None:
        return digests_of(pages)
    if len(digests) != len(pages):
        raise CallersOwn from ValueError(f"{len(digests)} digests for {len(pages)} pages")
    taken = iter(digests_of([page for page, one in zip(pages, digests, strict=True) if one is None]))
    return [next(taken) if one is None else one for one in digests]


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
