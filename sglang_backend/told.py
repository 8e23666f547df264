"""Lines of requests; of prefill and decode instances they wait for what is said of the transfer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mooncake_connector.misses import Miss
from mooncake_connector.request_line import RequestLine

_MOST_WAITING = 1024
_LATELY = 256


@dataclass(frozen=True, slots=True)
class Told:
    """What became of a request's prompt; `leave` takes line and reasons to where `why --request` finds them."""

    line: RequestLine
    missed: Mapping[Miss, int]
    leave: Callable[[RequestLine, Mapping[Miss, int]], None]

    def say(self) -> None:
        self.line.log()
        self.leave(self.line, self.missed)


class Waiting:
    """By the id of their request. May be used from any thread."""

    def __init__(self) -> None:
        self.is_on = False
        """Whether transfers have lines in this process."""
        self._lock = threading.Lock()
        self._told: dict[str, Told] = {}
        self._lately: deque[int] = deque(maxlen=_LATELY)
        """Hashes of ids, which are as long as clients like."""

    def add(self, told: Told) -> None:
        """Say it with the request's transfer; at once where there are no such lines, or it has ended. Of too many that
        wait the oldest is said by itself."""
        with self._lock:
            said = self._put(told)
        if said is not None:
            said.say()

    def _put(self, told: Told) -> Told | None:
        """What is to be said now."""
        name = told.line.id
        if not self.is_on or hash(name) in self._lately:
            return told
        self._told[name] = told  # in place of what was said of the request before it was retracted, or looked up again
        return self._told.pop(next(iter(self._told))) if len(self._told) > _MOST_WAITING else None

    def take(self, name: str) -> Told | None:
        """What waits for the transfer of this request, which has ended."""
        with self._lock:
            self._lately.append(hash(name))
            return self._told.pop(name, None)

    def forget(self, name: str) -> None:
        """Its transfer ended in vain, and so did the request."""
        with self._lock:
            self._told.pop(name, None)


waiting = Waiting()
"""The storage and the transfer backend of a process know of each other by this alone."""
