"""What every store of KV pages offers: the two abstract classes and the values that cross them.

A store holds immutable pages by name and may forget any of them at any time. A miss is never an error, and neither
is a fault of the store: both end in recomputation, so the methods of `Space` report what they could do and count why
they could not. Exceptions are for the caller's own mistakes (a key that is not 32 bytes) and for opening a store.
"""

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client.fate import Fate, Known
from store_client.memory_locks import MemoryLocks

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A contiguous one-dimensional uint8 array."""


class Put(enum.Enum):
    """What became of one page of a put."""

    STORED = "stored"
    PRESENT = "present"
    """The store had the page already; its bytes were left alone."""
    FAILED = "failed"
    """The page is not stored; the cause is in `StoreStats.failures`."""


class Lookup(NamedTuple):
    """Which leading pages of a chain a store has."""

    pages: int
    """So many are present now."""
    pending: bool = False
    """More of them may be there soon, so it is worth to ask again. False where all that were asked for are present."""
    coming: int = 0
    """So many more, right behind, are being fetched: who plans a load may count on them, and loads them as they land.
    One that does not land is a page that was lost."""
    wait_s: float = math.inf
    """Where `pending`: it is worth to ask again if that is within so many seconds."""
    unheard: bool = False
    """Whoever may have the next page has not said so in time."""


class Seen(NamedTuple):
    """Which pages may be fetched from elsewhere, wherever they lie in their chain."""

    found: list[bool]
    """For each key whether it can be, as far as is known by now."""
    pending: bool = False
    """More may be known soon, so it is worth to ask again."""
    wait_s: float = math.inf
    """As in `Lookup`."""
    unheard: bool = False
    """As in `Lookup`, of those that were not found."""


@dataclass(frozen=True, slots=True)
class SpaceInfo:
    """What a store holds of one namespace and shard."""

    namespace: Namespace
    shard: Shard
    pages: int
    nbytes: int
    oldest_s: float
    """Seconds since the oldest page was stored; 0 where there is none."""
    idle_s: float
    """Seconds since a page was last read or stored; 0 where there is none."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """State and counters of a store, the counters summed over all processes since it was created."""

    location: str
    capacity_nbytes: int
    used_nbytes: int
    pages: int
    index_nbytes: int
    """Memory taken by everything but the pages, at this pool's full size."""
    max_pages: int
    """Pages that the index has room for."""
    hit_pages: int = 0
    missed_pages: int = 0
    hit_tokens: int = 0
    missed_tokens: int = 0
    read_pages: int = 0
    read_nbytes: int = 0
    stored_pages: int = 0
    stored_nbytes: int = 0
    present_pages: int = 0
    evicted_pages: int = 0
    removed_pages: int = 0
    corrupt_pages: int = 0
    reclaimed_nbytes: int = 0
    """Bytes that dead writers had reserved and that came back."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Operations on a page that failed, by cause ("busy", "full", "no_space", "corrupt", ...)."""
    evicted_ages: tuple[int, ...] = ()
    """Pages that were evicted to make room, by how long they had not been used: within each of `AGES_S` (but not within
    the one before), and longer. Empty where the store does not say."""
    evicted_unused_s: int = 0
    """Seconds for which all of these together had not been used."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of reading every page of a store."""

    pages: int
    nbytes: int
    corrupt: int


Position: TypeAlias = tuple[int, int]
"""A place in a store's feed of changes: taken from one answer and given back for the next, by the same process or by
another one. What is in it is the store's business."""


@dataclass(frozen=True, slots=True)
class Change:
    """Pages of one namespace and shard that were stored, or that are gone: evicted, removed or found corrupt."""

    stored: bool
    namespace_digest: bytes
    shard: Shard
    nbytes: int
    """Of each page."""
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed since a position, in order, and the position to ask from next."""

    changes: tuple[Change, ...]
    position: Position
    gap: bool
    """True where not everything that changed can be told; `changes` is empty then. Whoever looks at the store after
    such an answer, and goes on from its position, misses nothing."""


Progress: TypeAlias = Callable[[int, int], None]
"""Called with (pages done, pages in all)."""

Consume: TypeAlias = Callable[[int, Bytes], None]
Fill: TypeAlias = Callable[[int, Bytes], None]
Digests: TypeAlias = Sequence[int | None]
"""XXH3-64 of pages, None of those that nobody has taken yet."""
Settle: TypeAlias = Callable[[], Digests | None]
"""Waits until all that was begun is over, for who lets a device read or write the views, and returns digests of the
pages if it has them: see `Space.read`."""
SettleFirst: TypeAlias = Callable[[int], Digests | None]
"""As `Settle`, of so many pages that were begun first and are not settled yet: see `Space.write`."""
Pieces: TypeAlias = Sequence[Bytes]
"""The bytes of one page, in order: usually one piece, several where the pool's space is fragmented."""


