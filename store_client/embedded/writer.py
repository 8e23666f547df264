"""Everything that changes a pool: reserve, commit, forget, reclaim, resize. All under the write lock.

A put takes the lock twice, briefly: to reserve space, and to make complete pages visible. The bytes are copied in
between, without it. Each step is one ledger transaction, so a writer killed anywhere leaves the pool as it was before
or after a step; what it had reserved comes back when somebody finds its owner dead.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from store_client.embedded.allocator import Allocator, as_runs
from store_client.embedded.arena import GRANULE, Arena
from store_client.embedded.chains import Chains
from store_client.embedded.evicted import Evicted
from store_client.embedded.evictor import FORGET_BATCH, Evictor
from store_client.embedded.ledger import Draft, Ledger, Reservation
from store_client.embedded.locks import FileLock
from store_client.embedded.names import U8, Slots, Spaces, hash_keys, join_keys
from store_client.embedded.owners import Owners
from store_client.embedded.policies import Hints
from store_client.embedded.put import Place, PutPages, PutPlan
from store_client.embedded.row import NONE, ROW_DTYPE, sealed
from store_client.embedded.table import Found, Table, now_ns
from store_client.fate import Lost

_RECLAIM_PERIOD_S = 5.0


class Writer:
    """The one way to change a pool. Methods that take `deadline` (of `time.monotonic()`) raise LockTimeout."""

    def __init__(
        self, lock: FileLock, ledger: Ledger, table: Table, arena: Arena, spaces: Spaces, owners: Owners,
        hints: Hints | None, evicted: Evicted,
    ) -> None:  # fmt: skip
        self._lock, self._ledger, self._table, self._arena = lock, ledger, table, arena
        self._spaces, self._owners = spaces, owners
        self._evictor = Evictor(table, ledger, hints, evicted)
        self._allocator = Allocator(arena)
        self._chains = Chains(table, spaces)
        self._abandoned: list[Reservation] = []
        self._doubted: list[tuple[int, Found | None]] = []
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

    def settle(self, deadline: float) -> None:
        """Have old business done: counts handed in, space given back, corrupt pages forgotten."""
        with self.locked(deadline):
            pass

    def _catch_up(self) -> None:
        """Apply what a writer that was killed right after its commit, or another process, has changed."""
        with self._ledger.peek() as draft:
            self._follow_capacity(draft.capacity)
            self._ledger.catch_up(draft)

    def _follow_capacity(self, capacity: int) -> None:
        self._arena.limit = capacity
        if self._table.capacity_granules != capacity:
            self._table.set_capacity(capacity)

    def _settle(self) -> None:
        """Hand in counts, give back what this process could not commit, forget what it found corrupt."""
        with self._table.handing_over():
            self._table.add_counters(self._owners.counters.take())
        if self._abandoned:
            abandoned = list(self._abandoned)
            with self._ledger.transaction() as draft:
                for reservation in abandoned:
                    self._give_back(draft, reservation)
            del self._abandoned[: len(abandoned)]  # other threads append meanwhile
        if self._doubted:
            doubted, self._doubted = self._doubted, []
            self._table.check([slot for slot, found in doubted if found is None])
            corrupt = [slot for slot, found in doubted if found is not None and self._table.unchanged(found)]
            self._evictor.forget(np.unique(np.array(corrupt, dtype=np.int64)), Lost.CORRUPT)
        if time.monotonic() >= self._next_reclaim:
            self._next_reclaim = time.monotonic() + _RECLAIM_PERIOD_S
            self._reclaim()

    @property
    def has_doubts(self) -> bool:
        return bool(self._doubted)

    def doubt(self, slot: int, found: Found | None) -> None:
        """Have a page dealt with at the next occasion: a corrupt one is forgotten, and what was met half written or
        broken (`found` None) is looked at again. Takes no lock."""
        if len(self._doubted) < FORGET_BATCH:
            self._doubted.append((slot, found))

    def abandon(self, reservation: Reservation) -> None:
        """Have space given back at the next occasion; takes no lock."""
        self._abandoned.append(reservation)

    # -- put ----------------------------------------------------------------------------------------------------

    def reserve(self, pages: PutPages, deadline: float) -> PutPlan:
        """Find out which pages are absent and reserve space for them, evicting others if need be."""
        with self.locked(deadline):
            started_ns = now_ns()  # after the wait: else all that others used meanwhile would be spared
            space = self._spaces.register(pages.namespace, pages.shard)
            slots = self._table.slots(join_keys(pages.keys), space)
            present = [i for i, slot in enumerate(slots) if slot >= 0]
            if present and pages.used_ns is None:
                self._chains.refresh(pages, slots, present)
            outcome = dict.fromkeys(present, "present")
            absent = sorted({pages.keys[i]: i for i in reversed(range(len(slots))) if slots[i] < 0}.values())
            if not absent:
                return PutPlan(pages, None, [], outcome)
            beneath = self._chains.beneath(pages, absent)
            if pages.used_ns is None:
                parents = self._chains.slots_by_key([*pages.parents_of(absent), *pages.rests_on], space)
                self._chains.touch_ancestors([*parents.values(), *beneath.values()])
            reachable, orphans = self._chains.split_orphans(pages, absent, space, beneath)
            absent = reachable + orphans
            evict_for = len(reachable) if pages.used_ns is None else 0
            reservation, places, cause = self._allocate(absent, evict_for, pages.nbytes, started_ns)
            return PutPlan(pages, reservation, places, outcome | dict.fromkeys(absent[len(places) :], cause))

    def _allocate(
        self, absent: list[int], evict_for: int, nbytes: int, started_ns: int
    ) -> tuple[Reservation | None, list[Place], str]:
        """Space for as many pages as there is room for; others are evicted for the first `evict_for` only.

        Orphans take what is free: evicting for them would trade pages that can be found for some that cannot.
        """
        tries = 3
        while True:
            with self._ledger.transaction() as draft:
                cause = self._allocator.make_room(draft, len(absent), nbytes)
                short, slots_short = self._allocator.shortage(draft, evict_for, nbytes)
                if not tries or (short <= 0 and slots_short <= 0):
                    return (*self._take(draft, absent, nbytes), cause)
            tries -= 1
            if tries == 2 and self._reclaim():
                continue
            if not self._evictor.evict(short, slots_short, started_ns):
                tries = 0

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

    def commit(self, plan: PutPlan, deadline: float) -> dict[int, str]:
        """Make complete pages visible. Returns for each place of the plan "stored", "present" or a cause."""
        if plan.reservation is None:
            return {}
        try:
            with self.locked(deadline):
                if plan.pages.clears not in (None, self._table.clears):
                    with self._ledger.transaction() as draft:
                        self._give_back(draft, plan.reservation)
                    return dict.fromkeys((place.index for place in plan.places), "cleared")
                space = self._spaces.register(plan.pages.namespace, plan.pages.shard)
                outcome = None
                with self._ledger.transaction() as draft:
                    if draft.release(plan.reservation):
                        outcome = self._publish(draft, plan, space)
                if outcome is not None:
                    self._note_use(plan, outcome, space)
                    return outcome
                # Somebody took this process for dead (its owner file was deleted): the space is no longer ours.
                return dict.fromkeys((place.index for place in plan.places), "reclaimed")
        except BaseException:
            self.abandon(plan.reservation)
            raise

    def _note_use(self, plan: PutPlan, outcome: Mapping[int, str], space: int) -> None:
        """What the table says of the use of new pages, where that is not just "now"."""
        pages = plan.pages
        stored = [place for place in plan.places if outcome[place.index] == "stored"]
        if not stored:
            return
        if pages.used_ns is not None:
            self._table.backdate([place.slot for place in stored], [pages.used_ns[place.index] for place in stored])
        elif pages.mark:
            self._table.touch([place.slot for place in stored], pages.mark)
        prints = hash_keys(join_keys([pages.keys[place.index] for place in stored]), space)
        self._evictor.stored(np.array([place.slot for place in stored], dtype=np.int64), prints)

    def _publish(self, draft: Draft, plan: PutPlan, space: int) -> dict[int, str]:
        table, keys = self._table, plan.pages.keys
        outcome = dict.fromkeys((place.index for place in plan.places), "unfilled")
        places = [place for place in plan.places if place.checksum is not None]
        joined = join_keys([keys[place.index] for place in places])
        hashes = hash_keys(joined, space)
        cells = table.cells.plan(hashes)
        held = plan.reservation.space_runs if plan.reservation is not None else as_runs([])
        shrunk = bool((held.sum(axis=1, dtype=np.int64) > draft.high_water).any())
        for place, cell, slot in zip(places, cells.tolist(), table.slots(joined, space), strict=True):
            beyond = shrunk and any(first + granules > draft.high_water for first, granules in place.extents)
            outcome[place.index] = "present" if slot >= 0 else "index" if cell < 0 else "full" if beyond else "stored"
        kept = [n for n, place in enumerate(places) if outcome[place.index] == "stored"]
        dropped = [place for place in plan.places if outcome[place.index] != "stored"]
        self._evictor.free(
            draft, [piece for place in dropped for piece in place.extents], [place.slot for place in dropped]
        )
        rows = self._rows(draft, plan.pages, [places[n] for n in kept], joined[kept], space)
        slots = np.array([places[n].slot for n in kept], dtype=np.uint32)
        self._ledger.record(
            draft, len(kept), int(rows["granules"].sum(dtype=np.int64)),
            set_cells=cells[kept].astype(np.uint64), set_words=table.cells.values(hashes[kept], slots), set_slots=slots,
            set_rows=sealed(rows),
        )  # fmt: skip
        return outcome

    def _rows(
        self, draft: Draft, pages: PutPages, places: list[Place], keys: U8, space: int
    ) -> npt.NDArray[np.void]:
        """Rows of new pages, without checks; a parent is looked up among them first and in the table otherwise."""
        known = self._chains.slots_by_key(pages.parents_of(place.index for place in places), space)
        links = {key: (slot, int(self._table.depth[slot])) for key, slot in known.items()}
        beneath = self._chains.beneath(pages, [place.index for place in places])
        hung: list[tuple[int, int]] = []
        for place in places:
            parent, depth = links.get(pages.parents[place.index] or b"", (NONE, -1))
            if (slot := beneath.get(place.index, -1)) >= 0:
                parent, depth = slot, int(self._table.depth[slot])
            links[pages.keys[place.index]] = place.slot, depth + 1
            hung.append((parent, depth + 1))
        rows = np.zeros(len(places), dtype=ROW_DTYPE)
        rows["parent"], rows["depth"] = np.array(hung, dtype=np.uint32).reshape(-1, 2).T
        rows["key"], rows["space"], rows["nbytes"], rows["created"] = keys, space, pages.nbytes, int(time.time())
        first = draft.next_generation(len(places))
        rows["generation"] = np.arange(first, first + len(places), dtype=np.uint64)
        rows["checksum"] = np.array([place.checksum for place in places], dtype=np.uint64)
        rows["extents"][:, :2] = as_runs(place.extents[0] for place in places)
        rows["granules"] = rows["extents"][:, 1]
        rows["num_extents"] = [len(place.extents) for place in places]
        for n in np.flatnonzero(rows["num_extents"] > 1).tolist():
            place = places[n]
            rows["granules"][n] = sum(granules for _, granules in place.extents)
            if place.is_listed:
                draft.put_extents(place.slot, as_runs(place.extents))
            else:
                rows["extents"][n, : 2 * len(place.extents)] = as_runs(place.extents).ravel()
        return rows

    # -- forget -------------------------------------------------------------------------------------------------

    def forget_keys(self, keys: Sequence[bytes], space: int, deadline: float) -> int:
        with self.locked(deadline):
            slots = [slot for slot in self._table.slots(join_keys(keys), space) if slot >= 0]
            removed = self._evictor.forget(np.unique(np.array(slots, dtype=np.int64)), Lost.REMOVED)
            self._table.add_counters({"removed_pages": removed})
            return removed

    def clear(self, spaces: set[int] | None, wait_s: float) -> int:
        """Forget all pages of these spaces (None: of all) that there are now, in steps between which others may write.

        That takes 3 to 5 s for a million pages. Raises LockTimeout where the lock was not free for `wait_s`.
        """
        with self.locked(time.monotonic() + wait_s):
            self._table.count_clear()
            pages = self._of(spaces, self._table.live_slots())
        deepest_first = pages[np.argsort(-self._table.depth[pages].astype(np.int64), kind="stable")]
        removed = 0
        for at in range(0, len(deepest_first), FORGET_BATCH):
            with self.locked(time.monotonic() + wait_s):
                batch = self._of(spaces, deepest_first[at : at + FORGET_BATCH])  # as they are now: others write as well
                count = self._evictor.forget(batch, Lost.CLEARED)
                self._table.add_counters({"removed_pages": count})
                removed += count
        return removed

    def _of(self, spaces: set[int] | None, slots: Slots) -> Slots:
        """Those of the slots that are, or were, of these spaces; None for all."""
        if spaces is None:
            return slots
        return slots[np.isin(self._table.space[slots], np.array(list(spaces), dtype=np.uint64))]

    # -- housekeeping -------------------------------------------------------------------------------------------

    def _give_back(self, draft: Draft, reservation: Reservation) -> None:
        if draft.release(reservation):
            self._evictor.free(
                draft, [(int(a), int(b)) for a, b in reservation.space_runs],
                [int(slot) for slot, _ in reservation.slot_runs],
            )  # fmt: skip

    def _reclaim(self, *, alone: bool = False) -> int:
        """Take back what dead writers had reserved; return the granules. `alone`: every other owner is dead, though the
        device of one may be about to stop."""
        reclaimed = 0
        with self._ledger.transaction() as draft:
            dead: dict[bytes, bool] = {}
            for reservation in draft.reservations():
                owner = reservation.owner
                if owner not in dead:
                    dead[owner] = self._owners.is_dead(owner) or (
                        alone and owner != self._owners.id and not self._owners.is_stopping(owner)
                    )
                if dead[owner]:
                    self._give_back(draft, reservation)
                    reclaimed += int(reservation.space_runs[:, 1].sum())
        for owner in (owner for owner, is_dead in dead.items() if is_dead):
            self._forget_owner(owner)
        if reclaimed:
            self._table.add_counters({"reclaimed_nbytes": reclaimed * GRANULE})
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
        with self._table.handing_over():
            self._table.add_counters(self._owners.counts(owner))
            self._owners.forget(owner)

    def resize(self, capacity: int, deadline: float) -> None:
        """Make `capacity` granules the limit; pages beyond it are evicted before.

        So a kill at any moment leaves the old capacity or the new one, and no page beyond it. Writers that are just
        filling space beyond it lose what they write, and nobody gets that space before they are done or dead.
        """
        with self.locked(deadline):
            self._reclaim()
            self._arena.extend(capacity)  # first: a file smaller than the capacity is one that cannot be trusted
            evicted = self._evictor.forget(self._slots_beyond(capacity), Lost.SHRUNK)
            self._table.add_counters({"evicted_pages": evicted})
            with self._ledger.transaction() as draft:
                draft.capacity = capacity
                draft.free.clip(capacity)
                draft.high_water = min(draft.high_water, capacity)
            self._follow_capacity(capacity)

    @property
    def eviction(self) -> str:
        """Name of the pool's eviction policy."""
        return self._evictor.policy_name

    def choose_eviction(self, name: str, deadline: float) -> None:
        """Name the pool's eviction policy, one of `POLICIES`, for all its processes from now on."""
        with self.locked(deadline):
            self._evictor.choose_policy(name)

    def begin_counting_uses(self, deadline: float) -> None:
        """See `Table.begin_counting_uses`."""
        with self.locked(deadline):
            self._table.begin_counting_uses()

    def unsound(self, deadline: float) -> str | None:
        """See `Ledger.unsound`."""
        with self.locked(deadline):
            return self._ledger.unsound(self._arena.granules)

    def trim(self, deadline: float) -> int:
        """Give the arena's space beyond the limit back to the file system, if no other process maps it.

        Returns the granules that are secured.
        """
        with self.locked(deadline), self._ledger.peek() as draft:
            self._arena.punch_from(draft.high_water)
            return draft.high_water

    def secured(self, deadline: float) -> int:
        """Granules of the arena, from the first on, that the file holds."""
        with self.locked(deadline), self._ledger.peek() as draft:
            return draft.high_water

    def _slots_beyond(self, limit: int) -> Slots:
        beyond, listed = self._table.slots_beyond(limit)
        with self._ledger.peek() as draft:
            wide = [slot for slot in listed if (draft.peek_extents(slot).sum(axis=1, dtype=np.int64) > limit).any()]
        return np.union1d(beyond, np.array(wide, dtype=np.int64))
