"""What is deleted from an object store, and when: by age, by size, by namespace, down to a capacity.

Any number of hosts may do it at once, without a lock and without trust in their clocks: ages are by the store's own
clock, who comes second deletes what is gone already, and `swept` tells when somebody last looked at everything, so that
a hundred agents do not list the bucket a hundred times.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mooncake_connector.log import get_logger, log_once
from store_client.tiers.base import Purged, TierError
from store_client.tiers.object.client import Bucket
from store_client.tiers.object.names import CLOCK, FOLDER, SWEPT, of_namespace, read_name

_logger = get_logger(__name__)

_DAY_S = 86400.0
_MINUTE_S = 60
_LEAVE_TENTHS = 9
"""Of the capacity: a sweep that finds more than the capacity deletes down to this."""


class _Object(NamedTuple):
    """A page that was listed."""

    path: str
    nbytes: int
    """Of the object: page and seal."""
    page_nbytes: int
    written_s: float
    """By the store's clock, seconds since 1970."""


class Retention:
    """Deletes pages of a bucket. `tidy` may be called from any thread, one at a time does something.

    Args:
        capacity_nbytes: of all pages, their seals included; what was written first goes first.
        keep_days: pages written longer ago go.
    """

    every_s = 3600.0
    """The whole bucket is looked at about once in this time, whatever the number of hosts."""

    def __init__(self, bucket: Bucket, capacity_nbytes: int | None, keep_days: float | None) -> None:
        self._bucket, self.capacity_nbytes = bucket, capacity_nbytes
        self._keep_s = None if keep_days is None else keep_days * _DAY_S
        self.counted: Purged | None = None
        """Pages and bytes that the last sweep of this process left."""
        self.evicted_pages = 0
        self._busy = threading.Lock()
        self._sweep: Iterator[None] | None = None
        self._end_s = 0.0
        self._next_s = 0.0

    def purge(
        self, namespace: bytes | None, older_than_s: float | None, larger_than_nbytes: int | None, deadline_s: float
    ) -> Purged:
        """Delete the pages that all given conditions apply to. Raises TierError "timeout" for what is left by then."""
        end_s = time.monotonic() + deadline_s
        before_s = None if older_than_s is None else self._now_s(deadline_s) - older_than_s
        done = Purged(0, 0)
        try:
            for found in self._listed(of_namespace(namespace), lambda: end_s - time.monotonic()):
                going = [
                    page
                    for page in found
                    if (before_s is None or page.written_s < before_s)
                    and (larger_than_nbytes is None or page.page_nbytes > larger_than_nbytes)
                ]
                if going:
                    pages = self._bucket.delete([page.path for page in going], end_s - time.monotonic())
                    done = Purged(done.pages + pages, done.nbytes + sum(page.page_nbytes for page in going))
        except TierError as error:
            text = f"{error}; {done.pages:,} pages were deleted before that"
            raise TierError(text, error.cause, lasting=error.lasting) from None
        return done

    def tidy(self, deadline_s: float) -> None:
        """Go on with a sweep, or begin one where it is time. What is not done by the deadline goes on next time."""
        if (self.capacity_nbytes is None and self._keep_s is None) or deadline_s <= 0:
            return
        if not self._busy.acquire(blocking=False):
            return
        try:
            self._end_s = time.monotonic() + deadline_s
            if self._sweep is None and self._is_due():
                self._sweep = self._sweeping()
            while self._sweep is not None:
                try:
                    next(self._sweep)
                except StopIteration:
                    self._sweep = None
                if time.monotonic() >= self._end_s:
                    break
        except BaseException:
            self._sweep = None
            raise
        finally:
            self._busy.release()

    def _is_due(self) -> bool:
        """Whether nobody has swept lately; notes that this host does so now."""
        if time.monotonic() < self._next_s:
            return False
        self._next_s = time.monotonic() + self.every_s / 2
        swept_s = self._bucket.one(lambda: self._bucket.written_s(SWEPT), self._left_s())
        if swept_s is not None and self._now_s(self._left_s()) - swept_s < self.every_s:
            return False
        self._bucket.one(lambda: self._bucket.put(SWEPT, b"swept\n"), self._left_s())
        return True

    def _sweeping(self) -> Iterator[None]:
        """Delete what is too old, count the rest, and delete the oldest where it is too much. Pauses where it may."""
        now_s = self._now_s(self._left_s())
        nbytes_of, pages = Counter[int](), 0
        for found in self._listed(FOLDER, self._left_s):
            old = [page for page in found if self._keep_s is not None and now_s - page.written_s > self._keep_s]
            self._evict([page.path for page in old])
            for page in set(found).difference(old):
                nbytes_of[_age(page, now_s)] += page.nbytes
                pages += 1
            yield
        used = sum(nbytes_of.values())
        if self.capacity_nbytes is not None and used > self.capacity_nbytes:
            # Ages are kept by the minute, so that memory does not grow with the number of pages; of the last minute
            # the first in the listing go, which are the same on every host.
            excess, oldest = used - self.capacity_nbytes * _LEAVE_TENTHS // 10, -1
            for oldest in sorted(nbytes_of, reverse=True):
                if nbytes_of[oldest] >= excess:
                    break
                excess -= nbytes_of[oldest]
            for found in self._listed(FOLDER, self._left_s):
                going = []
                for page in found:
                    age = _age(page, now_s)
                    if age > oldest or (age == oldest and excess > 0):
                        excess -= page.nbytes if age == oldest else 0
                        going.append(page)
                self._evict([page.path for page in going])
                pages, used = pages - len(going), used - sum(page.nbytes for page in going)
                yield
        self.counted = Purged(pages, used)

    def _listed(self, prefix: str, left_s: Callable[[], float]) -> Iterator[list[_Object]]:
        """Our pages below a folder, some at a time."""
        for found in self._bucket.listing(prefix, left_s):
            pages = []
            for one in found:
                name = read_name(one["path"], one["size"])
                if name is not None:
                    pages.append(_Object(one["path"], one["size"], name.nbytes, one["last_modified"].timestamp()))
            yield pages

    def _evict(self, paths: list[str]) -> None:
        if not paths:
            return
        done = self._bucket.delete(paths, self._left_s())
        self.evicted_pages += done
        if done < len(paths):
            log_once("tier.object.evict", "%s: pages that should go are left", self._bucket.address, logger=_logger)

    def _now_s(self, deadline_s: float) -> float:
        """What the store's clock says."""
        self._bucket.one(lambda: self._bucket.put(CLOCK, b"clock\n"), deadline_s)
        now_s = self._bucket.one(lambda: self._bucket.written_s(CLOCK), deadline_s)
        if now_s is None:
            raise TierError(f"{self._bucket.address}: what was just written is gone", "error")
        return now_s

    def _left_s(self) -> float:
        """A request of a sweep that began in time is given its time, or one that is always late would never end."""
        return max(self._bucket.timeout_s, self._end_s - time.monotonic())


def _age(page: _Object, now_s: float) -> int:
    """Whole minutes; 0 for what was written since."""
    return max(0, int(now_s - page.written_s) // _MINUTE_S)
