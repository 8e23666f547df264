"""The CUDA driver through ctypes. Nothing is loaded before it is asked for, and neither torch nor a toolkit is needed.

The primary context of a device is the one that torch and the CUDA runtime use, so their addresses are valid here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_connector.log import get_logger, log_once
from transfer.transports.base import Int64, Unavailable
from transfer.transports.cuda.plan import Launch, launches

logger = get_logger(__name__)

_LIBRARY = "libcuda.so.1"
HANDLE_NBYTES = 64
_MEMORY_TYPE, _DEVICE_ORDINAL = 2, 9
_TYPE_DEVICE = 2
_NON_BLOCKING = 1
_LAZY_PEER_ACCESS = 1
_PORTABLE = 1

FEW_PIECES = 8
LONG_NBYTES = 128 << 10
"""Fewer pieces than these, or longer ones, are copied one by one: each costs a call, of some microseconds."""


class Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_NBYTES),)


_OUT = c_void_p
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, _OUT),
    "cuDeviceGetCount": (_OUT,),
    "cuDeviceGet": (_OUT, c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuPointerGetAttribute": (_OUT, c_int, c_uint64),
    "cuMemGetAddressRange_v2": (_OUT, _OUT, c_uint64),
    "cuMemHostAlloc": (_OUT, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuIpcGetMemHandle": (_OUT, c_uint64),
    "cuIpcOpenMemHandle_v2": (_OUT, Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuStreamCreate": (_OUT, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
}


class CudaError(Unavailable):
    """A call of the driver failed."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Device memory that was allocated in one piece."""

    device: int
    address: int
    nbytes: int


@functools.cache
def system_driver() -> Driver:
    """The driver of this machine. Raises Unavailable where there is none, or no device."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        for name, arguments in _ARGUMENTS.items():
            getattr(library, name).argtypes = arguments
    except (OSError, AttributeError) as error:
        raise Unavailable(f"no CUDA driver: {error}") from None
    return Driver(library)


class Driver:
    """Calls of the driver, with Python's values. Safe to use from any thread; raises CudaError.

    Args:
        library: has the driver's functions as attributes.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, c_void_p] = {}
        count = c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGetCount", byref(count))
        if not count.value:
            raise Unavailable("no CUDA device")

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = c_char_p()
            self._library.cuGetErrorName(code, byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown').decode()} ({code})")

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Let the thread work on a device; what it worked on before comes back afterwards."""
        if device not in self._contexts:
            number, context = c_int(), c_void_p()
            self.call("cuDeviceGet", byref(number), device)
            self.call("cuDevicePrimaryCtxRetain", byref(context), number)
            self._contexts[device] = context
        self.call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def allocation(self, address: int) -> Allocation | None:
        """The allocation that an address lies in, None where that is no device memory."""
        kind, device, start, size = c_uint(), c_int(), c_uint64(), c_size_t()
        try:
            self.call("cuPointerGetAttribute", byref(kind), _MEMORY_TYPE, address)
            if kind.value != _TYPE_DEVICE:
                return None
            self.call("cuPointerGetAttribute", byref(device), _DEVICE_ORDINAL, address)
            with self.on(device.value):
                self.call("cuMemGetAddressRange_v2", byref(start), byref(size), address)
        except CudaError:
            return None
        return Allocation(device.value, start.value, size.value)

    def lock_pages(self, device: int, nbytes: int) -> int:
        """Address of new host memory that all devices reach."""
        address = c_void_p()
        with self.on(device):
            self.call("cuMemHostAlloc", byref(address), nbytes, _PORTABLE)
        return address.value or 0

    def unlock_pages(self, device: int, address: int) -> None:
        """Free it."""
        with self.on(device):
            self.call("cuMemFreeHost", address)

    def export(self, allocation: Allocation) -> bytes:
        """What another process opens the allocation with."""
        handle = Handle()
        with self.on(allocation.device):
            self.call("cuIpcGetMemHandle", byref(handle), allocation.address)
        return bytes(handle.bytes)

    def open(self, device: int, handle: bytes) -> int:
        """Map another process's allocation for `device`; where it lies here, until `close`.

        The driver counts: what was opened twice is closed twice.
        """
        address = c_uint64()
        with self.on(device):
            self.call("cuIpcOpenMemHandle_v2", byref(address), Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return address.value

    def close(self, device: int, address: int) -> None:
        with self.on(device):
            self.call("cuIpcCloseMemHandle", address)


class Copier:
    """Copies on one device, on a stream of its own beside the engine's. For one thread."""

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver, self._device = driver, device
        self._stream = c_void_p()
        self._table = np.zeros(0, dtype=np.int64)
        self._prepared: dict[int, Callable[[int, int, int], None]] = {}
        with driver.on(device):
            driver.call("cuStreamCreate", byref(self._stream), _NON_BLOCKING)

    def close(self) -> None:
        with self._driver.on(self._device):
            self._driver.call("cuStreamDestroy_v2", self._stream)
        self._room(0)

    def plan(self, source: Int64, destination: Int64, nbytes: Int64) -> list[Callable[[], object]]:
        """For `run`: copy `nbytes[i]` bytes from `source[i]` to `destination[i]`; it may take a compiler's time.

        All must be memory that the device reaches: a wrong address ends the device's work for the whole process.
        """
        kernels = _kernels()
        if kernels is None or len(nbytes) < FEW_PIECES or nbytes.mean() >= LONG_NBYTES:
            return self.plan_each(source, destination, nbytes)
        try:
            return self._plan_launches(kernels, launches(source, destination, nbytes))
        except Exception as error:  # Triton has a compiler, a cache and tools of its own
            log_once("transfer.cuda", "no copy kernel, pieces go one by one: %s", error, logger=logger, exc_info=True)
            return self.plan_each(source, destination, nbytes)

    def plan_each(self, source: Int64, destination: Int64, nbytes: Int64) -> list[Callable[[], object]]:
        """One call for each piece; any memory of this process will do."""
        pieces = zip(destination.tolist(), source.tolist(), nbytes.tolist(), strict=True)
        return [functools.partial(self._driver.call, "cuMemcpyAsync", *piece, self._stream) for piece in pieces]

    def run(self, plan: list[Callable[[], object]]) -> None:
        """Carry out the last plan; once this returned or raised, nothing of it is under way."""
        with self._driver.on(self._device):
            try:
                for start in plan:
                    start()
            finally:
                self._driver.call("cuStreamSynchronize", self._stream)

    def _plan_launches(self, kernels: Any, parts: list[Launch]) -> list[Callable[[], object]]:
        self._room(sum(part.table.size for part in parts))
        starts: list[Callable[[], object]] = []
        place = 0
        for part in parts:
            table = self._table[place : place + part.table.size]
            table[:] = part.table.ravel()
            place += len(table)
            if part.width not in self._prepared:
                with self._driver.on(self._device):
                    self._prepared[part.width] = kernels.prepare(part.width)
            start, chunks = self._prepared[part.width], part.table.shape[1]
            starts.append(functools.partial(start, table.ctypes.data, chunks, self._stream.value or 0))
        return starts

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


def _kernels() -> Any:
    """`kernels` where the process has torch and Triton, as engines have; none pays seconds for them."""
    if "torch" not in sys.modules:
        return None
    try:
        return importlib.import_module("transfer.transports.cuda.kernels")
    except ImportError:
        return None
