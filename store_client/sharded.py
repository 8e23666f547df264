"""What one rank sees of a namespace: its own shard, and those of instances with another TP or PP size.

A page that the rank's own shard lacks is put together from the pages of shards that overlap with it, which a store that
fetches pages from elsewhere is asked for once it has nothing more of the own one. Moving their bytes is the caller's
business, since only it knows its memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client.base import Bytes, Fill, Lookup, Put, Seen, Settle, SettleFirst, Space, Store
from store_client.fate import UNKNOWN, Fate, Known

Bools: TypeAlias = npt.NDArray[np.bool_]

ConsumePart: TypeAlias = Callable[[int, Shard, Bytes], None]
"""Called with (number of the page, shard, bytes of that shard's page); see `ShardView.read`."""

_ASK_AGAIN_S = 0.002
"""Between two lookups of a thread that waits for the second answer."""
_LOOK_S = 1.0
"""At a miss the pool is asked which shards it has, but not again for so long."""


class ShardView:
    """The pages of a namespace as the rank that holds `shard` needs them.

    What the rank's own shard has costs what it costs in a `Space`; other shards are asked for the rest alone. Methods
    may be called from any thread and raise what those of a `Space` raise. `unit_nbytes` is the size of one layer and
    one KV head of a page, K and V.
    """

    def __init__(self, store: Store, namespace: Namespace, shard: Shard, unit_nbytes: int) -> None:
        self._store, self._namespace = store, namespace
        self.shard = shard
        self.nbytes = shard.num_units * unit_nbytes
        self.own: Space = store.space(namespace, shard, self.nbytes)
        self._unit_nbytes = unit_nbytes
        self._others = _Others(shard, [], store.shards_elsewhere(namespace), self._open)  # which may begin to ask now
        self._look_again_s = 0.0

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        """How many leading pages are present, here or in parts, and whether more may come; as `Space.lookup`."""
        own = self.own.lookup(keys)
        if own.pages >= len(keys):
            return Lookup(len(keys))
        others = self._look()
        if not others.parts:
            return own
        count = own.pages
        if others.covered(keys[count : count + 1])[0]:
            rest = keys[count:]
            present = others.covered(rest) | np.array(self.own.contains(rest), dtype=bool)
            count += len(rest) if present.all() else int(present.argmin())
            own = self.own.lookup(keys[count:])  # what is on its way behind those that others cover
            count += own.pages
        following = keys[count + own.coming :]
        if own.pending or not following:
            return Lookup(count, own.pending, min(own.coming, len(keys) - count), own.wait_s, own.unheard)
        found = others.lookup(following)
        unheard = (own.unheard or found.unheard) and found.coming < len(following)
        return Lookup(count, found.pending, own.coming + found.coming, found.wait_s, unheard)

    def prefetch(
        self,
        keys: Sequence[bytes],
        *,
        parent: bytes | None = None,
        prefill_tokens_s: float | None = None,
        deadline_s: float = 30.0,
        patient: bool = False,
    ) -> None:
        """Say that these pages will be looked up, as `Space.prefetch`.

        Other shards are asked for at once where nobody elsewhere has the own one, and else once they are looked up.
        """
        said: dict[str, Any] = {
            "parent": parent, "prefill_tokens_s": prefill_tokens_s, "deadline_s": deadline_s, "patient": patient,
        }  # fmt: skip
        self.own.prefetch(keys, **said)
        others = self._look()
        if others.elsewhere:
            wanted = () if self.shard in others.elsewhere else keys
            others.prefetch(wanted, **said)

    def lookup_within(
        self, keys: Sequence[bytes], wait_s: float, wanted: Callable[[], bool] = lambda: True
    ) -> Lookup:
        """As `lookup`, for a thread that may wait: asks again for at most `wait_s` while the answer is pending, and is
        `wanted`."""
        give_up_s = time.monotonic() + wait_s
        while (found := self.lookup(keys)).pending and time.monotonic() < give_up_s and wanted():
            time.sleep(min(_ASK_AGAIN_S, wait_s))
        return found

    def seek(self, keys: Sequence[bytes], *, prefill_s: float | None = None) -> Seen:
        """Which of these pages can be fetched from elsewhere, whole or in parts; as `Space.seek`."""
        own = self.own.seek(keys, prefill_s=prefill_s)
        missing = [i for i, found in enumerate(own.found) if not found]
        others = self._look()
        if own.pending or not missing or not any(part.fetched for part in others.parts):
            return own
        parts = others.seek([keys[i] for i in missing], prefill_s)
        for i, found in zip(missing, parts.found, strict=True):
            own.found[i] = found
        return Seen(own.found, parts.pending, parts.wait_s, own.unheard or parts.unheard)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether the page is present, here or in parts."""
        present = self.own.contains(keys)
        missing = [i for i, found in enumerate(present) if not found]
        if missing and (others := self._look()).parts:
            covered = others.covered([keys[i] for i in missing])
            for i, found in zip(missing, covered.tolist(), strict=True):
                present[i] = found
        return present

    def explain(self, keys: Sequence[bytes]) -> list[Fate]:
        """As `Space.explain`: stored where the page can be put together, else what is known of it or of a part."""
        parts = self._look().parts
        if not parts:
            return self.own.explain(keys)
        fates = [self.own.explain(keys), *(part.space.explain(keys) for part in parts)]
        of_parts = ([fate for fate in each if fate.cause is not None] for each in zip(*fates, strict=True))
        known = [min(found, key=lambda fate: fate.ago_s, default=UNKNOWN) for found in of_parts]
        present = self.contains(keys)
        return [Fate(Known.STORED) if there else fate for there, fate in zip(present, known, strict=True)]

    def read(self, keys: Sequence[bytes], consume: ConsumePart, *, settle: Settle | None = None) -> list[bool]:
        """Show the bytes of every present page to `consume(i, part, view)`, once for each of its parts.

        The parts of a page together have all layers and heads of the rank's shard. A part may have more,
        and two parts of writers that split the model at odd places may have some in common. `view` is as in
        `Space.read`; what `consume` made of page i is right if and only if the returned list has True at i.
        `settle` is as there as well, and called for each shard that pages were shown of.
        """
        done = self.own.read(keys, lambda i, page: consume(i, self.shard, page), nbytes=self.nbytes, settle=settle)
        missing = [i for i, found in enumerate(done) if not found]
        if missing and (others := self._look()).parts:
            found = others.read(
                [keys[i] for i in missing], lambda n, part, page: consume(missing[n], part, page), settle
            )
            for i, complete in zip(missing, found.tolist(), strict=True):
                done[i] = complete
        return done

    def write(
        self,
        keys: Sequence[bytes],
        fill: Fill,
        *,
        parents: Sequence[bytes | None],
        deadline_s: float,
        settle: SettleFirst | None = None,
    ) -> list[Put]:
        """Store the absent pages in the rank's own shard, as `Space.write`; those that others cover are PRESENT."""
        others = self._look()
        if not others.parts:
            return self.own.write(keys, fill, nbytes=self.nbytes, parents=parents, deadline_s=deadline_s, settle=settle)
        names = list(dict.fromkeys([*keys, *(parent for parent in parents if parent is not None)]))
        elsewhere = {name for name, covered in zip(names, others.covered(names).tolist(), strict=True) if covered}
        absent = [i for i, key in enumerate(keys) if key not in elsewhere]
        roots = self._without(elsewhere.intersection(parent for parent in parents if parent is not None))
        results = [Put.PRESENT] * len(keys)
        written = self.own.write(
            [keys[i] for i in absent],
            lambda n, page: fill(absent[n], page),
            nbytes=self.nbytes,
            parents=[None if parents[i] in roots else parents[i] for i in absent],
            deadline_s=deadline_s,
            settle=settle,
        )
        for i, result in zip(absent, written, strict=True):
            results[i] = result
        return results

    def _without(self, names: set[bytes]) -> set[bytes]:
        """Those that the own shard lacks: as a parent they would make their child an orphan, which nobody reaches."""
        listed = list(names)
        return {name for name, found in zip(listed, self.own.contains(listed), strict=True) if not found}

    def clear(self) -> int:
        """Forget every page that this rank could read, so also those of other instances; return how many there were."""
        return self.own.clear() + sum(part.space.clear() for part in self._look().parts)

    def record_lookup(self, *, hit_pages: int, missed_pages: int, page_tokens: int) -> None:
        self.own.record_lookup(hit_pages=hit_pages, missed_pages=missed_pages, page_tokens=page_tokens)

    def _look(self) -> _Others:
        """The other shards, as the pool knew them at most a second ago, and as is known of elsewhere."""
        now_s, here = time.monotonic(), self._others.here
        if now_s >= self._look_again_s:
            self._look_again_s = now_s + _LOOK_S
            here = self._store.shards(self._namespace)
        elsewhere = self._store.shards_elsewhere(self._namespace)
        if here != self._others.here or elsewhere != self._others.elsewhere:
            self._others = _Others(self.shard, here, elsewhere, self._open)
        return self._others

    def _open(self, shard: Shard, fetched: bool) -> tuple[Space, int]:
        nbytes = shard.num_units * self._unit_nbytes
        return self._store.space(self._namespace, shard, nbytes if fetched else None), nbytes


@dataclass(frozen=True, slots=True)
class _Part:
    """A shard that overlaps with the rank's; `cells` marks what it has of it."""

    shard: Shard
    space: Space
    nbytes: int
    cells: Bools
    fetched: bool
    """Whether its pages may be fetched from elsewhere."""


_OpenPart: TypeAlias = Callable[[Shard, bool], tuple[Space, int]]
"""Called with (shard, whether its pages may be fetched); the space and the size of its pages."""


class _Others:
    """What pages of `shard` can be put together from, of the shards that are `here` and `elsewhere`.

    Their borders cut the rank's shard into cells, each of which a part has as a whole or not at all. A page is covered
    where every cell is. Where all parts together leave a cell out, `parts` is empty.
    """

    def __init__(self, shard: Shard, here: list[Shard], elsewhere: list[Shard], open_part: _OpenPart) -> None:
        self.here, self.elsewhere = here, elsewhere
        self.parts: list[_Part] = []
        every = dict.fromkeys([*here, *elsewhere])
        found = {other: common for other in every if other != shard and (common := other.common(shard))}
        cells = shard.cut(found)
        self._num_cells = len(cells)
        if not all(any(common.covers(cell) for common in found.values()) for cell in cells):
            return
        for other in sorted(found, key=lambda other: found[other].num_units, reverse=True):  # few large parts first
            held = np.array([found[other].covers(cell) for cell in cells], dtype=bool)
            fetched = other in elsewhere
            self.parts.append(_Part(other, *open_part(other, fetched), held, fetched))

    def covered(self, keys: Sequence[bytes]) -> Bools:
        """For each key whether all cells of its page are present."""
        present = np.zeros((self._num_cells, len(keys)), dtype=bool)
        for part in self.parts:
            present[part.cells] |= np.array(part.space.contains(keys), dtype=bool)
        complete: Bools = np.logical_and.reduce(present, axis=0)
        return complete

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        """How many leading pages are coming, those that are present among them: so many as every cell will have.

        Large parts are asked first, and others only for what these have not, once that is known.
        """
        reach, waits = np.zeros(self._num_cells, dtype=int), np.zeros(self._num_cells, dtype=bool)
        waits_s, unheard = np.full(self._num_cells, math.inf), False
        for part in self.parts:
            asked = part.cells & ~waits
            start = int(reach[asked].min()) if asked.any() else len(keys)
            if start < len(keys):
                found = part.space.lookup(keys[start:])
                reach[part.cells] = np.maximum(reach[part.cells], start + found.pages + found.coming)
                unheard |= found.unheard
                if found.pending:
                    waits[part.cells] = True
                    waits_s[part.cells] = np.minimum(waits_s[part.cells], found.wait_s)
        count = int(reach.min())
        short = reach == count
        if count == len(keys) or not waits[short].all():
            return Lookup(0, coming=count, unheard=unheard and count < len(keys))
        return Lookup(0, True, count, float(waits_s[short].min()))

    def seek(self, keys: Sequence[bytes], prefill_s: float | None) -> Seen:
        """Of which of these pages every cell is present or can be fetched."""
        held = np.zeros((self._num_cells, len(keys)), dtype=bool)
        waits_s: list[float] = []
        unheard = False
        for part in self.parts:
            held[part.cells] |= np.array(part.space.contains(keys), dtype=bool)
            if part.fetched:
                seen = part.space.seek(keys, prefill_s=prefill_s)
                held[part.cells] |= np.array(seen.found, dtype=bool)
                waits_s += [seen.wait_s] if seen.pending else []
                unheard |= seen.unheard
        whole: Bools = np.logical_and.reduce(held, axis=0)
        return Seen(list(whole.tolist()), bool(waits_s), min(waits_s, default=math.inf), unheard)

    def prefetch(self, keys: Sequence[bytes], **said: Any) -> None:
        """Have the largest parts fetched that together have all cells, and tell all of them what is said beside."""
        wanted = np.ones(self._num_cells, dtype=bool)
        for part in self.parts:
            if part.fetched:
                part.space.prefetch(keys if (part.cells & wanted).any() else (), **said)
                wanted &= ~part.cells

    def read(self, keys: Sequence[bytes], consume: ConsumePart, settle: Settle | None) -> Bools:
        """Show each page's parts until all its cells were seen; for each key whether that came true.

        A part that is gone since it was looked up is made up for by smaller ones, where they are there.
        """
        seen = np.zeros((self._num_cells, len(keys)), dtype=bool)
        for part in self.parts:
            wanted = np.flatnonzero(~seen[part.cells].all(axis=0)).tolist()

            def show(n: int, page: Bytes, part: _Part = part, wanted: list[int] = wanted) -> None:
                consume(wanted[n], part.shard, page)

            found = (
                part.space.read([keys[i] for i in wanted], show, nbytes=part.nbytes, settle=settle) if wanted else []
            )
            seen[np.ix_(part.cells, [i for i, right in zip(wanted, found, strict=True) if right])] = True
        complete: Bools = np.logical_and.reduce(seen, axis=0)
        return complete
