"""Same host without the permission that `cma` needs: the bytes go through a ring of slots in shared memory.

The sender copies into a slot, the receiver copies out of it; both at the same time, on different slots. The memory is
sealed, so that neither can pull it away below the other. Memory of a device goes through stages on its side.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket

import numpy as np

from transfer.control.handshake import Server
from transfer.transports.base import Capabilities, Numbers
from transfer.transports.channel import Channel
from transfer.transports.cuda.landing import land
from transfer.transports.cuda.stage import Stages
from transfer.transports.incoming import Connection
from transfer.transports.local import LocalTransport, take_answer
from transfer.transports.memory import Memory, Revocable
from transfer.transports.stream import PayloadEncoder, Slice
from transfer.transports.vectors import Vector, address_of, copy_in, copy_out
from transfer.transports.wire import CopyOrder, CopyStatus, WireError, encode_answer

SLOT_NBYTES = 8 << 20
"""Also what is copied in one go; beside a busy Python thread each go waits 5 ms for the interpreter lock."""
NUM_SLOTS = 4
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_GREETING = b"ring"


class ShmTransport(LocalTransport):
    """See the module."""

    name = "shm"
    capabilities = Capabilities(device_memory=True)

    def _connection(self, channel: Channel, server: Server) -> Connection:
        return _RingConnection(channel, server, self.memory, self.stages)

    def _prepare(self, channel: Channel, deadline_at: float) -> PayloadEncoder:
        ring = _Ring()
        try:
            ring.hand_over(channel, deadline_at)
        except BaseException:
            ring.close()
            raise
        return ring


class _Ring(PayloadEncoder):
    """The sender's side of the shared memory."""

    max_nbytes = SLOT_NBYTES
    is_relay = True

    def __init__(self) -> None:
        self._file = os.memfd_create("mooncake-connector-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, SLOT_NBYTES * NUM_SLOTS)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = np.frombuffer(mmap.mmap(self._file, SLOT_NBYTES * NUM_SLOTS), dtype=np.uint8)
        except BaseException:
            os.close(self._file)
            raise
        self._address = address_of(self._memory)
        self._free = list(range(NUM_SLOTS))

    def hand_over(self, channel: Channel, deadline_at: float) -> None:
        """Raises Unavailable or OSError where the receiver cannot map it."""
        socket.send_fds(channel.socket, [_GREETING], [self._file])
        os.close(self._file)
        self._file = -1
        take_answer(channel, deadline_at, "the ring")

    def has_room(self) -> bool:
        return bool(self._free)

    def encode(self, part: Slice) -> Vector:
        pieces = part.pieces
        part.place = self._free.pop() * SLOT_NBYTES
        if not part.write.abandoned:
            copy_in(self._address + part.place, pieces.local, pieces.nbytes)
        order = CopyOrder(part.number, part.write.grant.key, len(pieces.nbytes), pieces.total, part.place)
        return Vector.over(order.encode(pieces.remote, pieces.nbytes, mark=part.mark))

    def release(self, part: Slice, status: CopyStatus | None) -> None:
        self._free.append(part.place // SLOT_NBYTES)

    def close(self) -> None:
        self._memory = np.zeros(0, dtype=np.uint8)  # which keeps the file open as well
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _RingConnection(Connection):
    """The receiver's side."""

    max_nbytes = SLOT_NBYTES

    def __init__(self, channel: Channel, server: Server, memory: Memory, stages: Stages | None) -> None:
        super().__init__(channel, server, memory)
        self._stages = stages
        self._ring = np.zeros(0, dtype=np.uint8)
        self._address = 0

    def welcome(self) -> None:
        self._next = self._take_ring

    def close(self) -> None:
        super().close()
        self._ring = np.zeros(0, dtype=np.uint8)  # what refers to this connection in a cycle must not keep it mapped

    def execute(self, order: CopyOrder, columns: list[Numbers], held: Revocable) -> bool:
        if order.place + order.nbytes > len(self._ring):
            raise WireError(f"order at {order.place} of a ring of {len(self._ring)} bytes")
        if self._stages is not None:
            return self.answer(order, land(self._stages, self._address + order.place, columns, held, self.passing))
        with held.lock:
            if not held.revoked:
                copy_out(self._address + order.place, columns[0], columns[1])
            status = CopyStatus.NO_GRANT if held.revoked else CopyStatus.OK
        return self.answer(order, status)

    def _take_ring(self) -> bool:
        data, files, _, _ = socket.recv_fds(self.channel.socket, len(_GREETING), 1)
        try:
            if data != _GREETING or len(files) != 1:
                raise WireError("no ring after the handshake")
            self._ring = _map_ring(files[0])
            self._address = address_of(self._ring)
        finally:
            for file in files:
                os.close(file)
        self._say(encode_answer(0, CopyStatus.OK))
        self._next = self._take_block
        return True


def _map_ring(file: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Map what a peer calls a ring. Raises WireError where it could shrink it below us, or where it is none."""
    try:
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS)
        size = os.fstat(file).st_size
        if sealed & fcntl.F_SEAL_SHRINK == 0 or size != SLOT_NBYTES * NUM_SLOTS:
            raise WireError(f"ring of {size} bytes, seals {sealed:#x}: expected a sealed one of our size")
        return np.frombuffer(mmap.mmap(file, size, prot=mmap.PROT_READ), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise WireError(f"ring that cannot be mapped: {error}") from error
