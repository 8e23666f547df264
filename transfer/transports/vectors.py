"""Lists of memory pieces as the kernel takes them, and the system calls on them.

Calls that move much release the interpreter lock. Small ones keep it: a thread that gives it away beside a busy Python
thread gets it back after 5 ms.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from transfer.transports.base import FEW, Int64, Numbers

IOV_MAX = 1024
SMALL_NBYTES = 64 << 10
"""Moved without releasing the interpreter lock."""
_MAX_RUNS = 16
"""See `_put`; for more, it costs less to ask the kernel."""
_MAX_ROWS_NBYTES = 1 << 62
"""What numpy takes for the size of an array is at most twice this, also where its rows overlap."""
_LONG_NBYTES = 256 << 10
"""Copied without the interpreter lock where the kernel does not do it for all pieces."""
MSG_NOSIGNAL, MSG_DONTWAIT, MSG_WAITALL = 0x4000, 0x40, 0x100
_INT64 = np.dtype(np.int64)


class _MsgHdr(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p), ("namelen", ctypes.c_uint32), ("iov", ctypes.c_void_p), ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p), ("controllen", ctypes.c_size_t), ("flags", ctypes.c_int),
    )  # fmt: skip


class _Calls:
    """The C library, called in one of two ways."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.sendmsg, self.recvmsg, self.memmove = library.sendmsg, library.recvmsg, library.memmove
        for call in (self.sendmsg, self.recvmsg):
            call.restype, call.argtypes = ctypes.c_ssize_t, (ctypes.c_int, ctypes.POINTER(_MsgHdr), ctypes.c_int)
        self.send, self.recv = library.send, library.recv
        for call in (self.send, self.recv):
            call.restype = ctypes.c_ssize_t
            call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self.memmove.restype, self.memmove.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self.readv = getattr(library, "process_vm_readv", None)
        if self.readv is not None:
            self.readv.restype = ctypes.c_ssize_t
            self.readv.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)


_keeping_lock, _releasing_lock = _Calls(ctypes.PyDLL(None, use_errno=True)), _Calls(ctypes.CDLL(None, use_errno=True))


def _calls(nbytes: int) -> _Calls:
    return _keeping_lock if nbytes <= SMALL_NBYTES else _releasing_lock


class Vector:
    """Pieces of this process's memory that are sent or filled in order, in as many steps as it takes."""

    __slots__ = ("_address", "_count", "_ends", "_header", "_index", "_iov", "_keep", "_left", "_total")

    def __init__(self, iov: array[int], nbytes: int, keep: object = None) -> None:
        """`iov` holds address and size of each piece, `nbytes` in all, and is taken over; no piece may be empty.

        `keep` stays referenced as long as the vector does.
        """
        self._iov = iov
        self._address, numbers = iov.buffer_info()
        self._count = numbers // 2
        self._ends: Int64 | None = None
        self._index = 0
        self._total = self._left = nbytes
        self._keep = keep
        self._header: _MsgHdr | None = None

    @classmethod
    def of(cls, addresses: Numbers, nbytes: Numbers, head: array[int] | None = None) -> Vector:
        """These pieces, after all bytes of `head` if there is one."""
        iov, total = array("Q"), 0
        if head is not None:
            iov.extend(head.buffer_info())
            total = len(head)
        if isinstance(addresses, list):
            for piece in zip(addresses, nbytes, strict=True):
                iov.extend(piece)
            return cls(iov, total + sum(nbytes), head)
        pairs = np.empty((len(addresses), 2), dtype=np.uint64)
        pairs[:, 0], pairs[:, 1] = addresses, nbytes
        iov.frombytes(pairs.tobytes())
        return cls(iov, total + int(np.sum(nbytes)), head)

    @classmethod
    def over(cls, data: array[int]) -> Vector:
        """All of these bytes."""
        return cls(array("Q", data.buffer_info()), len(data), data)

    @property
    def left(self) -> int:
        """Bytes still to be moved."""
        return self._left

    def advance(self, nbytes: int) -> None:
        """The next `nbytes` are done."""
        self._left -= nbytes
        if not self._left:
            self._index = self._count
            return
        if self._ends is None:
            self._ends = np.frombuffer(self._iov, dtype=np.int64)[1::2].cumsum()
        moved = self._total - self._left
        index = self._index = int(self._ends.searchsorted(moved, side="right"))
        rest = self._ends.item(index) - moved
        self._iov[2 * index] += self._iov[2 * index + 1] - rest
        self._iov[2 * index + 1] = rest

    def divert(self, address: int, first: int) -> None:
        """Let all pieces from number `first` on that are still open lie at `address` from now on."""
        begin = max(self._index, first)
        self._iov[2 * begin :: 2] = array("Q", [address]) * (self._count - begin)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(address, size) of what is still open."""
        for index in range(self._index, self._count):
            yield self._iov[2 * index], self._iov[2 * index + 1]

    def send(self, descriptor: int, *, waits: bool = False) -> int:
        """Send what the socket takes now, or in the time that it `waits`. Raises OSError; BlockingIOError: nothing."""
        return self._message(_calls(self._left).sendmsg, descriptor, 0 if waits else MSG_DONTWAIT)

    def receive(self, descriptor: int, *, waits: bool = False) -> int:
        """Fill from what the socket has now, or gets in the time that it `waits`; 0 at its end. Raises as `send`."""
        return self._message(_calls(self._left).recvmsg, descriptor, MSG_WAITALL if waits else MSG_DONTWAIT)

    def next_iov(self, most: int = IOV_MAX) -> tuple[int, int]:
        """Address and length of the kernel's list for the next call, of `most` pieces."""
        return self._address + 16 * self._index, min(most, self._count - self._index)

    def _message(self, call: Any, descriptor: int, flags: int) -> int:
        header = self._header = self._header or _MsgHdr()
        header.iov, header.iovlen = self.next_iov()
        moved: int = call(descriptor, header, MSG_NOSIGNAL | flags)
        if moved < 0:
            error = _os_error()
            raise BlockingIOError(*error.args) if isinstance(error, InterruptedError) else error
        self.advance(moved)
        return moved


