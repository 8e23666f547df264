"""Threads for work that may never come to its end: a process that ends waits for none of them."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from mooncake_connector.log import log_once

P = ParamSpec("P")
R = TypeVar("R")

_Item = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads(Executor):
    """What a `ThreadPoolExecutor` is, for one thread that submits and shuts down."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._threads: list[threading.Thread] = []
        self._work: SimpleQueue[_Item | None] = SimpleQueue()
        self._closed = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Raises RuntimeError where no thread can be started, or after `shutdown`."""
        if self._closed:
            raise RuntimeError("its threads have ended")
        if len(self._threads) < self._most:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)
        future: Future[R] = Future()
        self._work.put((future, partial(fn, *args, **kwargs)))
        return future

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            _do(*item)
            del item  # it holds a request

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Threads end when all is done, or what is begun; it is waited for however long that takes."""
        self._closed = True
        if cancel_futures:
            with suppress(Empty):
                while (item := self._work.get_nowait()) is not None:
                    item[0].cancel()
        for _ in self._threads:
            self._work.put(None)
        if wait:
            for thread in self._threads:
                thread.join()


def apart(work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Have `work` done by a thread of its own.

    For what takes locks and may be called by the collector of cycles: that works inside whatever it interrupts, which
    may hold one of these locks, and lets go of it only when the collector is through.
    """
    threads = DaemonThreads(1, "mooncake-connector-apart")
    try:
        if sys.is_finalizing():  # before Python 3.12 a thread that begins now never does, and is waited for
            raise RuntimeError
        future = threads.submit(work, *args, **kwargs)
    except RuntimeError:  # none can be started
        future = Future()
        _do(future, partial(work, *args, **kwargs))
    threads.shutdown(wait=False)
    return future


def done_apart(
    work: Callable[[], Any], limit_s: float, cause: str, said: str, logger: logging.Logger, level: int = logging.WARNING
) -> bool:
    """Have `work` done `apart`; whether it ends within `limit_s`. Else it goes on, and `said % limit_s` is logged."""
    if wait([apart(work)], limit_s).not_done:
        log_once(cause, said, limit_s, level=level, logger=logger)
        return False
    return True


def _do(future: Future[R], call: Callable[[], R]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
