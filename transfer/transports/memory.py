"""The memory of this process that transfers may touch: what is registered, what is granted, and what is in use now.

All transports of a process share one `Memory`. Every read or write of engine memory happens in short steps under the
lock of the grant or batch it belongs to, so that `unregister` and `revoke` can promise: once they returned, it is over.
"""

from __future__ import annotations

import secrets
import threading
from typing import Protocol

import numpy as np

from transfer.transports.base import (
    GRANT_KEY_NBYTES,
    MAX_PIECE_NBYTES,
    Cause,
    Grant,
    Int64,
    Numbers,
    Outcome,
    Region,
    first_outside,
)


class Revocable:
    """The receiving side's own record of a grant. Hold `lock` around each short step that writes to the memory."""

    __slots__ = ("grant", "lock", "revoked")

    def __init__(self, grant: Grant) -> None:
        self.grant = grant
        self.lock = threading.Lock()
        self.revoked = False


class Sending(Protocol):
    """A batch that reads registered memory."""

    def abandon(self, outcome: Outcome) -> None:
        """Fail; once this returned, the source is not read any more by this process."""


class Memory:
    """Registered regions and grants of one process. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: list[Region] = []
        self._starts = self._sizes = np.zeros(0, dtype=np.int64)
        self._sending: dict[Sending, tuple[Numbers, Numbers]] = {}
        self._grants: dict[bytes, Revocable] = {}

    @property
    def regions(self) -> list[Region]:
        """What is registered, by address; another list after each change."""
        return self._regions

    def register(self, address: int, nbytes: int) -> Region:
        """Allow transfers to touch these bytes. Raises ValueError where they overlap what is registered already."""
        if not (0 < address <= MAX_PIECE_NBYTES and 0 < nbytes <= MAX_PIECE_NBYTES):
            raise ValueError(f"region of {nbytes} bytes at {address:#x}: expected a positive address and size")
        region = Region(address, nbytes)
        with self._lock:
            for other in self._regions:
                if address < other.address + other.nbytes and other.address < address + nbytes:
                    raise ValueError(f"{region} overlaps {other}, which is registered: unregister that first")
            self._set_regions([*self._regions, region])
        return region

    def unregister(self, region: Region) -> None:
        """Forget a region: batches that read it fail, grants of it end. Nothing touches it once this returned."""
        with self._lock:
            if region not in self._regions:
                return
            self._set_regions([other for other in self._regions if other != region])
            readers = [batch for batch, pieces in self._sending.items() if _touches(*pieces, region)]
            granted = [held.grant for held in self._grants.values()]
            grants = [grant for grant in granted if _touches(grant.addresses, grant.nbytes, region)]
        for batch in readers:
            batch.abandon(Outcome(Cause.SOURCE, "the memory to send was unregistered"))
        for grant in grants:
            self.revoke(grant)

    def grant(self, addresses: Int64, nbytes: Int64) -> Grant:
        """Let whoever learns the new grant's key write to these ranges, until `revoke`.

        Raises ValueError unless all of it is registered.
        """
        addresses, nbytes = np.asarray(addresses, dtype=np.int64), np.asarray(nbytes, dtype=np.int64)
        if addresses.ndim != 1 or addresses.shape != nbytes.shape:
            raise ValueError(f"{addresses.shape} addresses and {nbytes.shape} sizes: expected as many of both")
        with self._lock:
            if first_outside(addresses, nbytes, self._starts, self._sizes) is not None:
                raise ValueError("a granted range is outside of registered memory: register it first")
            starts, sizes = _merge(addresses, nbytes)
            granted = Grant(secrets.token_bytes(GRANT_KEY_NBYTES), starts, sizes)
            self._grants[granted.key] = Revocable(granted)
        return granted

    def revoke(self, grant: Grant) -> None:
        """End a grant. Once this returned, its memory is not written any more. May be called twice."""
        with self._lock:
            held = self._grants.pop(grant.key, None)
        if held is not None:
            with held.lock:
                held.revoked = True

    def granted(self, key: bytes) -> Revocable | None:
        """What was granted under this key, for the receiving side of a transport."""
        return self._grants.get(key)

    def begin_sending(self, batch: Sending, local: Numbers, nbytes: Numbers) -> None:
        """Note that `batch` reads these pieces. Raises ValueError where one is outside of registered memory."""
        with self._lock:
            worst = first_outside(local, nbytes, self._starts, self._sizes)
            if worst is not None:
                raise ValueError(
                    f"source piece {worst}, {int(nbytes[worst])} bytes at {int(local[worst]):#x}, "
                    "is outside of registered memory"
                )
            self._sending[batch] = local, nbytes

    def end_sending(self, batch: Sending) -> None:
        """`batch` reads no more. May be called twice."""
        with self._lock:
            self._sending.pop(batch, None)

    def _set_regions(self, regions: list[Region]) -> None:
        self._regions = sorted(regions, key=lambda region: region.address)
        self._starts = np.array([region.address for region in self._regions], dtype=np.int64)
        self._sizes = np.array([region.nbytes for region in self._regions], dtype=np.int64)


def _touches(addresses: Numbers, nbytes: Numbers, region: Region) -> bool:
    starts = np.asarray(addresses)
    return bool(((starts < region.address + region.nbytes) & (region.address < starts + nbytes)).any())


def _merge(addresses: Int64, nbytes: Int64) -> tuple[Int64, Int64]:
    """The same bytes as ascending ranges that neither overlap nor touch."""
    kept = nbytes > 0
    order = np.argsort(addresses[kept], kind="stable")
    starts, ends = addresses[kept][order], (addresses + nbytes)[kept][order]
    if len(starts) == 0:
        return starts, starts
    reach = np.maximum.accumulate(ends)
    first = np.concatenate(([True], starts[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return starts[first], reach[last] - starts[first]