def address_of(array: npt.NDArray[Any]) -> int:
    """Where a contiguous array lies; a third of the cost of `array.ctypes.data`."""
    address: int = array.__array_interface__["data"][0]
    return address


class Small:
    """A few bytes of memory that a socket is read into, without releasing the interpreter lock."""

    __slots__ = ("_address", "bytes")

    def __init__(self, nbytes: int) -> None:
        self.bytes = array("B", bytes(nbytes))
        self._address, _ = self.bytes.buffer_info()

    def receive(self, descriptor: int, start: int = 0) -> int:
        """Fill from `start` on; 0 at the end of the socket. Raises OSError; BlockingIOError where it has nothing."""
        moved: int = _keeping_lock.recv(descriptor, self._address + start, len(self.bytes) - start, MSG_DONTWAIT)
        if moved < 0:
            raise _os_error()
        return moved


def send_small(descriptor: int, data: bytes) -> int:
    """Send what the socket takes now, without releasing the interpreter lock. Raises OSError, BlockingIOError."""
    moved: int = _keeping_lock.send(descriptor, data, len(data), MSG_NOSIGNAL | MSG_DONTWAIT)
    if moved < 0:
        raise _os_error()
    return moved


def read_process(pid: int, source: Vector, destination: Vector, most: int = IOV_MAX) -> int:
    """Copy what is next in `source`, memory of process `pid`, to `destination`; return the bytes that were copied.

    Both advance by that much, and each by at most `most` pieces. Raises OSError: PermissionError without the right to
    trace the process, ESRCH, EFAULT.
    """
    readv = _calls(destination.left).readv
    if readv is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    moved: int = readv(pid, *destination.next_iov(most), *source.next_iov(most), 0)
    if moved < 0:
        raise _os_error()
    source.advance(moved)
    destination.advance(moved)
    return moved


def copy_in(address: int, addresses: Numbers, nbytes: Numbers) -> None:
    """Gather pieces of this process's memory to `address`, one after the other."""
    source = Vector.of(addresses, nbytes)
    if not _copied_at_once(source, Vector.of([address], [source.left])):
        for piece, size in source.pieces():
            _copy(address, piece, size)
            address += size


def copy_out(address: int, addresses: Numbers, nbytes: Numbers) -> None:
    """Scatter what lies at `address` to pieces of this process's memory, none of which it reaches into."""
    target = Vector.of(addresses, nbytes)
    if target.left > SMALL_NBYTES and _put(address, np.asarray(addresses), np.asarray(nbytes)):
        return
    if not _copied_at_once(Vector.of([address], [target.left]), target):
        for piece, size in target.pieces():
            _copy(piece, address, size)
            address += size


