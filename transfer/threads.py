"""Threads for work that may never come to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class DaemonThreads(Executor):
    """A process that ends waits for the threads of a `ThreadPoolExecutor`, and for none of these."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._threads: list[threading.Thread] = []
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._closed = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Raises RuntimeError where no thread can be started, or after `close`. From one thread, which also closes."""
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
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del item, future, call  # they hold a request

    def close(self) -> None:
        """Drop what has not begun; threads end once they are through with what they do."""
        self._closed = True
        with suppress(Empty):
            while (item := self._work.get_nowait()) is not None:
                item[0].cancel()
        for _ in self._threads:
            self._work.put(None)

    def join(self) -> None:
        """Wait for their end, however long that takes."""
        for thread in self._threads:
            thread.join()
