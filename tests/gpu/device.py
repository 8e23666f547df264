"""Device memory for the tests, and the transport that sends from it. The other process imports this as well.

With TRITON_INTERPRET=1 a stand-in takes the driver's place, and the processor the device's: so every run of all tests
says whether these still fit what they call. What is moved is right there too; of speed it says nothing, and of each
test there is one case.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from types import SimpleNamespace
from typing import Any

import numpy as np

with contextlib.suppress(ImportError):
    import torch  # as in an engine, so that the kernel is used

import transfer.transports.cuda.driver
from transfer.control.handshake import Identity
from transfer.testing.memory import Buffer
from transfer.transports.base import Unavailable
from transfer.transports.cuda.copier import Copier
from transfer.transports.cuda.driver import DMA_BUF_SUPPORTED, system_driver
from transfer.transports.cuda.ipc import CudaIpcTransport, DeviceRegions
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.memory import Memory
from transfer.transports.shm import ShmTransport
from transfer.transports.tcp import TcpTransport

DEVICE = 0
STAND_IN = os.environ.get("TRITON_INTERPRET") == "1"


def _take_its_place() -> None:
    from simulated.cuda_driver import LIBRARY

    from transfer.transports.cuda import launching

    def loaded(*kernel: Any, **options: int) -> launching.Launch:
        start = interpreted(*kernel, **options)

        def launch(grid: tuple[int, int, int], stream: int, *numbers: int) -> None:
            LIBRARY.launch(stream, lambda: start(grid, stream, *numbers) or 0)

        return lambda grid, stream, *numbers: (launch if stream else start)(grid, stream, *numbers)

    interpreted, launching.loaded = launching.loaded, loaded  # kernels come in their stream's order, as on a device
    LIBRARY.attributes[DMA_BUF_SUPPORTED] = 1
    opened = SimpleNamespace(CDLL=lambda name: LIBRARY, memmove=ctypes.memmove)
    transfer.transports.cuda.driver.ctypes = opened  # type: ignore[assignment]
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    torch.cuda.mem_get_info = lambda *args: (0, 0)
    for name, answer in (("set_device", None), ("synchronize", None), ("current_stream", stream), ("Stream", stream)):
        setattr(torch.cuda, name, lambda *args, _answer=answer, **options: _answer)
    torch.Tensor.pin_memory = lambda tensor: tensor


if STAND_IN:
    _take_its_place()


def where() -> Any:
    """torch's device."""
    return torch.device("cpu") if STAND_IN else torch.device("cuda", DEVICE)


def require() -> None:
    """Skip a module of tests where no GPU is, and say so."""
    import pytest

    try:
        system_driver()
    except Unavailable as error:
        pytest.skip(f"NO GPU here, so this was not tried: {error}", allow_module_level=True)


@functools.cache
def copier() -> Copier:
    """For the tests' own copies."""
    return Copier(system_driver(), DEVICE)


def plain_copy(source: int, destination: int, nbytes: int) -> None:
    """One plain copy between any two kinds of memory."""
    columns = (np.array([value], dtype=np.int64) for value in (source, destination, nbytes))
    copier().run(copier().plan_each(*columns))


def allocate(nbytes: int) -> int:
    """Device memory, until this process ends: as engines do, and what others opened must not be freed."""
    address = ctypes.c_uint64()
    with system_driver().on(DEVICE):
        system_driver().call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
    return address.value


def windows_of(address: int, nbytes: int) -> int:
    """In how many allocations that another process can open this memory lies."""
    memory = Memory()
    memory.register(address, nbytes)
    return len(DeviceRegions(memory, system_driver()).windows())


class DeviceBytes:
    """Device memory as if it were an array: each look at it copies all of it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._address, self._nbytes = address, nbytes

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        host = np.empty(self._nbytes, dtype=np.uint8)
        plain_copy(self._address, host.ctypes.data, self._nbytes)
        return host

    def __getitem__(self, key: Any) -> Any:
        return np.asarray(self)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        host = np.asarray(self)
        host[key] = value
        plain_copy(host.ctypes.data, self._address, self._nbytes)

    def __eq__(self, other: object) -> Any:
        return np.asarray(self) == other

    __hash__ = None  # type: ignore[assignment]

    def any(self) -> Any:
        return np.asarray(self).any()


class DeviceBuffer(Buffer):
    """Takes the place of the conformance class's memory."""

    def __init__(self, nbytes: int, seed: int | None = None) -> None:
        self.address, self.nbytes = allocate(nbytes), nbytes
        self.bytes: Any = DeviceBytes(self.address, nbytes)
        self.bytes[:] = 0 if seed is None else np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)

    def free(self) -> None:
        """See `allocate`."""


class DeviceCudaIpc(CudaIpcTransport):
    """The transport, whose tests use device memory."""

    buffer = DeviceBuffer


class DeviceTcp(TcpTransport):
    """`tcp` of memory of a device."""

    buffer = DeviceBuffer

    def __init__(self, memory: Memory, identity: Identity | None = None, **options: Any) -> None:
        super().__init__(memory, identity, place=OnDevice(system_driver(), DEVICE), **options)


class DeviceShm(ShmTransport):
    """`shm` of memory of a device."""

    buffer = DeviceBuffer

    def __init__(self, memory: Memory, identity: Identity | None = None) -> None:
        super().__init__(memory, identity, OnDevice(system_driver(), DEVICE))
