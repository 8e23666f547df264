"""Pages on their way between host memory and an engine's KV blocks on a device.

A page crosses the link in one piece, by DMA into or out of a slab of device memory, and a kernel moves a batch of such
pages between the slab and the blocks. The slab is two lanes, each with a stream of its own: while one lane's pages are
on the link, the kernel works on the other's. Nothing is ordered but by these streams, and nothing else is waited for.
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
from vllm_plugin.device.permutation import Int64

if TYPE_CHECKING:
    from vllm_plugin.device.kernel import Start

logger = get_logger(__name__)

LANES = 2
ALIGNMENT = 256
"""Of a page's place in the slab, so that it suits any word."""
_TABLE_WORDS = 16384
"""Numbers that say what the pages of a lane are: a page of the most tokens has 1,024 runs of five."""
_TABLE_NBYTES = 8 * _TABLE_WORDS
_CLOSE_S = 2.0
"""Longest wait at the end: after that the device hangs, and what it holds stays."""


def pipe_nbytes(nbytes: int, page_nbytes: int) -> int:
    """Of a pipe whose lanes hold so many bytes of pages in all, or one page each if that is more."""
    return LANES * (_TABLE_NBYTES + max(nbytes // LANES // ALIGNMENT * ALIGNMENT, _aligned(page_nbytes)))


@dataclass(frozen=True, slots=True, eq=False)
class Permuter:
    """How pages of one form get into blocks, or out of them: the prepared kernel, and the addresses of its layers."""

    start: Start
    layers: Int64

    def words(self, num_runs: int) -> int:
        """In the table, at most: of a launch of its own."""
        return 5 * num_runs + len(self.layers)


@dataclass(slots=True)
class _Batch:
    """What one launch of a kernel moves."""

    permuter: Permuter
    columns: list[Int64] = field(default_factory=list)


class _Lane:
    """A part of the slab: a table of runs first, then pages one behind the other."""

    def __init__(self, driver: Driver, device: int, address: int, nbytes: int) -> None:
        self._driver, self._device, self._nbytes = driver, device, nbytes
        self.address = address
        self._table = _host_memory(driver, device, _TABLE_NBYTES)
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
        self._bounced: list[tuple[Bytes, Bytes]] = []
        self._used = _TABLE_NBYTES
        self._words = self._launched_words = 0

    def has_room(self, nbytes: int, words: int) -> bool:
        return self._used + nbytes <= self._nbytes and self._words + words <= _TABLE_WORDS

    def take(self, nbytes: int, permuter: Permuter, columns: Int64) -> int:
        """A place for one more page, whose runs go into the next launch."""
        place = self.address + self._used
        self._used += _aligned(nbytes)
        self._words += permuter.words(columns.shape[1])
        columns[0] = place
        self.pages += 1
        if not self.batches or self.batches[-1].permuter is not permuter:
            self.batches.append(_Batch(permuter))
        self.batches[-1].columns.append(columns)
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
        """Start the kernel for what was taken since the last launch, and then what leaves for the host."""
        batches, self.batches = self.batches, []
        for batch in batches:
            runs = np.concatenate(batch.columns, axis=1)
            table = np.concatenate([runs.ravel(), batch.permuter.layers])
            first = 8 * self._launched_words
            self._launched_words += len(table)
            self._table[first : first + table.nbytes].view(np.int64)[:] = table
            there = self.address + first
            self.copy(there, self._table.ctypes.data + first, table.nbytes)
            batch.permuter.start(there, runs.shape[1], there + runs.nbytes, self.stream)
        leaving, self.leaving = self.leaving, []
        for place, page in leaving:
            target = page
            if not locks.covers(page.ctypes.data, page.nbytes):
                target = self.bounce(place, page)
                if target is not page:
                    self._bounced.append((page, target))
            self.copy(target.ctypes.data, place, page.nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Have bytes copied when the stream gets there."""
        self._driver.call("cuMemcpyAsync", target, source, nbytes, self.stream)

    def wait(self) -> None:
        """Until nothing of the lane is under way; then it is empty."""
        try:
            self._driver.call("cuStreamSynchronize", self.stream)
            for page, bounce in self._bounced:
                np.copyto(page, bounce)
        finally:
            self.batches, self.leaving, self._bounced = [], [], []
            self._used, self._words, self._launched_words = _TABLE_NBYTES, 0, 0
            self.pages = 0

    def close(self) -> None:
        """Give everything but the slab back; nothing is under way."""
        with self._driver.on(self._device):
            self._driver.call("cuStreamDestroy_v2", self.stream)
        self._unlock()

    def _unlock(self) -> None:
        for memory in (self._table, self._bounce):
            if memory is not None:
                self._driver.unlock_pages(self._device, memory.ctypes.data)


class Pipe:
    """Moves pages one way, for one thread; another one may close it.

    Whatever the driver refuses raises `CopyFailed`.

    Args:
        device: the driver's number of it.
        slab: address in device memory, a multiple of 256; `nbytes` of it are this pipe's.
        locks: which memory of the host the device reaches. Pages elsewhere are copied once more.
        begun, through: pages since everything was settled last, and how many of them, from the first on, are where they
            go to, as far as is known.
    """

    def __init__(
        self, driver: Driver, device: int, slab: int, nbytes: int, locks: PageLocks, *, into_blocks: bool
    ) -> None:
        self._driver, self._device, self._locks, self._into_blocks = driver, device, locks, into_blocks
        self._lock = threading.Lock()
        self.closed = False
        self.begun = self.through = 0
        each = nbytes // LANES // ALIGNMENT * ALIGNMENT
        self.most_nbytes = each - _TABLE_NBYTES
        """Of a page that it can move."""
        self._lanes: list[_Lane] = []
        try:
            for number in range(LANES):
                self._lanes.append(_Lane(driver, device, slab + number * each, each))
        except CudaError:
            self.close()
            raise

    def begin(self, page: Bytes, permuter: Permuter, columns: Int64) -> None:
        """Have one page moved, of at most `most_nbytes`; `page` stays as it is and where it is until `settle`.

        Args:
            columns: its runs (`permutation.runs`), with any address.
        """
        if not columns.shape[1]:
            return
        with self._at_work():
            lane = self._lane_with_room(page.nbytes, permuter.words(columns.shape[1]))
            self.begun += 1
            place = lane.take(page.nbytes, permuter, columns)
            if not self._into_blocks:
                lane.leaving.append((place, page))
                return
            source = page
            if not self._locks.covers(page.ctypes.data, page.nbytes):
                source = lane.bounce(place, page)
                if source is not page:
                    np.copyto(source, page)
            lane.copy(place, source.ctypes.data, page.nbytes)

    def settle(self) -> None:
        """Until everything that was begun is over. When this returned or raised nothing is under way."""
        with self._at_work():
            try:
                self._lanes[0].launch(self._locks)
            finally:
                self.begun = self.through = 0
                self._drain()

    def _drain(self) -> None:
        """All lanes to their end, whichever of them fails."""
        with contextlib.ExitStack() as stack:
            for lane in self._lanes:
                stack.callback(lane.wait)

    def _lane_with_room(self, nbytes: int, words: int) -> _Lane:
        """The first lane is the one that is being filled."""
        lane = self._lanes[0]
        if not lane.has_room(nbytes, words):
            lane.launch(self._locks)
            self._lanes.append(self._lanes.pop(0))
            lane = self._lanes[0]
            pages = lane.pages
            lane.wait()
            self.through += pages
        return lane

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        with self._lock:
            if self.closed:
                raise CopyFailed("the engine took its KV memory away")
            try:
                with self._driver.on(self._device):
                    yield
            except CudaError as error:
                raise CopyFailed(str(error)) from error

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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _host_memory(driver: Driver, device: int, nbytes: int) -> Bytes:
    """New page-locked memory."""
    address = driver.lock_pages(device, nbytes)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
