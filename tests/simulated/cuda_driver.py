"""A stand-in for the CUDA driver's library: device memory is this process's memory, sharing it is `process_vm_readv`.

It is strict where the driver is: calls without a current context fail, a process cannot open what it shares itself,
nothing is copied before its stream is synchronised, nor after that failed, when the memory may be another's;
reading beyond an opened allocation is an illegal address; and the device of what another process shared has no number
here, as where CUDA_VISIBLE_DEVICES differ: only the context that opened it knows it. What a card writes to a device is
not there before it is flushed, unless `attributes` say that it is. It notes every call, and fails those that a test
names in `fail`.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer.control.handshake import Identity
from transfer.testing.memory import Buffer, folded
from transfer.transports.cuda.driver import (
    DMA_BUF_SUPPORTED,
    FLUSH_OPTIONS,
    HANDLE_NBYTES,
    PCI_BUS_ID,
    PCI_DEVICE_ID,
    PCI_DOMAIN_ID,
    WRITES_ORDERING,
    Driver,
)
from transfer.transports.cuda.ipc import CudaIpcTransport
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.memory import Memory
from transfer.transports.rdma.transport import RdmaTransport
from transfer.transports.shm import ShmTransport
from transfer.transports.tcp import TcpTransport
from transfer.transports.vectors import Vector, read_process

if TYPE_CHECKING:
    import pytest

INVALID_VALUE, INVALID_DEVICE, INVALID_CONTEXT = 1, 101, 201
INVALID_HANDLE, ILLEGAL_ADDRESS, LAUNCH_FAILED = 400, 700, 719
NUM_DEVICES, INVISIBLE, ALIGNMENT = 2, -2, 256
NEED_CONTEXT = (
    "cuMemGetAddressRange_v2", "cuMemHostAlloc", "cuMemFreeHost", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle", "cuStreamCreate", "cuStreamDestroy_v2", "cuStreamSynchronize", "cuMemcpyAsync",
    "cuMemHostRegister_v2", "cuMemHostUnregister", "cuCtxGetStreamPriorityRange", "cuStreamCreateWithPriority",
    "cuMemAlloc_v2", "cuMemFree_v2", "cuMemGetHandleForAddressRange", "cuFlushGPUDirectRDMAWrites",
)  # fmt: skip
SPOIL_RECORDINGS = (
    "cuMemHostAlloc", "cuMemFreeHost", "cuMemHostRegister_v2", "cuMemHostUnregister", "cuMemAlloc_v2", "cuMemFree_v2",
)  # fmt: skip
RELAXED, CAPTURE_UNSUPPORTED = 2, 900
_HANDLE = struct.Struct("<QQQQ")


class Library:
    """Has the driver's functions as attributes."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.fail: dict[str, int] = {}
        """How many calls of a function go well before one fails, by name."""
        self.unshareable = False
        self.devices: dict[int, int] = {}
        """By address; others are on device 0."""
        self.opened: dict[int, tuple[bytes, mmap.mmap]] = {}
        self._openers: dict[int, int] = {}
        """The context by which each was opened."""
        self.locked: dict[int, Any] = {}
        self.slabs: dict[int, Any] = {}
        """Device memory that was allocated through the driver."""
        self._freed: list[tuple[int, Any]] = []
        self.pageable: list[int] = []
        """Memory of the host that was copied from or to and is not page-locked: the real driver copies it by itself,
        and has the caller wait."""
        self._allocated: dict[int, tuple[int, int]] = {}
        self.contents: dict[int, int] = {}
        """Where the bytes of an allocation are that the processor cannot touch at its address."""
        self._numbers = itertools.count(1)
        self.registered: dict[int, int] = {}
        """Memory that is page-locked in its place: address -> nbytes."""
        self._queues: dict[int, list[Callable[[], int]]] = {}
        self.recording = False
        """Another thread records a graph: what might wait for the device is refused unless the thread is relaxed."""
        self._thread = threading.local()
        self.attributes = {DMA_BUF_SUPPORTED: 0, FLUSH_OPTIONS: 1, WRITES_ORDERING: 0}
        self.attributes |= {PCI_BUS_ID: 0x17, PCI_DEVICE_ID: 0, PCI_DOMAIN_ID: 1}
        """Of each device."""
        self.dma_bufs: dict[int, tuple[int, int]] = {}
        """Which memory a descriptor is of, by its inode."""
        self.on_their_way: list[tuple[int, bytes]] = []
        """What cards wrote and a device does not see yet: address and bytes."""

    @property
    def contexts(self) -> list[int]:
        """Of this thread; the last one is current."""
        if not hasattr(self._thread, "contexts"):
            self._thread.contexts = []
        return self._thread.contexts

    def allocate(self, address: int, nbytes: int) -> None:
        """Call memory of this process device memory from now on."""
        self.release(address, nbytes)
        self._allocated[address] = nbytes, next(self._numbers)

    def release(self, address: int, nbytes: int) -> None:
        for other, (size, _) in list(self._allocated.items()):
            if other < address + nbytes and address < other + size:
                del self._allocated[other]
                self.contents.pop(other, None)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls[name] += 1
            values = [one.value if isinstance(one, ctypes._SimpleCData) else one for one in arguments]
            if name in self.fail:
                self.fail[name] -= 1
                if self.fail[name] < 0:
                    if name == "cuStreamSynchronize":
                        self._queues[values[0]] = []
                    return LAUNCH_FAILED
            if name in NEED_CONTEXT and not self.contexts:
                return INVALID_CONTEXT
            if self.recording and name in SPOIL_RECORDINGS and getattr(self._thread, "mode", 0) != RELAXED:
                return CAPTURE_UNSUPPORTED
            return getattr(self, "_" + name)(*values) or 0

        return call

    def _range(self, address: int) -> tuple[int, int] | None:
        for start, (nbytes, _) in list(self._allocated.items()):  # others allocate meanwhile
            if start <= address < start + nbytes:
                return start, nbytes
        for start, (handle, _) in list(self.opened.items()):
            nbytes = _HANDLE.unpack_from(handle)[2]
            if start <= address < start + nbytes:
                return start, nbytes
        return None

    def _cuInit(self, flags: int) -> None:
        pass

    def _cuGetErrorName(self, code: int, out: Any) -> None:
        out._obj.value = b"CUDA_ERROR_STAND_IN"

    def _cuDeviceGetCount(self, out: Any) -> None:
        out._obj.value = NUM_DEVICES

    def _cuDeviceGet(self, out: Any, ordinal: int) -> int:
        out._obj.value = ordinal
        return 0 if 0 <= ordinal < NUM_DEVICES else INVALID_DEVICE

    def _cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> None:
        out._obj.value = self.attributes[attribute]

    def _cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> None:
        out._obj.value = 1000 + device

    def _cuCtxPushCurrent_v2(self, context: int) -> None:
        self.contexts.append(context)

    def _cuCtxPopCurrent_v2(self, out: Any) -> None:
        out._obj.value = self.contexts.pop()

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        former = getattr(self._thread, "mode", 0)
        self._thread.mode, mode._obj.value = mode._obj.value, former

    def _cuPointerGetAttribute(self, out: Any, attribute: int, address: int) -> int:
        found = self._range(address)
        if found is None:
            return INVALID_VALUE
        device = INVISIBLE if found[0] in self.opened else self.devices.get(found[0], 0)
        out._obj.value = {2: 2, 9: device}[attribute]
        return 0

    def _cuMemGetAddressRange_v2(self, start: Any, size: Any, address: int) -> int:
        found = self._range(address)
        if found is None or self._openers.get(found[0], self.contexts[-1]) != self.contexts[-1]:
            return INVALID_VALUE
        start._obj.value, size._obj.value = found
        return 0

    def _cuMemGetHandleForAddressRange(self, out: Any, address: int, nbytes: int, kind: int, flags: int) -> int:
        pages = range(address, address + nbytes, mmap.PAGESIZE)
        whole = address % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == flags == 0 < nbytes and kind == 1
        if not whole or not all(self._touches(page, mmap.PAGESIZE) for page in pages):
            return INVALID_VALUE
        out._obj.value = os.memfd_create("dmabuf")
        self.dma_bufs[os.fstat(out._obj.value).st_ino] = address, nbytes
        return 0

    def _touches(self, address: int, nbytes: int) -> bool:
        ranges = [(start, start + size) for start, (size, _) in list(self._allocated.items())]
        return any(start < address + nbytes and address < stop for start, stop in ranges)

    def _cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:
        if target or scope != 100:
            return INVALID_VALUE
        while self.on_their_way:
            self._land(*self.on_their_way.pop(0))
        return 0

    def by_card(self, address: int, nbytes: int) -> bytes:
        """What a card reads there."""
        return ctypes.string_at(self._content(address, nbytes), nbytes)

    def write_by_card(self, address: int, data: bytes) -> None:
        if self._range(address) is None or self.attributes[WRITES_ORDERING]:
            self._land(address, data)
        else:
            self.on_their_way.append((address, data))

    def _land(self, address: int, data: bytes) -> None:
        ctypes.memmove(self._content(address, len(data)), data, len(data))

    def _cuMemAlloc_v2(self, out: Any, nbytes: int) -> None:
        array = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
        out._obj.value = -(-array.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.slabs[out._obj.value] = array
        self.allocate(out._obj.value, nbytes)

    def _cuMemFree_v2(self, address: int) -> int:
        if address not in self.slabs:
            return INVALID_VALUE
        self.release(address, 1)
        array = self.slabs.pop(address)
        self._freed.append((address, array))
        return 0

    def _cuMemHostAlloc(self, out: Any, nbytes: int, flags: int) -> None:
        array = np.zeros(nbytes, dtype=np.uint8)
        self.release(array.ctypes.data, nbytes)
        self.locked[array.ctypes.data] = array
        out._obj.value = array.ctypes.data

    def _cuMemFreeHost(self, address: int) -> None:
        del self.locked[address]

    def _cuMemHostRegister_v2(self, address: int, nbytes: int, flags: int) -> int:
        whole = address % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0 < nbytes
        apart = all(address + nbytes <= start or start + size <= address for start, size in self.registered.items())
        if not whole or not apart:
            return INVALID_VALUE
        self.registered[address] = nbytes
        return 0

    def _cuMemHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else INVALID_VALUE

    def _cuIpcGetMemHandle(self, out: Any, address: int) -> int:
        if self.unshareable or address not in self._allocated:
            return INVALID_VALUE
        handle = _HANDLE.pack(os.getpid(), address, *self._allocated[address]).ljust(HANDLE_NBYTES, b"\0")
        ctypes.memmove(out._obj.bytes, handle, HANDLE_NBYTES)
        return 0

    def _cuIpcOpenMemHandle_v2(self, out: Any, handle: Any, flags: int) -> int:
        data = bytes(handle.bytes)
        pid, _, nbytes, _ = _HANDLE.unpack_from(data)
        if pid == os.getpid():
            return INVALID_CONTEXT
        if not 0 < nbytes < 1 << 40:
            return INVALID_HANDLE
        reserved = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ)
        address = np.frombuffer(reserved, np.uint8).ctypes.data
        self.opened[address] = data, reserved
        self._openers[address] = self.contexts[-1]
        out._obj.value = address
        return 0

    def _cuIpcCloseMemHandle(self, address: int) -> int:
        self._openers.pop(address, None)
        return 0 if self.opened.pop(address, None) else INVALID_VALUE

    def _cuStreamCreate(self, out: Any, flags: int) -> None:
        out._obj.value = next(self._numbers)
        self._queues[out._obj.value] = []

    def _cuCtxGetStreamPriorityRange(self, least: Any, greatest: Any) -> None:
        least._obj.value, greatest._obj.value = 0, -5

    def _cuStreamCreateWithPriority(self, out: Any, flags: int, priority: int) -> None:
        self._cuStreamCreate(out, flags)

    def _cuStreamDestroy_v2(self, stream: int) -> None:
        del self._queues[stream]

    def _cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.launch(stream, lambda: self._copy(target, source, nbytes))

    def launch(self, stream: int, work: Callable[[], int]) -> None:
        """Have it done when the stream is synchronised; it returns 0, or what is wrong."""
        self._queues[stream].append(work)

    def _cuStreamSynchronize(self, stream: int) -> int:
        queue, self._queues[stream] = self._queues[stream], []
        return max((work() for work in queue), default=0)

    def _is_locked(self, address: int, nbytes: int) -> bool:
        pieces = [(start, len(array)) for start, array in list(self.locked.items())] + list(self.registered.items())
        return any(start <= address and address + nbytes <= start + size for start, size in pieces)

    def _content(self, address: int, nbytes: int) -> int:
        found = self._range(address)
        if found is None or found[0] not in self.contents:
            return address
        assert address + nbytes <= sum(found), "a copy beyond an allocation"
        return self.contents[found[0]] + address - found[0]

    def _copy(self, target: int, source: int, nbytes: int) -> int:
        for address in (target, source):
            if any(start <= address < start + len(array) - ALIGNMENT for start, array in self._freed):
                return ILLEGAL_ADDRESS
            if self._range(address) is None and not self._is_locked(address, nbytes):
                self.pageable.append(address)
        found = self._range(source)
        if found is None or found[0] not in self.opened:
            ctypes.memmove(self._content(target, nbytes), self._content(source, nbytes), nbytes)
            return 0
        if source + nbytes > sum(found):
            return ILLEGAL_ADDRESS
        pid, base, _, _ = _HANDLE.unpack_from(self.opened[found[0]][0])
        there, here = Vector.of([base + source - found[0]], [nbytes]), Vector.of([target], [nbytes])
        try:
            while here.left:
                read_process(pid, there, here)
        except OSError:
            return LAUNCH_FAILED
        return 0


