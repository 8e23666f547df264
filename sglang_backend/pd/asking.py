"""Questions to bootstrap servers, in threads that may wait for them.

Requests name these servers, and one that says a byte now and then holds a thread for as long as it likes. So each has
threads of its own, and holds up nobody but who asks there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mooncake_connector.threads import DaemonThreads
from transfer.transports.base import TransferError

_NUM_THREADS = 2
"""For each server."""
_MAX_SERVERS = 64
"""That have never answered; and as many that have."""


@dataclass(slots=True)
class _Server:
    threads: DaemonThreads = field(default_factory=lambda: DaemonThreads(_NUM_THREADS, "mooncake-connector-bootstrap"))
    questions: dict[str, Future[Any]] = field(default_factory=dict)
    """By what they are, those that are not answered, or were just now."""
    has_answered: bool = False
    """Some question with something else than None."""

    def tidy(self) -> None:
        for what, asked in list(self.questions.items()):
            if asked.done():
                self.has_answered |= asked.exception() is None and asked.result() is not None
                del self.questions[what]


class Asking:
    """Used by one thread."""

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}
        """By address; who was asked last is last."""

    def ask(self, address: str, what: str, find: Callable[[], Any]) -> Future[Any]:
        """Have `find` called, which asks the server at `address`; who asks for the same waits with it."""
        server = self._servers.pop(address, None)
        if server is None:
            self._make_room()
            if sum(not one.has_answered for one in self._servers.values()) >= _MAX_SERVERS:
                refused: Future[Any] = Future()
                others = f"{_MAX_SERVERS} others have not answered"
                refused.set_exception(TransferError(f"the bootstrap server at {address} is not asked: {others}"))
                return refused
            server = _Server()
        self._servers[address] = server
        server.tidy()
        if what not in server.questions:
            server.questions[what] = server.threads.submit(find)
        return server.questions[what]

    def _make_room(self) -> None:
        """Forget servers of whom nothing is asked: all that never answered, and of the others the oldest."""
        num_known = 0
        for address, server in reversed(list(self._servers.items())):
            server.tidy()
            num_known += server.has_answered
            if not server.questions and (not server.has_answered or num_known > _MAX_SERVERS):
                server.threads.shutdown(wait=False, cancel_futures=True)
                del self._servers[address]

    def close(self) -> None:
        for server in self._servers.values():
            server.threads.shutdown(wait=False, cancel_futures=True)