class Space(ABC):
    """The pages of one namespace and shard.

    Keys are page keys, 32 raw bytes each. Every method may be called from any thread. `nbytes` is the size of a page
    and the same for all keys of a call; a stored page of another size is a miss.
    Raises ValueError for a key that is not 32 bytes or for a buffer of a wrong size, and nothing else of its own.
    """

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        """How many leading pages of `keys` are present, and whether more may come. Never waits and takes no lock.

        A store that first has to ask elsewhere does so in a thread of its own, answers what it knows, pending, and is
        asked again. Who asks may stop at any time and does not say so.
        """

    def prefetch(  # noqa: B027 - a store that has all its pages at hand needs nothing
        self,
        keys: Sequence[bytes],
        *,
        parent: bytes | None = None,
        prefill_tokens_s: float | None = None,
        deadline_s: float = 30.0,
        patient: bool = False,
    ) -> None:
        """Say that these pages of a chain will be looked up: the earlier, the better. Never waits and takes no lock.

        A store that fetches pages from elsewhere begins with it; others do nothing. The answers are those of `lookup`,
        also for a part of the keys. What is present already may be among them.

        Args:
            parent: the key before `keys[0]` in the chain; None where there is none or it is not known.
            prefill_tokens_s: tokens that the caller would compute in a second, so that nothing is fetched that is
                computed sooner; the latest one given serves for lookups as well. None: not known yet.
            deadline_s: after so many seconds the pages are of no use any more.
            patient: from now on lookups are pending until the first word on what was asked for, however long that
                takes, since the caller waits in a thread of its own and has a limit. Else for a moment alone.
        """

    def seek(self, keys: Sequence[bytes], *, prefill_s: float | None = None) -> Seen:
        """Which of these pages can be fetched from elsewhere, present or not. Never waits, and fetches nothing.

        For who needs some of them, no matter which, before it is known what to look up. `prefill_s`: what computing
        takes that the answer may save; None where that is not known. A store that has all its pages at hand knows none.
        """
        return Seen([False] * len(keys))

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether the page is present. Takes no lock and writes nothing."""

    def explain(self, keys: Sequence[bytes]) -> list[Fate]:
        """What became of each page: why it is not there. For people and counters; takes no lock and writes nothing."""
        return [Fate(Known.STORED if present else Known.UNKNOWN) for present in self.contains(keys)]

    @abstractmethod
    def read(self, keys: Sequence[bytes], consume: Consume, *, nbytes: int, settle: Settle | None = None) -> list[bool]:
        """Show the bytes of every present page to `consume(i, view)`, without copying them where possible.

        `view` is a read-only uint8 array of `nbytes` that is valid during the call only. Its checksum was verified
        just before (without `settle`); whether the page stayed in place meanwhile is known only afterwards: what
        `consume` made of page i is right if and only if the returned list has True at i. An exception of `consume`
        passes through.

        With `settle`, `consume` may only begin to read `view`, which stays valid until `settle()` has come to its end,
        with or without an exception: nothing reads any view by then. It is called once after the last page, and also
        where the read ends early, unless no page was shown; its exception passes through. Checksums are verified after
        it, so a page that is shown may be wrong. `settle` may return the XXH3-64 of what was read, as a device takes
        them on the way: one for each page that was shown, in that order, or None for those that are to be taken here,
        by several threads. Another number of them is a ValueError.
        """

    @abstractmethod
    def write(
        self,
        keys: Sequence[bytes],
        fill: Fill,
        *,
        nbytes: int,
        parents: Sequence[bytes | None],
        deadline_s: float,
        settle: SettleFirst | None = None,
    ) -> list[Put]:
        """Store the absent pages; `fill(i, view)` writes all `nbytes` of page i into `view`, which is uint8.

        A page becomes visible only when it is complete. `parents[i]` is the key of the page before it in its chain,
        or None: a page is never evicted before its descendants. `deadline_s` bounds every wait for other processes
        (not the time that `fill` takes); what cannot be stored by then is FAILED. An exception of `fill` passes
        through, and none of the pages of that batch is stored.

        With `settle`, `fill` may only begin to write `view`, as in `read`. Pages are stored a batch at a time, and some
        of the next one may be begun before a batch is settled: `settle(count)` waits until the first `count` pages that
        were begun and are not settled yet are written. It is called once for each batch of which a page was begun, in
        their order, also where something fails in between: when `write` comes to its end, all is written that ever will
        be. An exception of it is one of `fill`. After one of either nothing is stored that was not by then, of no
        batch: a device that fails of one page may have failed of those before. It may return the XXH3-64 of what was
        written, as in `read`, in the order in which these pages were filled.
        """

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget these pages; return how many there were."""

    @abstractmethod
    def clear(self) -> int:
        """Forget all pages of this space; return how many there were."""

    @abstractmethod
    def record_lookup(self, *, hit_pages: int, missed_pages: int, page_tokens: int) -> None:
        """Count the outcome of a request's lookup; shows up in `StoreStats` sooner or later. Never waits."""


