"""Pages on their way between host memory and an engine's KV blocks on a device.

A page crosses the link in one piece, by DMA into or out of a slab of device memory, and a kernel moves a batch of such
pages between the slab and the blocks. The slab is a few lanes, each with a stream of its own: while some lanes' pages
are on the link, the kernel works on another's. Nothing is ordered but by these streams, and nothing else is waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mooncake_connector.log import get_logger, log_once
from store_client.base import Bytes
from store_client.jobs import CopyFailed
from transfer.transports.cuda.driver import CudaError, Driver
from vllm_plugin.device.page_locks import PageLocks
from vllm_plugin.device.permutation import Int64, Runs, columns

if TYPE_CHECKING:
    from vllm_plugin.device import digests, kernel

logger = get_logger(__name__)

FEWEST_LANES, MOST_LANES = 2, 4
"""With more of them the link has more to do while pages are reserved and published; a lane holds one page at least."""
ALIGNMENT = 256
"""Of a page's place in the slab, so that it suits any word."""
_TABLE_WORDS = 16384
"""Numbers that say what the pages of a lane are: a page of the most tokens has 1,024 runs of five."""
_TABLE_NBYTES = 8 * _TABLE_WORDS
_MOST_PAGES = 1024
"""Of a lane."""
_HOST_NBYTES = _TABLE_NBYTES + 8 * _MOST_PAGES
"""Of a lane's own memory of the host: the table, then the digests of its pages."""
_CLOSE_S = 2.0
"""Longest wait at the end: after that the device hangs, and what it holds stays."""


