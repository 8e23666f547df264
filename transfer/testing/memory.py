"""Memory of the conformance tests: what is sent, where it goes, and what must be there afterwards."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os

import numpy as np
import numpy.typing as npt

from transfer.transports.base import Int64, Transport

MIB = 1 << 20


class Buffer:
    """Memory of its own, which `free` really unmaps."""

    def __init__(self, nbytes: int, seed: int | None = None) -> None:
        """Random bytes of `seed`, or zeros."""
        self._map = mmap.mmap(-1, nbytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.address = self.bytes.ctypes.data
        self.nbytes = nbytes
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)

    def free(self) -> None:
        self.bytes = np.zeros(0, dtype=np.uint8)
        self._map.close()


class folded:
    """Many addresses on little memory: `nbytes` of address space that repeat the same `fold` bytes."""

    def __init__(self, nbytes: int, fold: int, seed: int | None = None) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._libc, self.nbytes = libc, -(-nbytes // fold) * fold
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._file = os.memfd_create("fold")
        os.ftruncate(self._file, fold)
        self.content = np.frombuffer(mmap.mmap(self._file, fold), dtype=np.uint8)
        if seed is not None:
            self.content[:] = np.random.default_rng(seed).integers(0, 256, fold, dtype=np.uint8)
        self.address: int = libc.mmap(None, self.nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        map_fixed, access = 0x10, mmap.PROT_READ | mmap.PROT_WRITE
        for start in range(self.address, self.address + self.nbytes, fold):
            assert libc.mmap(start, fold, access, mmap.MAP_SHARED | map_fixed, self._file, 0) == start

    def __enter__(self) -> folded:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._libc.munmap(self.address, self.nbytes)
        os.close(self._file)


def buffer_class(transport: type[Transport]) -> type[Buffer]:
    """What a transport's tests send from and write to: its own `buffer`, for memory of another kind."""
    return getattr(transport, "buffer", Buffer)


def int64(*values: int) -> Int64:
    return np.array(values, dtype=np.int64)


def digest(buffer: Buffer) -> str:
    return hashlib.sha256(np.asarray(buffer.bytes).data).hexdigest()


def scattered(source: Buffer, target: int, sizes: Int64, seed: int) -> tuple[Int64, Int64]:
    """Addresses of pieces of these sizes in random order on both sides, with gaps of 0 to 16 bytes between them."""
    rng = np.random.default_rng(seed)
    sides = []
    for base in (source.address, target):
        order = rng.permutation(len(sizes))
        gaps = rng.integers(0, 17, len(sizes))
        starts = np.empty(len(sizes), dtype=np.int64)
        starts[order] = base + np.cumsum(sizes[order] + gaps) - sizes[order]
        sides.append(starts)
    return sides[0], sides[1]


def expected(
    source: Buffer, local: Int64, remote: Int64, nbytes: Int64, target: int, size: int
) -> npt.NDArray[np.uint8]:
    """What `size` bytes of zeros at `target` become."""
    result, content = np.zeros(size, dtype=np.uint8), np.asarray(source.bytes)
    for a, b, n in zip(local - source.address, remote - target, nbytes, strict=True):
        result[b : b + n] = content[a : a + n]
    return result
