"""The thread that hears from the card what is over, for all queues of a transport."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable

from mooncake_connector.log import get_logger, log_once
from transfer.transports.rdma.card import Card
from transfer.transports.rdma.verbs import Queue

logger = get_logger(__name__)


class Completions:
    """Calls who owns a completion queue when there is something in it."""

    def __init__(self, card: Card) -> None:
        """Raises OSError or RuntimeError where no descriptor or thread is left."""
        self._card = card
        self._channel = card.completion_channel()
        self._lock = threading.Lock()
        """Held while an event is taken, so that no queue goes meanwhile."""
        self._owners: dict[Queue, Callable[[], None]] = {}
        self._closing = False
        os.set_blocking(self._channel.fd, False)  # the event of a queue that has just gone never comes
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            for descriptor in (self._wakeup, self._channel.fd):
                self._epoll.register(descriptor, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name="mooncake-rdma-completions", daemon=True)
            self._thread.start()
        except BaseException:
            self._release()
            raise

    def queue(self, size: int, owner: Callable[[], None]) -> Queue:
        """A completion queue; `owner` is called in this thread, once each time that it asked with `notify`."""
        made = self._card.completion_queue(size, self._channel)
        with self._lock:
            self._owners[made] = owner
        return made

    def remove(self, queue: Queue) -> None:
        """Its owner is not called any more; it may be in a call just now. Raises OSError."""
        with self._lock:
            self._owners.pop(queue, None)
        queue.close()

    def close(self) -> None:
        """All queues must have been removed. Call it once."""
        self._closing = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        self._release()

    def _release(self) -> None:
        os.close(self._wakeup)
        self._epoll.close()
        self._channel.close()

    def _run(self) -> None:
        while not self._closing:
            for descriptor, _ in self._epoll.poll():
                if descriptor == self._wakeup:
                    continue
                try:
                    self._take()
                except Exception as error:  # a defect of ours must not stop the others
                    kind = type(error).__name__
                    log_once(f"transfer.rdma:{kind}", "rdma: completions failed", logger=logger, exc_info=True)

    def _take(self) -> None:
        owner = None
        with self._lock, contextlib.suppress(BlockingIOError):
            queue = self._channel.take()
            owner = None if queue is None else self._owners.get(queue)
        if owner is not None:
            owner()
