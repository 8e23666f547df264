"""An event loop in a thread of its own, for tiers whose client speaks asyncio: many requests in flight, one thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import TimeoutError as Late
from typing import Any, TypeVar

from store_client.tiers.base import TierError

T = TypeVar("T")
_GRACE_S = 5.0
"""After its deadline a call's requests are cancelled, which takes no time unless the loop itself hangs."""


class LoopThread:
    """Runs requests, at most `in_flight` of them at a time. Its calls may come from several threads.

    Every call raises TierError "unavailable" once the thread is closed.
    """

    def __init__(self, name: str, in_flight: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(in_flight)
        self._lock = threading.Lock()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def all(self, requests: Iterable[Callable[[], Awaitable[T]]], deadline_s: float) -> list[T | BaseException]:
        """What each request returned or raised, in order; asyncio.TimeoutError for one that took too long. No request
        goes on when this returns."""
        return self._wait(self._gather(list(requests), deadline_s), deadline_s)

    def one(self, request: Callable[[], Awaitable[T]], deadline_s: float) -> T:
        """What the request returns; raises what it raises, asyncio.TimeoutError where it took too long."""
        (result,) = self.all([request], deadline_s)
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left, timeout=_GRACE_S))
        finally:
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T], deadline_s: float) -> T:
        with self._lock:
            if not self._is_open:
                work.close()
                raise TierError("this tier is closed", "unavailable")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(deadline_s + _GRACE_S)
        except Late:
            future.cancel()
            raise TierError("no answer in time, and its requests cannot be cancelled", "timeout") from None

    async def _gather(self, requests: list[Callable[[], Awaitable[T]]], deadline_s: float) -> list[T | BaseException]:
        if not requests:
            return []
        tasks = [asyncio.ensure_future(self._one(request)) for request in requests]
        await asyncio.wait(tasks, timeout=max(0.0, deadline_s))
        late = [task for task in tasks if not task.done()]
        for task in late:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return [asyncio.TimeoutError() if task in late else result for task, result in zip(tasks, results, strict=True)]

    async def _one(self, request: Callable[[], Awaitable[T]]) -> T:
        async with self._slots:
            return await request()
