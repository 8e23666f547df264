"""Copies on a device: by a kernel where there are many pieces, else one by one.

A kernel is quick where each of its programs copies a bounded chunk in words as wide as both addresses allow. A piece is
therefore cut into a body of its widest words and up to two ends of single bytes, and the body into chunks.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_connector.log import get_logger, log_once
from transfer.transports.base import Int64
from transfer.transports.cuda.driver import NON_BLOCKING, Driver
from transfer.transports.vectors import Pieces
from transfer.transports.wire import MAX_ORDER_PIECES

logger = get_logger(__name__)

FEW_PIECES = 8
LONG_NBYTES, LONG_IN_DEVICE_NBYTES = 128 << 10, 2 << 20
"""Fewer pieces than these, or longer ones, are copied one by one: each costs a call. Over PCIe that takes some
microseconds; between places in device memory it was 8 on an H200, in which it copies 14 MB."""
MAX_WIDTH = 16
CHUNK_NBYTES = 32 << 10
STAGING_NBYTES = 8 << 20


class Copier:
    """Copies on one device, on a stream of its own beside the engine's. For one thread.

    Args:
        long_nbytes: pieces that are so long on average are copied one by one.
    """

    def __init__(self, driver: Driver, device: int, long_nbytes: int = LONG_NBYTES) -> None:
        self._driver, self._device, self._long_nbytes = driver, device, long_nbytes
        self._stream = c_void_p()
        self._table = np.zeros(0, dtype=np.int64)
        self._prepared: dict[int, Callable[[int, int, int], None]] = {}
        with driver.on(device):
            driver.call("cuStreamCreate", byref(self._stream), NON_BLOCKING)

    def close(self) -> None:
        with self._driver.on(self._device):
            self._driver.call("cuStreamDestroy_v2", self._stream)
        self._room(0)

    def warm_up(self) -> None:
        """Compile what copies of whole words take, for all copiers of this process: it may take a second, for which no
        transfer should wait."""
        kernels = _kernels()
        if kernels is None:
            return
        try:
            self._prepare(kernels, MAX_WIDTH)
        except Exception as error:  # see `plan`
            self._say(error)

    def plan(self, source: Int64, destination: Int64, nbytes: Int64) -> list[Callable[[], object]]:
        """For `run`: copy `nbytes[i]` bytes from `source[i]` to `destination[i]`; what was not compiled is now.

        All must be memory that the device reaches: a wrong address ends the device's work for the whole process.
        """
        kernels = _kernels()
        if kernels is None or len(nbytes) < FEW_PIECES or nbytes.mean() >= self._long_nbytes:
            return self.plan_each(source, destination, nbytes)
        try:
            return self._plan_launches(kernels, launches(source, destination, nbytes))
        except Exception as error:  # Triton has a compiler, a cache and tools of its own
            self._say(error)
            return self.plan_each(source, destination, nbytes)

    def plan_each(self, source: Int64, destination: Int64, nbytes: Int64) -> list[Callable[[], object]]:
        """One call for each piece; any memory of this process will do."""
        pieces = zip(destination.tolist(), source.tolist(), nbytes.tolist(), strict=True)
        return [functools.partial(self._driver.call, "cuMemcpyAsync", *piece, self._stream) for piece in pieces]

    def run(self, plan: list[Callable[[], object]]) -> None:
        """Carry out the last plan; once this returned or raised, nothing of it is under way."""
        self.begin(plan)
        self.wait()

    def begin(self, plan: list[Callable[[], object]]) -> None:
        """As `run`, without waiting: no other plan may be made before `wait`. If it raises, nothing is under way."""
        with self._driver.on(self._device):
            try:
                for start in plan:
                    start()
            except BaseException:
                self._driver.call("cuStreamSynchronize", self._stream)
                raise

    def wait(self) -> None:
        """Until it is carried out."""
        with self._driver.on(self._device):
            self._driver.call("cuStreamSynchronize", self._stream)

    def _plan_launches(self, kernels: Any, parts: list[Launch]) -> list[Callable[[], object]]:
        self._room(sum(part.table.size for part in parts))
        starts: list[Callable[[], object]] = []
        place = 0
        for part in parts:
            table = self._table[place : place + part.table.size]
            table[:] = part.table.ravel()
            place += len(table)
            start, chunks = self._prepare(kernels, part.width), part.table.shape[1]
            starts.append(functools.partial(start, table.ctypes.data, chunks, self._stream.value or 0))
        return starts

    def _prepare(self, kernels: Any, width: int) -> Callable[[int, int, int], None]:
        if width not in self._prepared:
            with self._driver.on(self._device):
                self._prepared[width] = kernels.prepare(width)
        return self._prepared[width]

    @staticmethod
    def _say(error: Exception) -> None:
        """While it is handled."""
        log_once("transfer.cuda", "no copy kernel, pieces go one by one: %s", error, logger=logger, exc_info=True)

    def _room(self, words: int) -> None:
        """Let the table have so many, of page-locked memory."""
        if 0 < words <= len(self._table):
            return
        if len(self._table):
            self._driver.unlock_pages(self._device, self._table.ctypes.data)
        self._table = np.zeros(0, dtype=np.int64)
        if words:
            address = self._driver.lock_pages(self._device, words * 8)
            self._table = np.ctypeslib.as_array((ctypes.c_int64 * words).from_address(address))


class Staging:
    """Device memory as the processor sees it: gathered into page-locked memory, a part at a time. For one thread.

    Args:
        nbytes: of page-locked memory.
    """

    def __init__(self, driver: Driver, device: int, nbytes: int = STAGING_NBYTES) -> None:
        self._driver, self._device, self._nbytes = driver, device, nbytes
        self._copier = Copier(driver, device)
        self._address = driver.lock_pages(device, nbytes)

    def warm_up(self) -> None:
        """See `Copier`."""
        self._copier.warm_up()

    def read(self, addresses: Int64, nbytes: Int64) -> Iterator[ctypes.Array[Any]]:
        """The bytes of these pieces of the device, one after the other; each part is valid until the next one.

        Raises CudaError.
        """
        for part in Pieces.of(addresses, addresses, nbytes).slices(self._nbytes, MAX_ORDER_PIECES):
            sizes = np.asarray(part.nbytes, dtype=np.int64)
            self._copier.run(self._copier.plan(np.asarray(part.local), self._address + sizes.cumsum() - sizes, sizes))
            yield (ctypes.c_char * part.total).from_address(self._address)

    def close(self) -> None:
        """Give the memory back; nothing may be read any more."""
        self._copier.close()
        self._driver.unlock_pages(self._device, self._address)


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One launch of the kernel: a row of chunks that are copied in words of `width` bytes.

    Args:
        width: 16, 8, 4, 2 or 1; divides every source, destination and size.
        table: int64 [3, chunks]: source addresses, destination addresses, sizes in bytes, none of them 0.
    """

    width: int
    table: Int64


