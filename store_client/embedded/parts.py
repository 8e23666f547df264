"""The files of a data folder, mapped and opened by this process, and let go of in the order that others rely on."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from store_client.embedded.arena import Arena
from store_client.embedded.counters import Counters
from store_client.embedded.feed import Feed
from store_client.embedded.ledger import Ledger
from store_client.embedded.locks import FileLock, Owners
from store_client.embedded.spaces import Spaces
from store_client.embedded.table import Table


@dataclass(frozen=True, slots=True)
class Parts:
    """See the module."""

    data: Path
    ledger: Ledger
    lock: FileLock
    """The pool's write lock."""
    table: Table
    feed: Feed
    arena: Arena
    owners: Owners
    spaces: Spaces
    counters: Counters

    @classmethod
    def open(cls, data: Path, max_pages: int) -> "Parts":
        """Only under the pool's open lock. Raises OSError, lmdb.Error or whatever `faults.DAMAGE` names."""
        with contextlib.ExitStack() as opened:
            ledger = Ledger(data / "ledger", max_pages)
            opened.callback(ledger.close)
            lock = FileLock(data / "table")
            opened.callback(lock.close)
            table, feed = Table(data / "table", max_pages), Feed(data / "feed", int(data.name[:16], 16))
            arena = Arena(data / "arena")
            opened.callback(arena.close)
            owners = Owners(data / "owners")
            opened.pop_all()
        spaces, counters = Spaces(data / "spaces"), Counters(owners.page)
        return cls(data, ledger, lock, table, feed, arena, owners, spaces, counters)

    def close(self, *, settled: bool) -> None:
        """`settled`: nothing of this process is left in the pool; else who finds its owner file takes it over."""
        self.arena.close()  # before others may find themselves alone
        if settled:
            self.owners.leave()
        else:
            self.owners.abandon()
        self.lock.close()
        self.ledger.close()

    def abandon_in_child(self) -> None:
        """After a fork: close what the parent owns without unlocking it."""
        self.owners.abandon_in_child()
        self.counters.abandon_in_child()
        self.lock.abandon_in_child()
        self.arena.abandon_in_child()
