"""One thread of the usual weight, for what threads that give way do while others wait for them.

A thread that gives way may be without a processor for a tenth of a second where engines keep all of them busy. What it
holds meanwhile, they wait for. It interrupts nobody either, though.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from store_client.tiers.workers import interrupt_nobody

T = TypeVar("T")


class Clerk:
    """To be made by a thread that does not give way: the clerk inherits its weight."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        threading.Thread(target=self._run, name=f"mooncake-connector-{name}", daemon=True).start()

    def run(self, do: Callable[[], T]) -> T:
        """What `do` returns or raises, in its turn: behind what waits for the lock it waits as long, a deadline of its
        own or not. After `close` the calling thread does it itself."""
        done: Future[T] = Future()
        with self._closing:
            taken = not self._closed
            if taken:
                self._work.put((do, done))  # type: ignore[arg-type]
        try:
            return done.result() if taken else do()
        finally:
            del done  # an exception in it would hold this frame, and so all that `do` holds

    def _run(self) -> None:
        interrupt_nobody()
        while (item := self._work.get()) is not None:
            do, done = item
            try:
                done.set_result(do())
            except BaseException as error:
                done.set_exception(error)
            del item, do, done  # they hold memory of the caller

    def close(self) -> None:
        """The thread ends once what it was given before is done."""
        with self._closing:
            self._closed = True
            self._work.put(None)