class _Bytes:
    """Memory of this process as rows of `nbytes`, `step` bytes apart; numpy asks for no more than this."""

    def __init__(self, address: int, rows: int, nbytes: int, step: int) -> None:
        shape = {"shape": (rows, nbytes), "strides": (step, 1)}
        self.__array_interface__ = {"data": (address, False), "typestr": "|u1", "version": 3, **shape}


def _put(address: int, places: Int64, sizes: Int64) -> bool:
    """As `copy_out`, by numpy: without the interpreter lock, and for less than the kernel, which looks up every page.

    It does so for runs of pieces of one size, which KV mostly has, on one side of the source: where targets lie on
    both, numpy takes them to overlap it, and copies once more. False: there are too many runs, or they are too far
    apart.
    """
    if (places.max().item() - places.min().item() + 1) * sizes.max().item() > _MAX_ROWS_NBYTES:
        return False
    is_above = places > address
    ends = ((sizes[1:] != sizes[:-1]) | (is_above[1:] != is_above[:-1])).nonzero()[0] + 1
    if len(ends) >= _MAX_RUNS:
        return False
    for start, end in itertools.pairwise([0, *ends.tolist(), len(sizes)]):
        size, run = sizes.item(start), places[start:end]
        base = run.min().item()
        target = np.asarray(_Bytes(base, run.max().item() - base + 1, size, step=1))  # a row begins at every byte
        target[run - base] = np.asarray(_Bytes(address, end - start, size, step=size))
        address += (end - start) * size
    return True


def _copied_at_once(source: Vector, target: Vector) -> bool:
    """Copy much by asking the kernel to read this process: one call for all pieces, without the interpreter lock.

    A piece at a time would either hold the lock all the time or wait for it after each. False where it is not allowed.
    """
    if target.left <= SMALL_NBYTES:
        return False
    try:
        while target.left:
            read_process(os.getpid(), source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS, errno.EACCES):
            raise
        return False
    return True


def _copy(target: int, source: int, nbytes: int) -> None:
    (_keeping_lock if nbytes < _LONG_NBYTES else _releasing_lock).memmove(target, source, nbytes)


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))  # the constructor picks BlockingIOError, PermissionError, ...


class Pieces(msgspec.Struct, frozen=True, eq=False):
    """Copies from `local[i]` to `remote[i]`; none is empty."""

    local: Numbers
    remote: Numbers
    nbytes: Numbers
    total: int
    """Of `nbytes`."""

    @classmethod
    def of(cls, local: Int64, remote: Int64, nbytes: Int64) -> Pieces:
        """Checked arrays without their empty pieces."""
        for numbers in (local, remote, nbytes):
            if numbers.dtype != _INT64 or numbers.ndim != 1 or len(numbers) != len(nbytes):
                raise ValueError(f"{numbers.shape} {numbers.dtype}: expected int64 arrays of one length, {len(nbytes)}")
        sizes: Numbers = nbytes.tolist() if len(nbytes) <= FEW else nbytes
        least = min(sizes, default=1) if isinstance(sizes, list) else int(sizes.min())
        if least < 0:
            raise ValueError(f"piece {int(nbytes.argmin())} has {least} bytes: expected 0 or more")
        if least == 0:
            kept = nbytes > 0
            return cls.of(local[kept], remote[kept], nbytes[kept])
        if isinstance(sizes, list):
            return cls(local.tolist(), remote.tolist(), sizes, sum(sizes))
        return cls(local, remote, nbytes, int(nbytes.sum()))

    def slices(self, max_nbytes: int, max_pieces: int) -> Iterator[Pieces]:
        """The same copies in parts of limited size; a piece may be cut."""
        if self.total <= max_nbytes and len(self.nbytes) <= max_pieces:
            if self.total:
                yield self
            return
        ends = np.cumsum(self.nbytes)
        start = 0
        while start < self.total:
            first = int(ends.searchsorted(start, side="right"))
            stop = min(start + max_nbytes, int(ends[min(first + max_pieces, len(ends)) - 1]))
            yield self._part(ends, first, start, stop)
            start = stop

    def _part(self, ends: Int64, first: int, start: int, stop: int) -> Pieces:
        last = int(ends.searchsorted(stop, side="left"))
        columns = self.local, self.remote, self.nbytes
        local, remote, nbytes = (np.array(column[first : last + 1], dtype=np.int64) for column in columns)
        skipped = start - (int(ends[first]) - int(self.nbytes[first]))
        local[0] += skipped
        remote[0] += skipped
        nbytes[0] -= skipped
        nbytes[-1] -= int(ends[last]) - stop
        return Pieces(local, remote, nbytes, stop - start)
