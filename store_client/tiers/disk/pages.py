"""Which pages a disk holds and where, in memory: least recently used first, with the space that is free.

Space of a page that is gone is *waiting*: it is given away only once the index on the disk has forgotten the page
(`forgotten`), and nobody reads it any more.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mooncake_connector.kv.geometry import Shard
from store_client.base import Put
from store_client.embedded.allocator import FreeRuns, Piece, as_runs, without
from store_client.tiers.disk.index import Page, shard_of, space_of
from store_client.tiers.disk.pagefile import granules_of
from store_client.tiers.disk.runs import Place

_MAX_PIECES = 64
"""Of one page; beyond that others are evicted to make larger ones."""


class Pages:
    """Safe to use from any thread.

    Args:
        pages: by name, as the index has them.
        start: first granule that may be used.
        stop: granules that the file has.
    """

    def __init__(self, pages: Mapping[bytes, Page], start: int, stop: int) -> None:
        self._lock = threading.Lock()
        self._pages = OrderedDict(sorted(pages.items(), key=lambda entry: entry[1].last_use))
        taken = as_runs(extent for page in self._pages.values() for extent in page.extents)
        self._free = FreeRuns(without(start, stop, taken))
        self._waiting: list[Piece] = []
        self._waiting_granules = 0
        self._changes: dict[bytes, Page | None] = {}
        self._in_spaces = Counter(space_of(name) for name in self._pages)
        self._uses = max((page.last_use for page in self._pages.values()), default=0)
        self._used: set[bytes] = set()
        self.used_granules = int(taken[:, 1].sum(dtype=np.int64))
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._pages)

    def shards(self, namespace: bytes) -> list[Shard]:
        """Of which it has pages."""
        with self._lock:
            spaces = list(self._in_spaces)
        return [shard_of(space) for space in spaces if space.startswith(namespace)]

    def present(self, names: Sequence[bytes], nbytes: int) -> list[bool]:
        with self._lock:
            found = [self._pages.get(name) for name in names]
        return [page is not None and page.nbytes == nbytes for page in found]

    def hold(self, names: Sequence[bytes], nbytes: int) -> list[Page | None]:
        """The pages, which are used now, and whose space stays theirs until `let_go`."""
        with self._lock:
            held = [self._use(name, nbytes) for name in names]
            for page in held:
                if page is not None:
                    page.readers += 1
        return held

    def let_go(self, held: Iterable[Page | None]) -> None:
        with self._lock:
            for page in held:
                if page is not None:
                    page.readers -= 1
                    if page.gone and not page.readers:
                        self._wait(page)

    def absent(self, names: Sequence[bytes]) -> list[bool]:
        """Which are to be written: not there, and not before in `names`. The others are used now."""
        seen: set[bytes] = set()
        fresh = []
        with self._lock:
            for name in names:
                fresh.append(name not in seen and self._use(name, None) is None)
                seen.add(name)
        return fresh

    def _use(self, name: bytes, nbytes: int | None) -> Page | None:
        page = self._pages.get(name)
        if page is None or nbytes not in (None, page.nbytes):
            return None
        self._uses += 1
        page.last_use = self._uses
        self._pages.move_to_end(name)
        self._used.add(name)
        return page

    def take(self, nbytes: int, count: int) -> list[Place]:
        """Places for up to `count` pages, as many as there is free space for."""
        size = granules_of(nbytes)
        with self._lock:
            places: list[Place] = [((first, size),) for first in self._free.take_whole(count, size)]
            while len(places) < count:
                pieces = self._free.take_pieces(size, _MAX_PIECES)
                if pieces is None:
                    break
                places.append(tuple(pieces))
        return places

    @property
    def free_granules(self) -> int:
        return self._free.total

    def make_room(self, granules: int) -> None:
        """Forget the least recently used pages, until so much space waits to be free, or all who can go are gone."""
        with self._lock:
            going = []
            wanted = granules - self._waiting_granules
            for name, page in self._pages.items():
                if wanted <= 0:
                    break
                if not page.readers:
                    going.append(name)
                    wanted -= page.granules
            for name in going:
                self._forget(name)
            self.evicted += len(going)

    def grown(self, start: int, stop: int) -> None:
        with self._lock:
            self._free.add(as_runs([(start, stop - start)]))

    def give_back(self, places: Iterable[Sequence[Piece]]) -> None:
        """Space that was taken, and in which no page was published."""
        with self._lock:
            self._free.add(as_runs(extent for place in places for extent in place))

    def publish(self, name: bytes, nbytes: int, seal: bytes, place: Place) -> Put:
        """The page is whole where it lies; another thread may have brought it first."""
        with self._lock:
            if name in self._pages:
                self._free.add(as_runs(place))
                return Put.PRESENT
            self._uses += 1
            page = Page(nbytes, seal, place, self._uses)
            self._pages[name] = self._changes[name] = page
            self._in_spaces[space_of(name)] += 1
            self.used_granules += page.granules
        return Put.STORED

    def forget(self, names: Iterable[bytes]) -> int:
        """Return how many of them there were."""
        with self._lock:
            return sum(self._forget(name) for name in names)

    def forget_namespace(self, namespace: bytes | None) -> int:
        with self._lock:
            names = [name for name in self._pages if namespace is None or name.startswith(namespace)]
            return sum(self._forget(name) for name in names)

    def _forget(self, name: bytes) -> bool:
        page = self._pages.pop(name, None)
        if page is None:
            return False
        page.gone = True
        space = space_of(name)
        self._in_spaces[space] -= 1
        if not self._in_spaces[space]:
            del self._in_spaces[space]
        self._changes[name] = None
        self._used.discard(name)
        self.used_granules -= page.granules
        if not page.readers:
            self._wait(page)
        return True

    def _wait(self, page: Page) -> None:
        self._waiting.extend(page.extents)
        self._waiting_granules += page.granules

    def changed(self) -> tuple[dict[bytes, Page | None], list[Piece]]:
        """What the index does not know yet, and the space that is free once it does. Told once."""
        with self._lock:
            changes, waiting = self._changes, self._waiting
            changes.update((name, self._pages[name]) for name in self._used - changes.keys())
            self._changes, self._waiting, self._used = {}, [], set()
            self._waiting_granules = 0
        return changes, waiting

    def untold(self, changes: dict[bytes, Page | None], waiting: Sequence[Piece]) -> None:
        """The index could not be told."""
        with self._lock:
            self._changes = {**changes, **self._changes}
            self._waiting.extend(waiting)
            self._waiting_granules += sum(granules for _, granules in waiting)

    def forgotten(self, waiting: Sequence[Piece]) -> None:
        with self._lock:
            self._free.add(as_runs(waiting))


def check_places(pages: Iterable[Page], start: int, stop: int) -> None:
    """Raises ValueError where two of the pages claim the same granule, or one that is not there."""
    taken = as_runs(extent for page in pages for extent in page.extents)
    order = np.argsort(taken[:, 0], kind="stable")
    first = taken[order, 0].astype(np.int64)
    last = first + taken[order, 1]
    if len(first) and (first[0] < start or last[-1] > stop or (first[1:] < last[:-1]).any() or (last <= first).any()):
        raise ValueError("two pages claim the same place, or one that is not there")
