"""Marks in the pool's folder: namespaces whose pages the tiers shall forget as well.

A page that was cleared must not come back from a tier, also where no agent runs when it is cleared. So whoever clears
leaves a mark first, a file of the pool's folder. The agent fetches nothing of a marked namespace, forgets it in the
tiers, and takes the mark away.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mooncake_connector.log import get_logger, log_once
from store_client.agent.wish import Fetches
from store_client.base import Store
from store_client.embedded.folder import AGENT_MARK
from store_client.embedded.locks import write_file

_AGAIN_S = 30.0

logger = get_logger(__name__)


def mark(pool: Path, namespace: bytes | None) -> None:
    """Leave a mark for a namespace (its digest), or for all. Raises OSError."""
    write_file(_path(pool, namespace), b"")


def marks(pool: Path) -> set[bytes | None]:
    """The marked namespaces; None among them stands for all. Raises OSError."""
    found = [match[1] for name in os.listdir(pool) if (match := AGENT_MARK.fullmatch(name))]
    return {None if name == "all" else bytes.fromhex(name) for name in found}


def unmark(pool: Path, namespace: bytes | None) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_path(pool, namespace))


def _path(pool: Path, namespace: bytes | None) -> Path:
    return pool / f"agent.forget.{'all' if namespace is None else namespace.hex()}"


class Forgetting:
    """The agent's part: sees to it that what is marked is forgotten, in a thread, and again until it is.

    Args:
        is_asked: whether pages of a namespace are being fetched now; any, for None.
    """

    def __init__(self, pool: Path, store: Store, fetches: Fetches, is_asked: Callable[[bytes | None], bool]) -> None:
        self._pool, self._store, self._fetches, self._is_asked = pool, store, fetches, is_asked
        self._marked: set[bytes | None] = set()
        self._again_s = 0.0
        self._thread: threading.Thread | None = None

    def is_forgotten(self, namespace: bytes) -> bool:
        return bool(self._marked) and (None in self._marked or namespace in self._marked)

    def look(self) -> None:
        """Take note of new marks. Does not wait."""
        try:
            self._marked |= marks(self._pool)
        except OSError as error:
            log_once("agent.forget", "marks in %s cannot be read: %s", self._pool, error, logger=logger)
        self._begin()

    def tick(self) -> None:
        """To be called every second or so."""
        if self._marked and time.monotonic() >= self._again_s:
            self._begin()

    def _begin(self) -> None:
        if self._marked and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="mooncake-connector-forget", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        for namespace in sorted(self._marked, key=lambda each: each or b""):
            # What a fetch from before the mark published since is what the tiers had.
            was_asked = self._is_asked(namespace)
            try:
                self._fetches.clear(namespace)
                if was_asked:
                    self._store.clear(namespace)
                unmark(self._pool, namespace)
                self._marked.discard(namespace)
            except Exception as error:
                self._again_s = time.monotonic() + _AGAIN_S
                said = "pages that were cleared stay in a tier, and are not fetched until they are gone there: %s"
                log_once("agent.forget", said, error, logger=logger)
