"""The memory of this process that transfers may touch: what is registered, what is granted, and what is in use now.

All transports of a process share one `Memory`. Engine memory is read and written either in short steps under the lock
of the grant or write it belongs to, or by a fetch that holds its grant until it is over. So `unregister` and `revoke`
can promise: once they returned, it is over. Transports whose hardware has to know memory beforehand follow it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from mooncake_connector.log import get_logger, log_once
from transfer.transports.base import (
    GRANT_KEY_NBYTES,
    MAX_PIECE_NBYTES,
    Cause,
    Completion,
    Grant,
    Int64,
    Numbers,
    Outcome,
    Region,
    TransferError,
    Transport,
    first_outside,
)
from transfer.transports.passing import Passed

logger = get_logger(__name__)

CANCEL_S = 5.0
"""What is under way when its grant ends has so long to end by itself, and so long again once it is cut off."""


class Holder(Protocol):
    """Something that writes to granted memory for longer than a step. Its methods return at once."""

    def cancel(self) -> None:
        """Its grant ended: it should be over soon."""

    def cut_off(self) -> None:
        """It did not end: stop it by whatever does."""


class Revocable:
    """The receiving side's own record of a grant.

    Hold `lock` around each short step that writes to the memory, while not `revoked`; or `hold` it for longer.
    """

    __slots__ = ("_holders", "_is_over", "grant", "lock", "passed", "revoked")

    def __init__(self, grant: Grant) -> None:
        self.grant = grant
        self.lock = threading.Lock()
        self.revoked = False
        self.passed = Passed()
        """What came with checksums of its own."""
        self._holders: set[Holder] = set()
        self._is_over: threading.Event | None = None

    def hold(self, holder: Holder) -> bool:
        """Keep the grant until `let_go`, whatever comes; False where it has ended."""
        with self.lock:
            if not self.revoked:
                self._holders.add(holder)
            return not self.revoked

    def let_go(self, holder: Holder) -> None:
        """`holder` writes no more. May be called twice, or by one that never held it."""
        if holder not in self._holders:
            return
        with self.lock:
            self._holders.discard(holder)
            if self._is_over is not None and not self._holders:
                self._is_over.set()

    def end(self) -> bool:
        """No step and no holder begins any more, and those that hold it are told; whether none does."""
        with self.lock:
            self.revoked = True
            if not self._holders:
                return True
            self._is_over = self._is_over or threading.Event()
            holders = tuple(self._holders)
        for holder in holders:
            holder.cancel()
        return False

    def wait(self) -> None:
        """Until nothing holds it, after `end`. Raises TransferError."""
        if self._is_over is None or self._is_over.wait(CANCEL_S):
            return
        with self.lock:
            late = tuple(self._holders)
        for holder in late:
            holder.cut_off()
        if not self._is_over.wait(CANCEL_S):
            raise TransferError(
                f"granted memory is still being written {2 * CANCEL_S:g} s after its grant ended: it cannot be used"
            )


class Memory:
    """Registered regions and grants of one process. Safe to use from any thread."""

    def __init__(self) -> None:
        self._registering = threading.Lock()
        """Held while followers are told, which may take seconds; the other one never is."""
        self._followers: dict[Transport, list[Region]] = {}
        """And what each of them knows."""
        self._lock = threading.Lock()
        self._regions: list[Region] = []
        self._starts = self._sizes = np.zeros(0, dtype=np.int64)
        self._sending: dict[Completion, tuple[Numbers, Numbers]] = {}
        self._grants: dict[bytes, Revocable] = {}

    @property
    def regions(self) -> list[Region]:
        """What is registered, by address; another list after each change."""
        return self._regions

    def register(self, address: int, nbytes: int, *, is_stage: bool = False) -> Region:
        """Allow transfers to touch these bytes. Raises ValueError where they overlap what is registered already.

        A transport that cannot use them is closed, with one line in the log.
        """
        if not (0 < address <= MAX_PIECE_NBYTES and 0 < nbytes <= MAX_PIECE_NBYTES):
            raise ValueError(f"region of {nbytes} bytes at {address:#x}: expected a positive address and size")
        region = Region(address, nbytes, is_stage)
        with self._registering:
            for other in self._regions:
                if address < other.address + other.nbytes and other.address < address + nbytes:
                    raise ValueError(f"{region} overlaps {other}, which is registered: unregister that first")
            lost = []
            for follower in self._followers:
                try:
                    self._tell(follower, region)
                except TransferError as error:
                    name = follower.name
                    log_once(f"transfer.register:{name}", "transport %s is closed: %s", name, error, logger=logger)
                    lost.append(follower)
            with self._lock:
                self._set_regions([*self._regions, region])
        for follower in lost:
            follower.close()
        return region

    def unregister(self, region: Region) -> None:
        """Forget a region: writes that read it fail, grants of it end. Nothing touches it once this returned.

        Raises TransferError as `revoke` does.
        """
        with self._registering:
            with self._lock:
                if region not in self._regions:
                    return
                self._set_regions([other for other in self._regions if other != region])
                readers = [one for one, pieces in self._sending.items() if _touches(*pieces, region)]
                granted = [held.grant for held in self._grants.values()]
                grants = [grant for grant in granted if _touches(grant.addresses, grant.nbytes, region)]
            for reader in readers:
                reader.settle(Outcome(Cause.SOURCE, "the memory to send was unregistered"))
            for grant in grants:
                self.revoke(grant)
            for follower in self._followers:
                self._tell_of_end(follower, region)

    def follow(self, follower: Transport) -> None:
        """Tell it of what is registered and will be, until `unfollow`. Raises TransferError where it refuses one."""
        with self._registering:
            self._followers[follower] = []
            try:
                for region in self._regions:
                    self._tell(follower, region)
            except TransferError:
                self._stop_telling(follower)
                raise

    def unfollow(self, follower: Transport) -> None:
        """It closes: all that it knows ends for it. May be called twice."""
        with self._registering:
            self._stop_telling(follower)

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
        """End a grant. Once this returned, its memory is not written any more. May be called twice, or by two threads.

        Takes as long as a step, and at most twice `CANCEL_S` where a transport fetches by itself. Raises TransferError
        where it does not end even when cut off: then the memory must not be used for anything else.
        """
        wait = self.begin_revoke(grant)
        if wait is not None:
            wait()

    def begin_revoke(self, grant: Grant) -> Callable[[], None] | None:
        """The first half of `revoke`, which takes as long as a step: None where that is all, else the other half."""
        held = self._grants.get(grant.key)
        if held is None or held.end():
            self._grants.pop(grant.key, None)
            return None

        def wait() -> None:
            held.wait()
            self._grants.pop(grant.key, None)

        return wait

    def granted(self, key: bytes) -> Revocable | None:
        """What was granted under this key, for the receiving side of a transport."""
        return self._grants.get(key)

    def begin_sending(self, write: Completion, local: Numbers, nbytes: Numbers) -> None:
        """Note that a write reads these pieces. Raises ValueError where one is outside of registered memory."""
        with self._lock:
            worst = first_outside(local, nbytes, self._starts, self._sizes)
            if worst is not None:
                raise ValueError(
                    f"source piece {worst}, {int(nbytes[worst])} bytes at {int(local[worst]):#x}, "
                    "is outside of registered memory"
                )
            self._sending[write] = local, nbytes

    def end_sending(self, write: Completion) -> None:
        """It reads no more. May be called twice."""
        with self._lock:
            self._sending.pop(write, None)

    def _set_regions(self, regions: list[Region]) -> None:
        self._regions = sorted(regions, key=lambda region: region.address)
        self._starts = np.array([region.address for region in self._regions], dtype=np.int64)
        self._sizes = np.array([region.nbytes for region in self._regions], dtype=np.int64)

    def _tell(self, follower: Transport, region: Region) -> None:
        if follower.place is not None and not region.is_stage and not follower.takes_device:
            return
        try:
            follower.register(region)
        except Exception as error:
            raise TransferError(
                f"it cannot use the {region.nbytes} bytes at {region.address:#x}: {error}"
            ) from error
        self._followers[follower].append(region)

    def _tell_of_end(self, follower: Transport, region: Region) -> None:
        if region not in self._followers[follower]:
            return
        self._followers[follower].remove(region)
        try:
            follower.unregister(region)
        except Exception as error:
            name = follower.name
            log_once(f"transfer.unregister:{name}", "%s cannot let go of memory: %r", name, error, logger=logger)

    def _stop_telling(self, follower: Transport) -> None:
        for region in list(self._followers.get(follower, ())):
            self._tell_of_end(follower, region)
        self._followers.pop(follower, None)


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