LIBRARY = Library()


class DeviceBuffer(Buffer):
    """Memory that the stand-in calls device memory."""

    def __init__(self, nbytes: int, seed: int | None = None) -> None:
        super().__init__(nbytes, seed)
        LIBRARY.allocate(self.address, nbytes)

    def free(self) -> None:
        LIBRARY.release(self.address, self.nbytes)
        super().free()


class SealedBuffer(DeviceBuffer):
    """Memory that only the driver reaches, as a real device's: what else touches its addresses fails, or crashes."""

    def __init__(self, nbytes: int, seed: int | None = None) -> None:
        super().__init__(nbytes, seed)
        LIBRARY.release(self.address, nbytes)
        content = self.address
        self._sealed = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ)
        self.address = np.frombuffer(self._sealed, np.uint8).ctypes.data
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(nbytes), 0)
        LIBRARY.allocate(self.address, nbytes)
        LIBRARY.contents[self.address] = content


class SimulatedCudaIpc(CudaIpcTransport):
    """The transport over the stand-in."""

    buffer = DeviceBuffer

    def __init__(self, memory: Memory, identity: Identity | None = None) -> None:
        super().__init__(memory, identity, Driver(LIBRARY))


class StagedTcp(TcpTransport):
    """`tcp` of memory of a device, over the stand-in."""

    buffer = SealedBuffer

    def __init__(self, memory: Memory, identity: Identity | None = None, **options: Any) -> None:
        super().__init__(memory, identity, place=OnDevice(Driver(LIBRARY), 0), **options)


