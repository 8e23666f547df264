"""Lists of memory pieces as the kernel takes them, and the system calls on them, which release the interpreter lock."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from transfer.base import Int64

IOV_MAX = 1024
MAX_CALL_NBYTES = 0x7FFF_F000
"""Linux moves no more in one call (MAX_RW_COUNT)."""

_libc = ctypes.CDLL(None, use_errno=True)


class _MsgHdr(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p), ("namelen", ctypes.c_uint32), ("iov", ctypes.c_void_p), ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p), ("controllen", ctypes.c_size_t), ("flags", ctypes.c_int),
    )  # fmt: skip


for _name in ("sendmsg", "recvmsg"):
    _call = getattr(_libc, _name)
    _call.restype, _call.argtypes = ctypes.c_ssize_t, (ctypes.c_int, ctypes.POINTER(_MsgHdr), ctypes.c_int)
_readv = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
_free_memmove = ctypes.CDLL(None).memmove
_memmove = ctypes.PyDLL(None).memmove
for _call in (_free_memmove, _memmove):
    _call.restype, _call.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_LONG_NBYTES = 256 << 10

MSG_NOSIGNAL, MSG_DONTWAIT = 0x4000, 0x40


class Vector:
    """Pieces of this process's memory that are sent or filled in order, in as many steps as it takes."""

    __slots__ = ("_address", "_ends", "_header", "_index", "_iov", "_keep", "_left", "_total")

    def __init__(self, iov: npt.NDArray[np.uint64], nbytes: int, keep: object = None) -> None:
        """`iov` has rows of address and size, `nbytes` in all, and is taken over; no piece may be empty.

        `keep` stays referenced as long as the vector does.
        """
        self._iov = iov
        self._address = address_of(iov)
        self._ends: Int64 | None = None
        self._index = 0
        self._total = self._left = nbytes
        self._keep = keep
        self._header = _MsgHdr()

    @classmethod
    def of(cls, addresses: Int64, nbytes: Int64, keep: object = None) -> Vector:
        """These pieces."""
        iov = np.empty((len(addresses), 2), dtype=np.uint64)
        iov[:, 0], iov[:, 1] = addresses, nbytes
        return cls(iov, int(nbytes.sum()), keep)

    @classmethod
    def over(cls, array: npt.NDArray[np.uint8]) -> Vector:
        """All bytes of a contiguous array."""
        return cls(np.array(((address_of(array), array.nbytes),), dtype=np.uint64), array.nbytes, array)

    @property
    def left(self) -> int:
        """Bytes still to be moved."""
        return self._left

    def advance(self, nbytes: int) -> None:
        """The next `nbytes` are done."""
        self._left -= nbytes
        if not self._left:
            self._index = len(self._iov)
            return
        if self._ends is None:
            self._ends = self._iov[:, 1].astype(np.int64).cumsum()
        moved = self._total - self._left
        self._index = int(self._ends.searchsorted(moved, side="right"))
        rest = int(self._ends[self._index]) - moved
        done = int(self._iov[self._index, 1]) - rest
        self._iov[self._index] = int(self._iov[self._index, 0]) + done, rest

    def divert(self, address: int, first: int) -> None:
        """Let all pieces from number `first` on that are still open lie at `address` from now on."""
        self._iov[max(self._index, first) :, 0] = address

    def keep(self, value: object) -> None:
        """Let `value` live as long as this vector."""
        self._keep = (self._keep, value)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(address, size) of what is still open."""
        for index in range(self._index, len(self._iov)):
            yield int(self._iov[index, 0]), int(self._iov[index, 1])

    def send(self, descriptor: int) -> int:
        """Send what the socket takes now. Raises OSError; BlockingIOError where it takes nothing."""
        return self._message(_libc.sendmsg, descriptor)

    def receive(self, descriptor: int) -> int:
        """Fill from what the socket has now; 0 at its end. Raises OSError; BlockingIOError where it has nothing."""
        return self._message(_libc.recvmsg, descriptor)

    def _message(self, call: ctypes._FuncPointer, descriptor: int) -> int:
        self._header.iov = self._address + 16 * self._index
        self._header.iovlen = min(IOV_MAX, len(self._iov) - self._index)
        moved: int = call(descriptor, ctypes.byref(self._header), MSG_NOSIGNAL | MSG_DONTWAIT)
        if moved < 0:
            raise _os_error()
        self.advance(moved)
        return moved


def address_of(array: npt.NDArray[Any]) -> int:
    """Where a contiguous array lies; a third of the cost of `array.ctypes.data`."""
    address: int = array.__array_interface__["data"][0]
    return address


def read_process(pid: int, source: Vector, destination: Vector) -> int:
    """Copy what is next in `source`, memory of process `pid`, to `destination`; return the bytes that were copied.

    Both advance by that much. Raises OSError: PermissionError without the right to trace the process, ESRCH, EFAULT.
    """
    if _readv is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    moved: int = _readv(pid, *_next(destination), *_next(source), 0)
    if moved < 0:
        raise _os_error()
    source.advance(moved)
    destination.advance(moved)
    return moved


def copy_in(address: int, addresses: Int64, nbytes: Int64) -> None:
    """Gather pieces of this process's memory to `address`, one after the other."""
    offsets = (address + nbytes.cumsum() - nbytes).tolist()
    for target, source, size in zip(offsets, addresses.tolist(), nbytes.tolist(), strict=True):
        _copy(target, source, size)


