"""Marks in the pool's folder: namespaces whose pages the tiers shall forget as well.

A page that was cleared must not come back from a tier, also where no agent runs when it is cleared. So whoever clears
leaves a mark first, a file of the pool's folder, and another one when the pool is clear, for what a tier was given in
between. The agent fetches nothing of a marked namespace, forgets it in the tiers, and takes the marks away. One that
somebody else removes is put back: the agent may end before all tiers have forgotten.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mooncake_connector.log import get_logger, log_once
from store_client.agent.wish import Fetches
from store_client.base import Store
from store_client.embedded.folder import AGENT_MARK
from store_client.embedded.locks import write_file

_AGAIN_S = 30.0

logger = get_logger(__name__)


def mark(pool: Path, namespace: bytes | None) -> None:
    """Leave a mark for a namespace (its digest), or for all. Raises OSError.

    Each is a file of its own, so that none is taken for one that the agent was about to take away.
    """
    whose = "all" if namespace is None else namespace.hex()
    write_file(pool / f"agent.forget.{whose}.{os.urandom(8).hex()}", b"")


def marks(pool: Path) -> dict[str, bytes | None]:
    """The marked namespaces by the mark's file name; None stands for all. Raises OSError."""
    found = [match for name in os.listdir(pool) if (match := AGENT_MARK.fullmatch(name))]
    return {match[0]: None if match[1] == "all" else bytes.fromhex(match[1]) for match in found}


@dataclass(slots=True)
class _Mark:
    namespace: bytes | None
    done: set[str] = field(default_factory=set)
    """Titles of the tiers that have forgotten it since."""
    was_asked: bool = False
    """Whether a fetch may have brought pages of it that the pool has not cleared yet."""


class Forgetting:
    """The agent's part: sees to it that what is marked is forgotten, in a thread, and again until it is.

    Args:
        is_asked: whether pages of a namespace are being fetched now; any, for None.
        is_current: whether `store` is still the pool that the folder has. Where it is not, it has not been cleared and
            may go on giving tiers what was; so the marks are left to the agent of the new one.
    """

    def __init__(
        self,
        pool: Path,
        store: Store,
        fetches: Fetches,
        is_asked: Callable[[bytes | None], bool],
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        self._pool, self._store, self._fetches = pool, store, fetches
        self._is_asked, self._is_current = is_asked, is_current
        self._marks: dict[str, _Mark] = {}
        """By file name."""
        self._files = threading.Lock()
        """So that a mark that is being taken away is not read once more."""
        self._again_s = 0.0
        self._thread: threading.Thread | None = None

    def is_forgotten(self, namespace: bytes) -> bool:
        return bool(self._marks) and any(each.namespace in (None, namespace) for each in list(self._marks.values()))

    def look(self) -> None:
        """Take note of new marks. Does not wait."""
        self._read()
        self._begin()

    def tick(self) -> None:
        """To be called every second or so."""
        self._read()
        if time.monotonic() >= self._again_s:
            self._begin()

    def _read(self) -> None:
        try:
            with self._files:
                found = marks(self._pool)
                if self._is_current():
                    for name in self._marks.keys() - found.keys():
                        self._put_back(name)
                for name, namespace in found.items():
                    if name not in self._marks:
                        self._marks[name] = _Mark(namespace)
                        self._again_s = 0.0
        except OSError as error:
            log_once("agent.forget", "marks in %s cannot be read: %s", self._pool, error, logger=logger)

    def _put_back(self, name: str) -> None:
        """Raises OSError. Whoever deletes the pool may be about to delete the folder, which the mark would hold up."""
        write_file(self._pool / name, b"")
        if not self._is_current():
            (self._pool / name).unlink(missing_ok=True)

    def _begin(self) -> None:
        if self._marks and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="mooncake-connector-forget", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        tried: set[str] = set()
        while new := self._marks.keys() - tried:
            for namespace in sorted({self._marks[name].namespace for name in new}, key=lambda each: each or b""):
                tried |= self._forget(namespace)
            self._read()

    def _forget(self, namespace: bytes | None) -> set[str]:
        """Have the tiers forget it, and take its marks away; those that were there before."""
        seen = {name: each for name, each in list(self._marks.items()) if each.namespace == namespace}
        done = set.intersection(*(each.done for each in seen.values()))
        was_asked = self._is_asked(namespace) or any(each.was_asked for each in seen.values())
        try:
            try:
                self._fetches.clear(namespace, done)
            finally:
                for each in seen.values():
                    each.done, each.was_asked = done, was_asked
                if self._is_current():
                    self._take_away(list(seen)[1:])  # the one that is left stands for all of them
                if was_asked:  # what a fetch from before the mark published since is what the tiers had
                    self._store.clear(namespace)
                    for each in seen.values():
                        each.was_asked = False
            if self._is_current():
                self._take_away(list(seen)[:1])
        except Exception as error:
            self._again_s = time.monotonic() + _AGAIN_S
            said = "pages that were cleared stay in a tier, and are not fetched until they are gone there: %s"
            log_once("agent.forget", said, error, logger=logger)
        return set(seen)

    def _take_away(self, names: Iterable[str]) -> None:
        with self._files:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._pool / name)
                del self._marks[name]