class DeviceRdma(RdmaTransport):
    """`rdma` of memory of a device, over the stand-in."""

    buffer = SealedBuffer

    def __init__(self, memory: Memory, identity: Identity | None = None, **options: Any) -> None:
        super().__init__(memory, identity, place=OnDevice(Driver(LIBRARY), 0), **options)


def fold_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the conformance class take its large memory, which repeats a little, from the stand-in."""

    def device_memory(*arguments: Any, **options: Any) -> folded:
        made = folded(*arguments, **options)
        LIBRARY.allocate(made.address, made.nbytes)
        return made

    monkeypatch.setattr("transfer.testing.conformance.folded", device_memory)


def fewer_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order takes fewer, and the conformance class sends some more than that: the stand-in copies each in Python."""
    for name in ("wire", "stream", "libraries.staging", "cuda.copier", "cuda.fetched", "cuda.landing", "cuda.staged"):
        monkeypatch.setattr(f"transfer.transports.{name}.MAX_ORDER_PIECES", 4096)
    monkeypatch.setattr("transfer.testing.conformance.MANY_PIECES", 5000)


class StagedShm(ShmTransport):
    """`shm` of memory of a device, over the stand-in."""

    buffer = SealedBuffer

    def __init__(self, memory: Memory, identity: Identity | None = None) -> None:
        super().__init__(memory, identity, OnDevice(Driver(LIBRARY), 0))