def copy_out(address: int, addresses: Int64, nbytes: Int64) -> None:
    """Scatter what lies at `address` to pieces of this process's memory."""
    offsets = (address + nbytes.cumsum() - nbytes).tolist()
    for source, target, size in zip(offsets, addresses.tolist(), nbytes.tolist(), strict=True):
        _copy(target, source, size)


def _copy(target: int, source: int, nbytes: int) -> None:
    """The interpreter lock is given away for long pieces only.

    A thread that gives it away beside a busy Python thread gets it back after 5 ms: 32 KiB each time would be 6 MB/s.
    """
    (_memmove if nbytes < _LONG_NBYTES else _free_memmove)(target, source, nbytes)


def _next(vector: Vector) -> tuple[int, int]:
    return vector._address + 16 * vector._index, min(IOV_MAX, len(vector._iov) - vector._index)


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))  # the constructor picks BlockingIOError, PermissionError, ...


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Copies from `local[i]` to `remote[i]`; none is empty."""

    local: Int64
    remote: Int64
    nbytes: Int64
    ends: Int64
    """Running total of `nbytes`."""

    @classmethod
    def of(cls, local: Int64, remote: Int64, nbytes: Int64) -> Pieces:
        """Checked arrays without their empty pieces."""
        for array in (local, remote, nbytes):
            if array.dtype != np.int64 or array.ndim != 1 or len(array) != len(nbytes):
                raise ValueError(f"{array.shape} {array.dtype}: expected int64 arrays of one length, {len(nbytes)}")
        least = nbytes.min() if len(nbytes) else 1
        if least < 0:
            raise ValueError(f"piece {int(nbytes.argmin())} has {least} bytes: expected 0 or more")
        if least == 0:
            kept = nbytes > 0
            local, remote, nbytes = local[kept], remote[kept], nbytes[kept]
        return cls(local, remote, nbytes, nbytes.cumsum())

    @property
    def total(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def slices(self, max_nbytes: int, max_pieces: int) -> Iterator[Pieces]:
        """The same copies in parts of limited size; a piece may be cut."""
        if self.total <= max_nbytes and len(self.ends) <= max_pieces:
            if self.total:
                yield self
            return
        start = 0
        while start < self.total:
            first = int(np.searchsorted(self.ends, start, side="right"))
            stop = min(start + max_nbytes, int(self.ends[min(first + max_pieces, len(self.ends)) - 1]))
            yield self._part(first, start, stop)
            start = stop

    def _part(self, first: int, start: int, stop: int) -> Pieces:
        last = int(np.searchsorted(self.ends, stop, side="left"))
        local, remote, nbytes = (array[first : last + 1].copy() for array in (self.local, self.remote, self.nbytes))
        skipped = start - (int(self.ends[first]) - int(self.nbytes[first]))
        local[0] += skipped
        remote[0] += skipped
        nbytes[0] -= skipped
        nbytes[-1] -= int(self.ends[last]) - stop
        return Pieces(local, remote, nbytes, np.cumsum(nbytes))