class Store(ABC):
    """A set of spaces. Safe to use from any thread.

    What people ask (`namespaces`, `stats`, `clear`, `verify`) raises PoolError where the store gives no answer.
    """

    @abstractmethod
    def space(self, namespace: Namespace, shard: Shard, nbytes: int | None = None) -> Space:
        """The pages of `shard` in `namespace`; nothing is written until the first put.

        `nbytes` is the size of a page. A store that fetches pages from elsewhere does so only where it is given.
        """

    @abstractmethod
    def shards(self, namespace: Namespace) -> list[Shard]:
        """The shards of which pages of `namespace` were ever stored. Cheap: looks at no page and takes no lock."""

    def shards_elsewhere(self, namespace: Namespace) -> list[Shard]:
        """The shards of which pages may be fetched from elsewhere, as far as is known now: a `space` opened with a size
        asks for them. Never waits; a store that has all its pages at hand knows none."""
        return []

    def await_word(self) -> None:  # noqa: B027 - a back end may leave it
        """Wait for what may end a lookup's `pending`, about a millisecond at most. A store that has all its pages at
        hand returns at once."""

    @abstractmethod
    def changes(self, since: Position | None = None, limit: int = 4096) -> Changes:
        """Pages stored and gone since a position, at most `limit`; a gap where `since` is None or too long ago.

        Takes no lock and writes nothing. A page stored is told once it is found, a page gone once it is not. Something
        may be told that had happened when the position was taken, and pages may have changed again since: who acts on
        a change looks at the page first. No change is left out without a gap.
        """

    @abstractmethod
    def namespaces(self) -> list[SpaceInfo]:
        """Every namespace and shard that was ever written."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """State and counters; this process's own counts are included up to now."""

    def take_failures(self) -> Mapping[str, int]:
        """What this process failed to get from behind the store since anybody in it asked last, by cause.

        Never waits, and is cheap enough for every step of an engine. A store that has all its pages at hand has none.
        """
        return {}

    def lock_memory(self, locks: MemoryLocks) -> None:  # noqa: B027 - a store may have its pages elsewhere
        """Have the memory page-locked that views of `Space.read` and `write` lie in, for devices that copy from there.

        Returns at once. A store whose pages lie in this process's memory calls `locks` from a thread of its own, piece
        by piece as it grows, until it is closed and this process has it open no more; views may lie elsewhere at any
        time. A piece is unlocked before its memory is let go, and never in a forked child.
        """

    def note_request(self, name: str, told: bytes) -> None:
        """Keep for people what became of a request, for a while: the latest few hundred, in at most 4,084 bytes each.

        Never waits, and takes no lock. A store that nobody can look into keeps nothing.
        """
        return None

    @abstractmethod
    def clear(self, namespace_digest: bytes | None = None) -> int:
        """Forget all pages, or all of one namespace; return how many there were."""

    @abstractmethod
    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Read every page and hold it against its checksum; pages found corrupt are forgotten."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the store. Afterwards every read is a miss and every put fails. May be called twice."""

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
