"""What a client may read from and write to: registered memory, and a side of its own for seals and what is not.

Mooncake moves bytes of registered memory only, and a range may be registered once. So what has grown is registered
from where it ended, and a piece that lies in two registered ranges is two buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from mooncake_connector.log import get_logger, log_once
from store_client.base import Bytes
from store_client.tiers.base import SEAL_NBYTES, Pieces

MAX_BUFFERS = 64
"""In one call of the library. Where a node hangs they time out 8 at a time (its lanes), after up to 3 s and one more to
connect anew: before 60 s, when the library returns although a transfer may still write to memory. So more calls at once
are smaller ones."""
_MAX_PIECES = 16
"""Of one page; with more it goes through the side."""

_log = get_logger(__name__)


class Range(NamedTuple):
    """Memory, by its addresses."""

    start: int
    stop: int

    @classmethod
    def of(cls, memory: Bytes) -> Range:
        start = memory.__array_interface__["data"][0]  # a fifth of the time of `ctypes.data`
        return cls(start, start + len(memory))


class Registered:
    """Ranges that are registered with the client in use, and those that are to be with the next one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[tuple[Range, Bytes]] = []  # the array keeps its memory mapped
        self._done: list[Range] = []
        self._client: Any = None

    def add(self, memory: Bytes) -> None:
        """Register it now, if there is a client, and with every later one."""
        with self._lock:
            start, stop = Range.of(memory)
            while (
                known := next((one.stop for one, _ in self._wanted if one.start <= start < one.stop), None)
            ) is not None:
                start = known
            if start < stop:
                self._wanted.append((Range(start, stop), memory))
                self._register(Range(start, stop))

    def remove(self, memory: Bytes) -> None:
        with self._lock:
            whole = Range.of(memory)
            self._wanted = [(found, held) for found, held in self._wanted if found != whole]
            if whole in self._done:
                self._done.remove(whole)
                self._client.unregister_buffer(whole.start)

    def attach(self, client: Any) -> None:
        """Register everything with a new client; None where there is none any more."""
        with self._lock:
            self._client, self._done = client, []
            for wanted, _ in self._wanted:
                self._register(wanted)

    def buffers(self, pieces: Pieces) -> list[Range] | None:
        """The registered ranges that make up the pieces; None where some of it is not registered."""
        done, found = self._done, list[Range]()
        for piece in pieces:
            at, stop = Range.of(piece)
            while at < stop:
                end = next((one.stop for one in done if one.start <= at < one.stop), None)
                if end is None:
                    return None
                found.append(Range(at, min(end, stop)))
                at = found[-1].stop
        return found

    def _register(self, wanted: Range) -> None:
        if self._client is None:
            return
        status = self._client.register_buffer(wanted.start, wanted.stop - wanted.start)
        if status == 0:
            self._done = [*self._done, wanted]
            return
        log_once(
            "tiers.mooncake.register",
            "the Mooncake client does not register %d bytes (status %s): their pages are copied once more on the way; "
            "with RDMA raise the limit of locked memory (ulimit -l)",
            wanted.stop - wanted.start, status, logger=_log,
        )  # fmt: skip


class Side:
    """Registered memory of one call: a seal for each buffer, and pages whose own memory is not registered."""

    def __init__(self, registered: Registered) -> None:
        self._registered = registered
        self.seals: Bytes = np.zeros(MAX_BUFFERS * SEAL_NBYTES, dtype=np.uint8)
        self._start = Range.of(self.seals).start
        self._pages: Bytes = np.zeros(0, dtype=np.uint8)
        registered.add(self.seals)

    def seal(self, number: int) -> Bytes:
        return self.seals[number * SEAL_NBYTES : (number + 1) * SEAL_NBYTES]

    def seal_range(self, number: int) -> Range:
        return Range(self._start + number * SEAL_NBYTES, self._start + (number + 1) * SEAL_NBYTES)

    def pages(self, nbytes: int) -> Bytes:
        """Room for so much; what was there before is gone."""
        if len(self._pages) < nbytes:
            if len(self._pages):
                self._registered.remove(self._pages)
            self._pages = np.zeros(nbytes, dtype=np.uint8)
            self._registered.add(self._pages)
        return self._pages[:nbytes]


class Sides:
    """As many sides as there were calls at once."""

    def __init__(self, registered: Registered) -> None:
        self._registered, self._free, self._lock = registered, list[Side](), threading.Lock()

    @contextmanager
    def one(self) -> Iterator[Side]:
        with self._lock:
            side = self._free.pop() if self._free else None
        side = side or Side(self._registered)
        try:
            yield side
        finally:
            with self._lock:
                self._free.append(side)


class Place(NamedTuple):
    """Where the bytes of one page are to go or to come from."""

    number: int
    """Of the page in its call."""
    pieces: Pieces
    buffers: Sequence[Range]
    """Empty where they go through the side."""


def groups(
    registered: Registered, pages: Sequence[tuple[int, Pieces]], nbytes: int, limit_nbytes: int
) -> Iterator[list[Place]]:
    """Pages in order, in as many calls as it takes."""
    group, buffers = list[Place](), 0
    for number, pieces in pages:
        found = registered.buffers(pieces)
        place = Place(number, pieces, found if found and len(found) <= _MAX_PIECES else ())
        needed = 1 + (len(place.buffers) or 1)
        if group and (buffers + needed > MAX_BUFFERS or (len(group) + 1) * nbytes > limit_nbytes):
            yield group
            group, buffers = [], 0
        group.append(place)
        buffers += needed
    if group:
        yield group
