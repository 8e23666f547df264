"""The CUDA driver through ctypes. Nothing is loaded before it is asked for, and neither torch nor a toolkit is needed.

The primary context of a device is the one that torch and the CUDA runtime use, so their addresses are valid here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from transfer.transports.base import Unavailable

_LIBRARY = "libcuda.so.1"
HANDLE_NBYTES = 64
_MEMORY_TYPE, _DEVICE_ORDINAL = 2, 9
_TYPE_DEVICE = 2
_LAZY_PEER_ACCESS = 1
_PORTABLE = 1
_RELAXED = 2
"""A thread in this mode may allocate, lock memory and wait while another one records a graph, as engines do when they
start; in the mode that threads begin with, the call would fail and spoil the recording."""
NON_BLOCKING = 1
"""Of a stream: it does not wait for the default stream."""
DMA_BUF_SUPPORTED, FLUSH_OPTIONS, WRITES_ORDERING = 124, 117, 118
"""Attributes of a device."""
FLUSH_BY_HOST = 1
"""Of `FLUSH_OPTIONS`."""
ORDERED_FOR_OWNER = 100
"""Of `WRITES_ORDERING`, at least: the device itself sees what a card wrote without a flush."""
_DMA_BUF_DESCRIPTOR = 1
PCI_BUS_ID, PCI_DEVICE_ID, PCI_DOMAIN_ID = 33, 34, 50
_CURRENT_CONTEXT, _TO_OWNER = 0, 100


class Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_NBYTES),)


_OUT = c_void_p
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, _OUT),
    "cuDeviceGetCount": (_OUT,),
    "cuDeviceGet": (_OUT, c_int),
    "cuDeviceGetAttribute": (_OUT, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuThreadExchangeStreamCaptureMode": (_OUT,),
    "cuPointerGetAttribute": (_OUT, c_int, c_uint64),
    "cuMemGetAddressRange_v2": (_OUT, _OUT, c_uint64),
    "cuMemAlloc_v2": (_OUT, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (_OUT, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuIpcGetMemHandle": (_OUT, c_uint64),
    "cuIpcOpenMemHandle_v2": (_OUT, Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuCtxGetStreamPriorityRange": (_OUT, _OUT),
    "cuStreamCreate": (_OUT, c_uint),
    "cuStreamCreateWithPriority": (_OUT, c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
}


_NEWER: dict[str, tuple[Any, ...]] = {
    "cuMemGetHandleForAddressRange": (_OUT, c_uint64, c_size_t, c_int, c_uint64),
    "cuFlushGPUDirectRDMAWrites": (c_int, c_int),
}
"""What a driver before CUDA 11.7 lacks, and only GPUDirect needs."""


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
        for name, arguments in _NEWER.items():
            with contextlib.suppress(AttributeError):
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
        self.num_devices = count.value
        if not self.num_devices:
            raise Unavailable("no CUDA device")

    def call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise CudaError(f"the driver is too old: it has no {name}")
        code = function(*arguments)
        if code:
            text = c_char_p()
            self._library.cuGetErrorName(code, byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown').decode()} ({code})")

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Let the thread work on a device; what it worked on before comes back afterwards."""
        context = self._context(device)
        mode = c_uint(_RELAXED)
        self.call("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            self.call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self.call("cuCtxPopCurrent_v2", byref(c_void_p()))
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", byref(mode))

    def bind(self, device: int) -> None:
        """Make a device this thread's current one for good, as `on` does for a while; nothing undoes it."""
        context = self._context(device)
        self.call("cuThreadExchangeStreamCaptureMode", byref(c_uint(_RELAXED)))
        self.call("cuCtxPushCurrent_v2", context)

    def _context(self, device: int) -> c_void_p:
        if device not in self._contexts:
            number, context = c_int(), c_void_p()
            self.call("cuDeviceGet", byref(number), device)
            self.call("cuDevicePrimaryCtxRetain", byref(context), number)
            self._contexts[device] = context
        return self._contexts[device]

    def allocation(self, address: int) -> Allocation | None:
        """The allocation of this process that an address lies in, None where that is no device memory.

        Not for what another process shared: its device is the other's, where this one needs no context, and which may
        have no number here.
        """
        kind, device = c_uint(), c_int()
        try:
            self.call("cuPointerGetAttribute", byref(kind), _MEMORY_TYPE, address)
            if kind.value != _TYPE_DEVICE:
                return None
            self.call("cuPointerGetAttribute", byref(device), _DEVICE_ORDINAL, address)
            return Allocation(device.value, *self.bounds(device.value, address))
        except CudaError:
            return None

    def bounds(self, device: int, address: int) -> tuple[int, int]:
        """Address and size of the allocation around an address that is valid in the context of `device`."""
        start, size = c_uint64(), c_size_t()
        with self.on(device):
            self.call("cuMemGetAddressRange_v2", byref(start), byref(size), address)
        return start.value, size.value

    def attribute(self, device: int, which: int) -> int:
        """What the driver says of a device; makes no context on it."""
        number, value = c_int(), c_int()
        self.call("cuDeviceGet", byref(number), device)
        self.call("cuDeviceGetAttribute", byref(value), which, number)
        return value.value

    def pci_address(self, device: int) -> str:
        """As the kernel writes it, such as "0000:17:00.0"."""
        domain, bus, slot = (self.attribute(device, which) for which in (PCI_DOMAIN_ID, PCI_BUS_ID, PCI_DEVICE_ID))
        return f"{domain:04x}:{bus:02x}:{slot:02x}.0"

    def export_dma_buf(self, device: int, address: int, nbytes: int) -> int:
        """A descriptor of this memory for other devices' drivers, the caller's to close. It is of the memory that is
        behind the addresses now. Both numbers are multiples of a page of the host."""
        descriptor = c_int(-1)
        with self.on(device):
            kind, flags = _DMA_BUF_DESCRIPTOR, 0
            self.call("cuMemGetHandleForAddressRange", byref(descriptor), address, nbytes, kind, flags)
        return descriptor.value

    def flush_writes(self, device: int) -> None:
        """Wait until the device sees what others, as cards, have written to its memory."""
        with self.on(device):
            self.call("cuFlushGPUDirectRDMAWrites", _CURRENT_CONTEXT, _TO_OWNER)

    def allocate(self, device: int, nbytes: int) -> int:
        """Address of new device memory, a multiple of 256; no framework's allocator, or sleep mode, knows of it."""
        address = c_uint64()
        with self.on(device):
            self.call("cuMemAlloc_v2", byref(address), nbytes)
        return address.value

    def write(self, device: int, address: int, content: bytes) -> None:
        """Copy a few bytes to device memory, and wait for that."""
        with contextlib.ExitStack() as stack:
            place = self.lock_pages(device, len(content))
            stack.callback(self.unlock_pages, device, place)
            stream = self.background_stream(device)
            stack.enter_context(self.on(device))
            stack.callback(self.call, "cuStreamDestroy_v2", stream)
            ctypes.memmove(place, content, len(content))
            self.call("cuMemcpyAsync", address, place, len(content), stream)
            self.call("cuStreamSynchronize", stream)

    def free(self, device: int, address: int) -> None:
        """Undo it. Waits for what the device has been given."""
        with self.on(device):
            self.call("cuMemFree_v2", address)

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

    def register(self, device: int, address: int, nbytes: int) -> None:
        """Page-lock memory of this process, for all devices. Both numbers are multiples of a page of memory."""
        with self.on(device):
            self.call("cuMemHostRegister_v2", address, nbytes, _PORTABLE)

    def unregister(self, device: int, address: int) -> None:
        """Undo it, for the address at which it began."""
        with self.on(device):
            self.call("cuMemHostUnregister", address)

    def background_stream(self, device: int) -> int:
        """A new stream that waits for no other, with the lowest priority: that of frameworks' own streams."""
        stream, least = c_void_p(), c_int()
        with self.on(device):
            self.call("cuCtxGetStreamPriorityRange", byref(least), byref(c_int()))
            self.call("cuStreamCreateWithPriority", byref(stream), NON_BLOCKING, least)
        return stream.value or 0

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
