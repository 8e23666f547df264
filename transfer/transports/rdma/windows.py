"""Keys that end with an order: memory windows over what its pieces lie in, bound for one queue pair.

A window of type 2B lets the peer of the queue pair by which it was bound read its bytes, nobody else and nothing else,
by a key of its own. The card refuses the key once the window is invalidated, which is before a slice counts as over.
An order has one window for each registered region that its pieces lie in, from the first of these pieces to the end of
the last, or several where that is more than a card binds at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from transfer.transports.base import Region
from transfer.transports.rdma.card import Card, Span
from transfer.transports.rdma.keys import Keys
from transfer.transports.rdma.pair import Pair
from transfer.transports.rdma.queue_pair import Chain
from transfer.transports.rdma.verbs import Queue, Window
from transfer.transports.vectors import Pieces

BATCH = 32
"""Requests for which there is one completion."""
SPIN_S = 100e-6
"""A card needs a few microseconds for a batch."""
LOOK_S = 100e-6
"""How often a slower one is looked at."""
DEADLINE_S = 1.0
"""Something is wrong with a card that needs so long."""


class Windows:
    """Of one queue pair. For one thread at a time, beside which any may unregister memory."""

    def __init__(self, card: Card, pair: Pair, queue: Queue) -> None:
        """`queue` is that of the queue pair, which posts nothing else."""
        self._card, self._pair, self._queue = card, pair, queue
        self._chain = Chain(BATCH, 1)
        self._free: list[Window] = []
        self._bound: dict[Window, Span] = {}
        self._number = 0
        self._why = ""
        """What failed since `drop`."""

    def open(self, pieces: Pieces) -> tuple[list[Window], Keys]:
        """Let the peer read these pieces of registered memory; what lies in none is left out.

        Raises OSError; the queue pair is to begin anew then.
        """
        card = self._card
        with card.window_lock:
            spans = card.spans(pieces)
            windows = [self._taken(span) for span in spans]
            keys = [window.next_key() for window in windows]
            for start in range(0, len(spans), BATCH):
                chain = self._begun()
                batch = slice(start, start + BATCH)
                for window, key, span in zip(windows[batch], keys[batch], spans[batch], strict=True):
                    self._number += 1
                    chain.bind(self._number, window, key, span.registered, span.address, span.nbytes)
                self._post(chain)
                for window, key in zip(windows[batch], keys[batch], strict=True):
                    window.bound(key)
            told = (Region(span.address, span.nbytes) for span in spans)
            return windows, Keys.of(zip(told, keys, strict=True))

    def close(self, windows: Sequence[Window]) -> None:
        """Their keys are refused once this returned. Raises OSError; the queue pair is to begin anew then."""
        with self._card.window_lock:
            ours = [window for window in windows if window in self._bound and not window.is_closed]
            for start in range(0, len(ours), BATCH):
                chain = self._begun()
                for window in ours[start : start + BATCH]:
                    self._number += 1
                    chain.invalidate(self._number, window.key)
                self._post(chain)
            for window in windows:
                span = self._bound.pop(window, None)
                if span is not None and not window.is_closed:  # else its memory was unregistered, and took it along
                    self._card.unbound(window, span)
                    self._free.append(window)

    def drop(self) -> None:
        """All of them, by which nothing can be read any more then. Raises OSError where some are left."""
        with self._card.window_lock:
            try:
                with contextlib.ExitStack() as stack:
                    for window in (*self._bound, *self._free):
                        stack.callback(window.close)
            finally:
                for window in [window for window in self._bound if window.is_closed]:
                    self._card.unbound(window, self._bound.pop(window))
                self._free = [window for window in self._free if not window.is_closed]
            self._why = ""

    def _taken(self, span: Span) -> Window:
        """One to be bound to this."""
        window = self._free.pop() if self._free else self._card.window()
        self._bound[window] = span
        self._card.bound(window, span)
        return window

    def _begun(self) -> Chain:
        self._chain.begin()
        return self._chain

    def _post(self, chain: Chain) -> None:
        """And wait until the card has done it. Raises OSError, and once it did so at once, until `drop`."""
        if self._why:
            raise OSError(self._why)
        try:
            self._pair.post(chain)
            self._wait(self._number - chain.count)
        except OSError as error:
            self._why = str(error)
            raise

    def _wait(self, before: int) -> None:
        """For the last one that was posted. What is told of `before` or earlier is left of what has failed by then."""
        begun = time.perf_counter()
        while True:
            for completion in self._queue.poll(BATCH):
                if completion.wr_id > before and not completion.is_success:
                    raise OSError(f"a memory window: {completion.status_str}")
                if completion.wr_id == self._number:
                    return
            waited_s = time.perf_counter() - begun
            if waited_s >= DEADLINE_S:
                raise OSError(f"a memory window: its card has said nothing for {DEADLINE_S:g} s")
            if waited_s >= SPIN_S:
                time.sleep(LOOK_S)
