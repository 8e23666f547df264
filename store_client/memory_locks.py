"""What keeps a store's memory page-locked: how one piece of memory is locked and unlocked."""

from typing import Protocol


class MemoryLocks(Protocol):
    """Locks pieces of this process's memory in place, so that a device can copy from and to them by itself.

    Called from one thread at a time for each store; pieces of one `MemoryLocks` never overlap.
    """

    def lock(self, address: int, nbytes: int) -> bool:
        """Lock a piece, both numbers multiples of a page of memory. False where it cannot be: nothing more is tried."""

    def unlock(self, address: int) -> None:
        """Undo it, for the address that it began at. An exception says that it is locked still: its memory is never
        let go then."""