def lanes_for(nbytes: int, page_nbytes: int, largest_nbytes: int = 0) -> tuple[int, int]:
    """How many lanes a pipe has that hold so many bytes of pages in all, and the bytes of each.

    They are as many as have room for a page each, also for one of the largest that other shards have, or if that is
    less than the fewest, these: in which the largest may not fit. Digests need a sixteenth beside the pages.
    """
    count = max(FEWEST_LANES, min(MOST_LANES, nbytes // aligned(max(page_nbytes, largest_nbytes))))
    pages = max(nbytes // count, aligned(page_nbytes))
    return count, aligned(pages + pages // 16) + ALIGNMENT


@dataclass(frozen=True, slots=True, eq=False)
class Digester:
    """How pages of `nbytes` are digested: the prepared kernels, and where on the device their constants are."""

    start: digests.Start
    constants: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Permuter:
    """How pages of one form get into blocks, or out of them.

    Args:
        start: the prepared kernel.
        layers: the addresses of its layers.
        digester: None where the device cannot digest such pages.
        place_nbytes: what a page, and its digester, need in the slab.
    """

    start: kernel.Start
    layers: Int64
    digester: Digester | None
    place_nbytes: int

    def words(self, num_runs: int) -> int:
        """In the table, at most: of a launch of its own."""
        return 5 * num_runs + len(self.layers) + 1


@dataclass(slots=True)
class _Batch:
    """What one launch of a kernel moves. `first`: number of its first page in the lane.

    `runs`, `layer_addresses` and `pages` are where the lane's table has them, once the batch is written there.
    """

    permuter: Permuter
    first: int
    runs_of: list[Runs] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    num_runs: int = 0
    runs: int = 0
    layer_addresses: int = 0
    pages: int = 0


class _Lane:
    """A part of the slab, in which pages lie one behind the other.

    What the kernels look up and find, tables of runs and digests, is page-locked memory of the host that they reach
    themselves: a copy of a few bytes would wait behind the pages that another lane has on the link.
    """

    def __init__(self, driver: Driver, device: int, address: int, nbytes: int) -> None:
        self._driver, self._device, self._nbytes = driver, device, nbytes
        self.address = address
        self._host = _host_memory(driver, device, _HOST_NBYTES)
        self._table = self._host[:_TABLE_NBYTES].view(np.int64)
        self._table_address = self._table.ctypes.data
        self._digests = self._host[_TABLE_NBYTES:].view(np.uint64)
        self._bounce: Bytes | None = None
        self._refused = False
        try:
            self.stream = driver.background_stream(device)
        except CudaError:
            self._unlock()
            raise
        self.batches: list[_Batch] = []
        self.leaving: list[tuple[int, Bytes]] = []
        """Places and pages that go to the host once the kernel is through."""
        self.pages = 0
        self._digested: list[bool] = []
        """Of each page, whether the kernels that digest it were started."""
        self._bounced: list[tuple[Bytes, Bytes]] = []
        self._used = self._words = self._written_words = 0

    def has_room(self, nbytes: int, words: int) -> bool:
        fits = self._used + nbytes <= self._nbytes and self._words + words <= _TABLE_WORDS
        return fits and self.pages < _MOST_PAGES

    def take(self, permuter: Permuter, runs: Runs, words: int) -> int:
        """A place for one more page, whose runs go into the next launch."""
        place = self.address + self._used
        self._used += permuter.place_nbytes
        self._words += words
        if not self.batches or self.batches[-1].permuter is not permuter:
            self.batches.append(_Batch(permuter, self.pages))
        self.batches[-1].runs_of.append(runs)
        self.batches[-1].places.append(place)
        self._digested.append(False)
        self.pages += 1
        return place

    def bounce(self, place: int, page: Bytes) -> Bytes:
        """Page-locked memory on the way between a place and a page that the device does not reach.

        Where the driver has none, the page itself: the driver then copies it by itself, and has the caller wait.
        """
        if self._bounce is None and not self._refused:
            try:
                self._bounce = _host_memory(self._driver, self._device, self._nbytes)
            except CudaError as error:
                self._refused = True
                said = "pages are copied from and to memory that is not page-locked, which is slow: %s"
                log_once("vllm.device.bounce", said, error, logger=logger)
        if self._bounce is None:
            return page
        start = place - self.address
        return self._bounce[start : start + page.nbytes]

    def launch(self, locks: PageLocks) -> None:
        """Start the kernel for what was taken since the last launch, then what leaves for the host, then the digests:
        the link has something to do while they are taken."""
        batches, self.batches = self.batches, []
        for batch in batches:
            self._write(batch)
            batch.permuter.start(batch.runs, batch.num_runs, batch.layer_addresses, self.stream)
        leaving, self.leaving = self.leaving, []
        for place, page in leaving:
            address = page.ctypes.data
            if not locks.covers(address, page.nbytes):
                target = self.bounce(place, page)
                if target is not page:
                    self._bounced.append((page, target))
                address = target.ctypes.data
            self.copy(address, place, page.nbytes)
        for batch in batches:
            if (digester := batch.permuter.digester) is not None:
                found, stop = self._digests.ctypes.data + 8 * batch.first, batch.first + len(batch.places)
                nbytes, count = digester.nbytes, len(batch.places)
                digester.start(batch.pages, count, nbytes, aligned(nbytes), digester.constants, found, self.stream)
                self._digested[batch.first : stop] = [True] * len(batch.places)

    def _write(self, batch: _Batch) -> None:
        """Into the table."""
        table = columns(batch.runs_of, batch.places)
        batch.num_runs = table.shape[1]
        batch.runs = self._add(table.ravel())
        batch.layer_addresses = self._add(batch.permuter.layers)
        batch.pages = self._add(np.array(batch.places, dtype=np.int64))

    def _add(self, words: Int64) -> int:
        """To the table; their address."""
        first, self._written_words = self._written_words, self._written_words + len(words)
        self._table[first : self._written_words] = words
        return self._table_address + 8 * first

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Have bytes copied when the stream gets there."""
        self._driver.call("cuMemcpyAsync", target, source, nbytes, self.stream)

    def wait(self, digests: list[int | None]) -> None:
        """Until nothing of the lane is under way; then it is empty. Adds the digest of each of its pages, or None."""
        taken: list[int | None] = [None] * self.pages
        try:
            self._driver.call("cuStreamSynchronize", self.stream)
            for page, bounce in self._bounced:
                np.copyto(page, bounce)
            for number, digested in enumerate(self._digested):
                taken[number] = int(self._digests[number]) if digested else None
        finally:
            digests += taken
            self.batches, self.leaving, self._bounced, self._digested = [], [], [], []
            self.pages = self._used = self._words = self._written_words = 0

    def close(self) -> None:
        """Give everything but the slab back; nothing is under way."""
        with self._driver.on(self._device):
            self._driver.call("cuStreamDestroy_v2", self.stream)
        self._unlock()

    def _unlock(self) -> None:
        for memory in (self._host, self._bounce):
            if memory is not None:
                self._driver.unlock_pages(self._device, memory.ctypes.data)


class Pipe:
    """Moves pages one way, for one thread, which it lets work on the device for good; another one may close it.

    Whatever the driver refuses raises `CopyFailed`.

    Args:
        device: the driver's number of it.
        slab: address in device memory, a multiple of 256, of as many lanes as `lanes_for` says.
        locks: which memory of the host the device reaches. Pages elsewhere are copied once more.
        begun, settled: pages that were begun so far, and the first of them that were settled. A page's turn is which
            one of them it is, from 1 on.
    """

    def __init__(
        self, driver: Driver, device: int, slab: int, lanes: tuple[int, int], locks: PageLocks, *, into_blocks: bool
    ) -> None:
        self._driver, self._device, self._locks, self._into_blocks = driver, device, locks, into_blocks
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.closed = False
        self.begun = self.settled = 0
        self._digests: list[int | None] = []
        """Of those that are through and not settled."""
        self._failed = ""
        """What the driver, or a launcher, refused since something is under way."""
        count, each = lanes
        self._most_nbytes = each
        self._lanes: list[_Lane] = []
        try:
            for number in range(count):
                self._lanes.append(_Lane(driver, device, slab + number * each, each))
        except CudaError:
            self.close()
            raise

    def can_move(self, permuter: Permuter) -> bool:
        return permuter.place_nbytes <= self._most_nbytes

    def begin(self, page: Bytes, permuter: Permuter, runs: Runs) -> int:
        """Have one page moved, which it can and of which there are `runs`; `page` stays as it is and where it is until
        `settle`. Returns its turn.
        """
        with self._lock:  # and not `_at_work`, which takes longer, for each page
            try:
                self._enter()
                words = permuter.words(len(runs.blocks))
                lane = self._lane_with_room(permuter.place_nbytes, words)
                self.begun += 1
                place = lane.take(permuter, runs, words)
                if self._into_blocks:
                    self._fetch(lane, place, page)
                else:
                    lane.leaving.append((place, page))
                return self.begun
            except CudaError as error:
                raise self._refused(error) from error
            except BaseException as error:  # a launcher's own: pages of an earlier batch may be in that launch
                self._failed = repr(error)
                raise

    def _fetch(self, lane: _Lane, place: int, page: Bytes) -> None:
        address = page.ctypes.data
        if not self._locks.covers(address, page.nbytes):
            source = lane.bounce(place, page)
            if source is not page:
                np.copyto(source, page)
            address = source.ctypes.data
        lane.copy(place, address, page.nbytes)

    @property
    def through(self) -> int:
        """How many of those that were begun, from the first on, are where they go to, as far as is known."""
        return self.settled + len(self._digests)

    def settle(self, turn: int | None = None) -> list[int | None]:
        """Until all pages up to this turn are over, or everything that was begun is. When this raised nothing is under
        way; it raises for whatever failed since nothing was last.

        Returns XXH3-64 of the pages that it settles, as the device read or wrote them, in the order in which they were
        begun; None of those that it did not digest.
        """
        with self._at_work():
            stop = self.begun if turn is None else turn
            try:
                if self._failed:
                    raise CopyFailed(self._failed)
                self._reach(stop)
            except BaseException:
                self._digests, self.settled = [], self.begun
                self._drain()
                raise
            count, self.settled = stop - self.settled, stop
            digests, self._digests = self._digests[:count], self._digests[count:]
            return digests

    def _reach(self, turn: int) -> None:
        """Until `through` is there. The lane that is being filled goes on being so unless it is needed."""
        launched = self._lanes[1:]
        if self.begun - self._lanes[0].pages < turn:
            self._lanes[0].launch(self._locks)
            launched.append(self._lanes[0])
        for lane in launched:
            if self.through < turn:
                lane.wait(self._digests)

    def _drain(self) -> None:
        """All lanes to their end, the oldest first, whichever of them fails; the first one is being filled."""
        with contextlib.ExitStack() as stack:
            for lane in (*self._lanes[:1], *reversed(self._lanes[1:])):  # a stack unwinds from its end
                stack.callback(lane.wait, [])

    def _lane_with_room(self, nbytes: int, words: int) -> _Lane:
        """The first lane is the one that is being filled."""
        if not self._lanes[0].has_room(nbytes, words):
            self._lanes[0].launch(self._locks)
            self._lanes.append(self._lanes.pop(0))
            self._lanes[0].wait(self._digests)
        return self._lanes[0]

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        with self._lock:
            try:
                self._enter()
                yield
            except CudaError as error:
                raise self._refused(error) from error

    def _enter(self) -> None:
        """Have this thread work on the device; under the lock. Raises CopyFailed where there is nothing to work on."""
        if self.closed:
            raise CopyFailed("the engine took its KV memory away")
        if self.begun == self.settled:
            self._failed = ""
        if self._thread is not threading.current_thread():
            self._driver.bind(self._device)
            self._thread = threading.current_thread()

    def _refused(self, error: CudaError) -> CopyFailed:
        self._failed = str(error)
        return CopyFailed(self._failed)

    def close(self) -> bool:
        """Touch no memory from now on. False where what is under way does not end, on a device that hangs."""
        if not self._lock.acquire(timeout=_CLOSE_S):
            return False
        try:
            if not self.closed:
                self.closed = True
                with contextlib.suppress(CudaError), contextlib.ExitStack() as stack:  # each, whichever of them fails
                    for lane in self._lanes:
                        stack.callback(lane.close)
                    with self._driver.on(self._device):
                        self._drain()
            return True
        finally:
            self._lock.release()


def aligned(nbytes: int) -> int:
    """Of a place in the slab."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _host_memory(driver: Driver, device: int, nbytes: int) -> Bytes:
    """New page-locked memory."""
    address = driver.lock_pages(device, nbytes)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