def launches(source: Int64, destination: Int64, nbytes: Int64, chunk_nbytes: int = CHUNK_NBYTES) -> list[Launch]:
    """Copy `nbytes[i]` bytes from `source[i]` to `destination[i]`, for every i, the widest words first.

    Args:
        chunk_nbytes: of one program at most, a multiple of `MAX_WIDTH`.
    """
    if len(nbytes) and nbytes.min() > 0 and not np.bitwise_or.reduce(source | destination | nbytes) % MAX_WIDTH:
        return [Launch(MAX_WIDTH, _chunks(np.stack((source, destination, nbytes)), chunk_nbytes))]
    distance = (source - destination) | MAX_WIDTH
    width = distance & -distance
    head = np.minimum(-source % width, nbytes)
    tail = (nbytes - head) % width
    ones = np.ones_like(width)
    starts = np.stack((np.zeros_like(head), head, nbytes - tail), axis=1)
    sizes = np.stack((head, nbytes - head - tail, tail), axis=1).ravel()
    widths = np.stack((ones, width, ones), axis=1).ravel()
    table = np.stack(((source[:, None] + starts).ravel(), (destination[:, None] + starts).ravel(), sizes))
    return [
        Launch(int(one), _chunks(table[:, chosen], chunk_nbytes))
        for one in np.unique(widths)[::-1]
        if (chosen := (widths == one) & (sizes > 0)).any()
    ]


def _chunks(table: Int64, chunk_nbytes: int) -> Int64:
    if table[2].max() <= chunk_nbytes:
        return table
    counts = -(-table[2] // chunk_nbytes)
    owner = np.repeat(np.arange(len(counts)), counts)
    done = (np.arange(len(owner)) - (counts.cumsum() - counts)[owner]) * chunk_nbytes
    cut = table[:, owner]
    cut[:2] += done
    cut[2] = np.minimum(cut[2] - done, chunk_nbytes)
    return cut


def _kernels() -> Any:
    """`kernels` where the process has torch and Triton, as engines have; none pays seconds for them."""
    if "torch" not in sys.modules:
        return None
    try:
        return importlib.import_module("transfer.transports.cuda.kernels")
    except ImportError:
        return None
    except Exception as error:  # Triton's own, as it looks for what it needs
        Copier._say(error)
        return None
