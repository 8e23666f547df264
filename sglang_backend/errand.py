"""A call that may hang, made so that the caller need not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class GivenUp(Exception):
    """The caller took its memory back."""


class Errand:
    """One call in a thread of its own, which touches the caller's memory only while the caller waits.

    Args:
        call: gets the errand, and moves every page inside `touching_memory`.
    """

    def __init__(self, call: Callable[[Errand], None]) -> None:
        self._call = call
        self._error: Exception | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="mooncake-connector-errand", daemon=True)

    def finish(self, deadline_s: float) -> bool:
        """Make the call; False where it is not over in time. A page that is being moved is waited for: it is a copy.

        Raises what the call raised.
        """
        self._thread.start()
        self._thread.join(deadline_s)
        with self._lock:
            late = self._thread.is_alive()
            self._given_up = True
        if late:
            return False
        if self._error is not None:
            raise self._error
        return True

    @property
    def is_under_way(self) -> bool:
        return self._thread.is_alive()

    @contextmanager
    def touching_memory(self) -> Iterator[None]:
        """Raises GivenUp where the memory is not the errand's any more."""
        with self._lock:
            if self._given_up:
                raise GivenUp
            yield

    def _run(self) -> None:
        try:
            self._call(self)
        except Exception as error:
            self._error = error
