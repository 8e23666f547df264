"""Keeps the arena of a process page-locked, so that a device of its own copies pages from and to it.

A device reaches the pages of memory that were there when they were locked. So nothing may take their place in the file
meanwhile: as long as one is locked, this process is known to use the file, which keeps everybody from punching holes
into it (`Arena.punch_from`); what is locked is unlocked before its mapping goes, and before others are told that this
process has left.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncake_connector.log import get_logger, log_once
from store_client.base import Bytes
from store_client.embedded.faults import start_thread
from store_client.memory_locks import MemoryLocks

if TYPE_CHECKING:
    from store_client.embedded.arena import Arena

logger = get_logger(__name__)

CHUNK_NBYTES = 256 << 20
"""Locked at once: a page of KV that lies across two of them is copied by way of other memory."""
_LOOK_PERIOD_S = 1.0

_never_let_go: list[object] = []
"""Mappings that could not be unlocked: other memory in their place would be taken for theirs."""


@dataclass(slots=True)
class _Mapping:
    """A mapping of the arena, of which pieces from its start on are locked."""

    memory: weakref.ref[Bytes]
    """Gone once the arena has mapped the file anew and nobody reads or writes a view of this mapping any more."""
    kept: object
    """Keeps it mapped."""
    address: int
    locked: list[int] = field(default_factory=list)
    """Addresses of the pieces."""
    locked_nbytes: int = 0


class LockedMemory:
    """Locks what is secured of an arena, as it grows, in a thread of its own.

    Args:
        presence: a descriptor, owned from now on, that tells others that the file is in use until it is closed.
        secured: granules from the first one on that the file surely holds; None where nobody can say right now. May
            take a second.
    """

    def __init__(
        self, arena: Arena, presence: int, locks: MemoryLocks, secured: Callable[[], int | None], granule: int
    ) -> None:
        self._arena, self._presence, self._locks = arena, presence, locks
        self._ask_secured, self._granule = secured, granule
        self._mappings: list[_Mapping] = []
        self._size: tuple[int, int] | None = None
        self._secured_nbytes = 0
        self._refused = False
        self._ending, self._ended = threading.Event(), threading.Event()
        if not start_thread("lock-memory", self._run):
            self._let_go()

    def end(self, wait_s: float) -> bool:
        """Unlock everything; False if that is not done after `wait_s`, and goes on in its thread."""
        self._ending.set()
        return self._ended.wait(wait_s)

    def abandon_in_child(self) -> None:
        """After a fork: what is locked is the parent's, who unlocks it."""
        if self._presence >= 0:
            os.close(self._presence)
        self._presence = -1

    def _run(self) -> None:
        while not self._ending.is_set():
            if not self._try_next():
                self._drop_old()
                self._ending.wait(_LOOK_PERIOD_S)
        self._let_go()

    def _try_next(self) -> bool:
        """As `_lock_next`. After a fault what is locked stays so: a device may be copying there."""
        try:
            return not self._refused and self._lock_next()
        except Exception as error:
            self._refused = True
            log_once("store.lock_memory", "the pool's memory is not page-locked: %r", error, logger=logger)
            return False

    def _lock_next(self) -> bool:
        """Lock one more piece; False where there is none for now."""
        memory = self._arena.memory
        if not self._mappings or self._mappings[-1].memory() is not memory:
            self._mappings.append(_Mapping(weakref.ref(memory), memory.base, memory.ctypes.data))
        newest = self._mappings[-1]
        start = newest.locked_nbytes
        stop = min(len(memory), self._secured())
        end = start - start % CHUNK_NBYTES + CHUNK_NBYTES
        if end > stop:
            if stop < self._arena.limit * self._granule:
                return False  # rather the whole chunk, once it is there
            end = stop - stop % mmap.PAGESIZE
        if end <= start:
            return False
        del memory  # locking takes long, and who else lets go of it meanwhile is to be seen
        if not self._locks.lock(newest.address + start, end - start):
            self._refused = True
            return False
        newest.locked.append(newest.address + start)
        newest.locked_nbytes = end
        return True

    def _secured(self) -> int:
        """Bytes of the file that are surely there; asked for again once it has changed, and while it has more than
        that, secured ahead: the pool grows into it without a change of the file."""
        size = self._arena.size()
        if size != self._size or self._secured_nbytes < self._arena.secured_nbytes:
            granules = self._ask_secured()
            if granules is not None:
                self._size, self._secured_nbytes = size, granules * self._granule
        return self._secured_nbytes

    def _drop_old(self) -> None:
        for mapping in self._mappings[:-1]:
            if mapping.memory() is None:
                self._unlock(mapping)
                self._mappings.remove(mapping)

    def _unlock(self, mapping: _Mapping) -> None:
        for address in mapping.locked:
            try:
                self._locks.unlock(address)
            except Exception as error:
                _never_let_go.append(mapping.kept)
                log_once("store.unlock_memory", "memory of the pool stays page-locked: %r", error, logger=logger)
        mapping.locked.clear()

    def _let_go(self) -> None:
        for mapping in self._mappings:
            self._unlock(mapping)
        self._mappings.clear()
        presence, self._presence = self._presence, -1
        os.close(presence)
        self._ended.set()
