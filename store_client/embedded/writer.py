"""Everything that changes a pool: reserve, commit, forget, reclaim, resize. All under the write lock.

A put takes the lock twice, briefly: to reserve space, and to make complete pages visible. The bytes are copied in
between, without it. Each step is one ledger transaction, so a writer killed anywhere leaves the pool as it was before
or after a step; what it had reserved comes back when somebody finds its owner dead.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client.embedded import rows as rows_
from store_client.embedded.allocator import Allocator
from store_client.embedded.arena import Arena
from store_client.embedded.clock import now_ns
from store_client.embedded.counters import Counters, as_counts
from store_client.embedded.evictor import FORGET_BATCH, Evictor
from store_client.embedded.extents import as_runs
from store_client.embedded.feed import Feed
from store_client.embedded.journal import Record
from store_client.embedded.ledger import Draft, Ledger, Reservation
from store_client.embedded.locks import FileLock, Owners
from store_client.embedded.policy import Policy
from store_client.embedded.put_plan import Place, Ticket
from store_client.embedded.rows import INLINE_EXTENTS, NONE, ROW_DTYPE, ROW_NBYTES, Row
from store_client.embedded.soundness import unsound
from store_client.embedded.spaces import Spaces
from store_client.embedded.table import Found, Table
from store_client.embedded.transactions import Transactions

_RECLAIM_PERIOD_S = 5.0
_ROWS_AT_ONCE = 1 << 16


class Writer:
    """The one way to change a pool. Methods that take `deadline` (of `time.monotonic()`) raise LockTimeout."""

    def __init__(
        self, table: Table, ledger: Ledger, feed: Feed, arena: Arena, spaces: Spaces, lock: FileLock, owners: Owners,
        policy: Policy, counters: Counters,
    ) -> None:  # fmt: skip
        self._table, self._ledger, self._arena, self._spaces = table, ledger, arena, spaces
        self._lock, self._owners, self._counters = lock, owners, counters
        self._transactions = Transactions(ledger, table, feed)
        self._evictor = Evictor(table, self._transactions, policy)
        self._allocator = Allocator(arena, counters)
        self._abandoned: list[Reservation] = []
        self._condemned: list[Found] = []
        self._suspected: list[int] = []
        self._next_reclaim = 0.0

    @contextmanager
    def locked(self, deadline: float) -> Iterator[None]:
        """Hold the write lock, with the page table brought up to date and old business done."""
        self._lock.acquire(deadline)
        try:
            self._catch_up()
            self._settle()
            yield
        finally:
            self._lock.release()

    def _catch_up(self) -> None:
        """Apply what a writer that was killed right after its commit, or another process, has changed."""
        with self._ledger.peek() as draft:
            self._follow_capacity(draft.capacity)
            self._transactions.catch_up(draft)

    def _follow_capacity(self, capacity: int) -> None:
        self._arena.limit = capacity
        if self._table.capacity_granules != capacity:
            self._table.set_capacity(capacity)

    def _settle(self) -> None:
        """Hand in counts, give back what this process could not commit, forget what it found corrupt."""
        self._table.add_counters(self._counters.take())
        if self._abandoned:
            abandoned = list(self._abandoned)
            with self._ledger.transaction() as draft:
                for reservation in abandoned:
                    self._give_back(draft, reservation)
            del self._abandoned[: len(abandoned)]  # other threads append meanwhile
        if self._suspected:
            suspected, self._suspected = self._suspected, []
            self._table.check(suspected)
        if self._condemned:
            condemned, self._condemned = self._condemned, []
            slots = [found.slot for found in condemned if self._table.unchanged(found)]
            self._evictor.forget(np.unique(np.array(slots, dtype=np.int64)))
        if time.monotonic() >= self._next_reclaim:
            self._next_reclaim = time.monotonic() + _RECLAIM_PERIOD_S
            self._reclaim()

    @property
    def has_condemned(self) -> bool:
        return bool(self._condemned or self._suspected)

    def suspect(self, slot: int) -> None:
        """Have a row looked at that a reader met half written or broken; takes no lock."""
        if len(self._suspected) < FORGET_BATCH:
            self._suspected.append(slot)

    def condemn(self, found: Found) -> None:
        """Have a corrupt page forgotten at the next occasion; takes no lock."""
        if len(self._condemned) < FORGET_BATCH:
            self._condemned.append(found)

    def abandon(self, reservation: Reservation) -> None:
        """Have space given back at the next occasion; takes no lock."""
        self._abandoned.append(reservation)

    # -- put ----------------------------------------------------------------------------------------------------

    def reserve(
        self, keys: Sequence[bytes], namespace: Namespace, shard: Shard, parents: Sequence[bytes | None],
        nbytes: int, deadline: float,
    ) -> Ticket:  # fmt: skip
        """Find out which pages are absent and reserve space for them, evicting others if need be."""
        with self.locked(deadline):
            started_ns = now_ns()  # after the wait: else all that others used meanwhile would be spared
            space = self._spaces.register(namespace, shard)
            slots = self._table.slots(rows_.join_keys(keys), space)
            present = [i for i, slot in enumerate(slots) if slot >= 0]
            if present:
                self._refresh(keys, slots, present, parents, space)
            absent = sorted({keys[i]: i for i in reversed(range(len(keys))) if slots[i] < 0}.values())
            if not absent:
                return Ticket(None, [], present, {})
            self._touch_ancestors({parents[i] for i in absent}, space)
            reachable, orphans = self._split_orphans(absent, keys, parents, space)
            absent = reachable + orphans
            reservation, places, cause = self._allocate(absent, len(reachable), nbytes, started_ns)
            failed = dict.fromkeys(absent[len(places) :], cause)
            return Ticket(reservation, places, present, failed)

    def _split_orphans(
        self, absent: list[int], keys: Sequence[bytes], parents: Sequence[bytes | None], space: int
    ) -> tuple[list[int], list[int]]:
        """Pages that a prefix lookup will reach, and those whose parent is neither stored nor in this batch."""
        named = sorted({parent for i in absent if (parent := parents[i]) is not None})
        slots = self._table.slots(rows_.join_keys(named), space) if named else []
        rooted = {parent for parent, slot in zip(named, slots, strict=True) if slot >= 0}
        reachable, orphans = [], []
        for i in absent:
            if parents[i] is None or parents[i] in rooted:
                rooted.add(keys[i])
                reachable.append(i)
            else:
                orphans.append(i)
        return reachable, orphans

    def _allocate(
        self, absent: list[int], evict_for: int, nbytes: int, started_ns: int
    ) -> tuple[Reservation | None, list[Place], str]:
        """Space for as many pages as there is room for; others are evicted for the first `evict_for` only.

        Orphans take what is free: evicting for them would trade pages that can be found for some that cannot.
        """
        count = len(absent)
        cause = "full"
        for attempt in range(4):
            with self._ledger.transaction() as draft:
                cause = self._allocator.make_room(draft, count, nbytes)
                short, slots_short = self._allocator.shortage(draft, evict_for, nbytes)
                if (short <= 0 and slots_short <= 0) or attempt == 3:
                    return (*self._take(draft, absent, nbytes), cause)
            if attempt == 0 and self._reclaim():
                continue
            if not self._evictor.evict(short, slots_short, started_ns):
                break
        with self._ledger.transaction() as draft:
            return (*self._take(draft, absent, nbytes), cause)

    def _take(self, draft: Draft, absent: list[int], nbytes: int) -> tuple[Reservation | None, list[Place]]:
        pages = self._allocator.take(draft, len(absent), nbytes)
        if not pages:
            return None, []
        slots = draft.slots.take_whole(len(pages), 1)
        number = draft.next_generation()
        space_runs = as_runs(piece for page in pages for piece in page)
        slot_runs = as_runs((slot, 1) for slot in slots)
        reservation = Reservation(self._owners.id, number, space_runs, slot_runs)
        draft.reserve(reservation)
        return reservation, [Place(i, slot, page) for i, slot, page in zip(absent, slots, pages, strict=False)]

    def _refresh(
        self, keys: Sequence[bytes], slots: list[int], present: list[int], parents: Sequence[bytes | None], space: int
    ) -> None:
        """A page put again counts as used, and its link to its parent is renewed."""
        self._table.touch([slots[i] for i in present])
        by_key = dict(zip(keys, slots, strict=True))
        for i in present:
            parent = by_key.get(parents[i] or b"", -1)
            if parent >= 0 and self._table.depth[parent] < self._table.depth[slots[i]]:
                self._table.parent[slots[i]] = parent

    def _touch_ancestors(self, parents: set[bytes | None], space: int) -> None:
        """Mark the chains that new pages hang on as used, so that making room never takes their beginnings."""
        names = [parent for parent in parents if parent is not None]
        if not names:
            return
        chain: set[int] = set()
        for slot in self._table.slots(rows_.join_keys(names), space):
            while 0 <= slot < self._table.max_pages and slot not in chain and self._table.granules[slot]:
                chain.add(slot)
                slot = int(self._table.parent[slot])
        self._table.touch(sorted(chain))

    def commit(
        self, ticket: Ticket, keys: Sequence[bytes], namespace: Namespace, shard: Shard,
        parents: Sequence[bytes | None], nbytes: int, deadline: float,
    ) -> dict[int, str]:  # fmt: skip
        """Make complete pages visible. Returns for each page of the ticket "stored", "present" or a cause."""
        reservation = ticket.reservation
        if reservation is None:
            return {}
        try:
            with self.locked(deadline):
                space = self._spaces.register(namespace, shard)
                with self._transactions.begin() as draft:
                    outcome, draft.record = self._publish(draft, ticket, reservation, keys, space, parents, nbytes)
                return outcome
        except BaseException:
            self.abandon(reservation)
            raise

    def _publish(
        self, draft: Draft, ticket: Ticket, reservation: Reservation, keys: Sequence[bytes], space: int,
        parents: Sequence[bytes | None], nbytes: int,
    ) -> tuple[dict[int, str], Record]:  # fmt: skip
        table = self._table
        outcome: dict[int, str] = {place.index: "error" for place in ticket.places}
        if not draft.release(reservation):
            # Somebody took this process for dead (its owner file was deleted): the space is no longer ours.
            return dict.fromkeys(outcome, "reclaimed"), self._transactions.record(draft)
        places = [place for place in ticket.places if place.checksum is not None]
        joined = rows_.join_keys([keys[place.index] for place in places])
        hashes = rows_.hash_keys(joined, space)
        cells = table.plan_cells(hashes).tolist()
        there = table.slots(joined, space)
        kept: list[int] = []
        for n, place in enumerate(places):
            if there[n] >= 0:
                outcome[place.index] = "present"
            elif cells[n] < 0:
                outcome[place.index] = "index"
            elif any(first + granules > draft.high_water for first, granules in place.extents):
                outcome[place.index] = "full"
            else:
                outcome[place.index] = "stored"
                kept.append(n)
        kept_places = [places[n] for n in kept]
        rows = self._rows(draft, kept_places, keys, space, parents, nbytes)
        dropped = [place for place in ticket.places if outcome[place.index] != "stored"]
        pieces = [piece for place in dropped for piece in place.extents]
        self._evictor.free(draft, pieces, [place.slot for place in dropped])
        slots = np.array([place.slot for place in kept_places], dtype=np.uint32)
        record = self._transactions.record(
            draft, pages=len(kept), granules=sum(row.granules for row in rows),
            set_cells=np.array([cells[n] for n in kept], dtype=np.uint64), set_words=table.words(hashes[kept], slots),
            set_slots=slots,
            set_rows=np.frombuffer(b"".join(row.encode() for row in rows), np.uint8).reshape(-1, ROW_NBYTES),
        )  # fmt: skip
        return outcome, record

    def _rows(
        self, draft: Draft, places: list[Place], keys: Sequence[bytes], space: int, parents: Sequence[bytes | None],
        nbytes: int,
    ) -> list[Row]:  # fmt: skip
        """Rows of new pages; a parent is looked up among them first and in the table otherwise."""
        table = self._table
        batch = {keys[place.index]: place for place in places}
        outside = sorted({p for place in places if (p := parents[place.index]) is not None and p not in batch})
        known = dict(zip(outside, table.slots(rows_.join_keys(outside), space), strict=True)) if outside else {}
        depths: dict[bytes, int] = {}
        rows = []
        for place in places:
            key, parent_key = keys[place.index], parents[place.index]
            parent, depth = NONE, 0
            if parent_key is not None and parent_key in depths:
                parent, depth = batch[parent_key].slot, depths[parent_key] + 1
            elif parent_key is not None and known.get(parent_key, -1) >= 0:
                parent = known[parent_key]
                depth = int(table.depth[parent]) + 1
            depths[key] = depth
            extents = place.extents
            if len(extents) > INLINE_EXTENTS:
                draft.put_extents(place.slot, as_runs(extents))
            rows.append(Row(
                key, draft.next_generation(), place.checksum or 0, space, nbytes,
                sum(granules for _, granules in extents), parent, depth, int(time.time()), len(extents),
                tuple(extents) if len(extents) <= INLINE_EXTENTS else (extents[0],),
            ))  # fmt: skip
        return rows

    # -- forget -------------------------------------------------------------------------------------------------

    def forget_keys(self, keys: Sequence[bytes], space: int, deadline: float) -> int:
        with self.locked(deadline):
            slots = [slot for slot in self._table.slots(rows_.join_keys(keys), space) if slot >= 0]
            removed = self._evictor.forget(np.unique(np.array(slots, dtype=np.int64)))
            self._table.add_counters({"removed_pages": removed})
            return removed

    def clear(self, spaces: set[int] | None, deadline: float) -> int:
        """Forget all pages of these spaces (None: of all), in steps between which others may write."""
        removed = 0
        while True:
            with self.locked(deadline):
                live = self._table.live_slots()
                if spaces is not None:
                    live = live[np.isin(self._table.space[live], np.array(list(spaces), dtype=np.uint64))]
                if not len(live):
                    return removed
                deepest_first = np.argsort(-self._table.depth[live].astype(np.int64), kind="stable")
                count = self._evictor.forget(live[deepest_first[:FORGET_BATCH]])
                self._table.add_counters({"removed_pages": count})
                removed += count
                if not count:
                    return removed

    # -- housekeeping -------------------------------------------------------------------------------------------

    def _give_back(self, draft: Draft, reservation: Reservation) -> None:
        if draft.release(reservation):
            self._evictor.free(
                draft, [(int(a), int(b)) for a, b in reservation.space_runs],
                [int(slot) for slot, _ in reservation.slot_runs],
            )  # fmt: skip

    def _reclaim(self, *, alone: bool = False) -> int:
        """Take back what dead writers had reserved; return the granules. `alone`: every other owner is dead."""
        reclaimed = 0
        with self._ledger.transaction() as draft:
            dead: dict[bytes, bool] = {}
            for reservation in draft.reservations():
                owner = reservation.owner
                if owner not in dead:
                    dead[owner] = self._owners.is_dead(owner) or (alone and owner != self._owners.id)
                if dead[owner]:
                    self._give_back(draft, reservation)
                    reclaimed += int(reservation.space_runs[:, 1].sum())
        for owner in (owner for owner, is_dead in dead.items() if is_dead):
            self._forget_owner(owner)
        if reclaimed:
            self._table.add_counters({"reclaimed_nbytes": reclaimed * 4096})
        return reclaimed

    def bury(self, deadline: float) -> None:
        """Take over what the dead have left: reservations and counts."""
        with self.locked(deadline):
            self._reclaim(alone=self._arena.is_alone())
            with self._ledger.peek() as draft:
                holders = {reservation.owner for reservation in draft.reservations()}
            for owner in self._owners.dead():
                if owner not in holders:
                    self._forget_owner(owner)

    def _forget_owner(self, owner: bytes) -> None:
        self._table.add_counters(as_counts(self._owners.counts(owner)))
        self._owners.forget(owner)

    def resize(self, capacity: int, deadline: float) -> None:
        """Make `capacity` granules the limit; pages beyond it are evicted before.

        So a kill at any moment leaves the old capacity or the new one, and no page beyond it. Writers that are just
        filling space beyond it lose what they write, and nobody gets that space before they are done or dead.
        """
        with self.locked(deadline):
            self._reclaim()
            self._arena.extend(capacity)  # first: a file smaller than the capacity is one that cannot be trusted
            self._table.add_counters({"evicted_pages": self._evictor.forget(self._slots_beyond(capacity))})
            with self._ledger.transaction() as draft:
                draft.capacity = capacity
                draft.free.clip(capacity)
                draft.high_water = min(draft.high_water, capacity)
            self._follow_capacity(capacity)

    def unsound(self, deadline: float) -> str | None:
        """See `soundness.unsound`."""
        with self.locked(deadline), self._ledger.peek() as draft:
            return unsound(draft, self._table)

    def trim(self, deadline: float) -> None:
        """Give the arena's space beyond the limit back to the file system, if no other process maps it."""
        with self.locked(deadline), self._ledger.peek() as draft:
            self._arena.punch_from(draft.high_water)

    def _slots_beyond(self, limit: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        live = self._table.live_slots()
        beyond = np.zeros(len(live), dtype=np.bool_)
        with self._ledger.peek() as draft:
            for at in range(0, len(live), _ROWS_AT_ONCE):
                slots = live[at : at + _ROWS_AT_ONCE]
                rows = np.take(self._table.rows, slots, axis=0).reshape(-1).view(ROW_DTYPE)
                words = rows["extents"].astype(np.int64)
                for extent in range(0, 2 * INLINE_EXTENTS, 2):
                    beyond[at : at + len(slots)] |= words[:, extent] + words[:, extent + 1] > limit
                for i in np.flatnonzero(rows["num_extents"] > INLINE_EXTENTS).tolist():
                    listed = draft.peek_extents(int(slots[i]))
                    beyond[at + i] = (listed.sum(axis=1, dtype=np.int64) > limit).any()
        return live[beyond]
