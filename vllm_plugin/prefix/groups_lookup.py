"""How much of a prompt all groups of a hybrid model can go on from, what tiers can bring counted.

Windows and states are stored here and there, so nobody knows which of them tiers have. Once it is settled that full
attention has or will have pages of a prompt, and only then, tiers are asked which of the others' last pages before its
end they have: one question a group and rank. Where a hit would be longer with those, and only there, they are fetched,
and it is promised when all of them are there or on their way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from store_client.base import Lookup
from store_client.sharded import ShardView
from vllm_plugin.prefix.groups_hit import GroupsHit, Present

_SOUGHT_PAGES = 256
"""So far before the end of what full attention has, tiers are asked for windows and states: an answer that long may lie
between the end of a prompt, where these are, and that of a prompt that goes on."""

Views: TypeAlias = Callable[[int | None], list[ShardView]]
Leading: TypeAlias = Callable[[list[bytes], list[ShardView]], Lookup]


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all groups can go on from.

    Args:
        lookup: as of full attention, of the pages that were looked up.
        coming: by position of the group, pages of the hit, the last ones, that are on their way.
        most: pages of the prompt that a hit could have if it were for full attention alone.
        unheard: what it would take for more was sought, and not all that was asked had answered in time.
    """

    lookup: Lookup
    most: int = 0
    coming: Mapping[int, int] = field(default_factory=dict)
    unheard: bool = False


class GroupsLookup:
    """See the module.

    Args:
        leading: what all ranks have or will have of a chain.
    """

    def __init__(self, groups: GroupsHit, page_tokens: int, leading: Leading) -> None:
        self._groups, self._page_tokens, self._leading = groups, page_tokens, leading

    def agreed(
        self,
        keys: list[bytes],
        num_tokens: int,
        first: int,
        found: Lookup,
        views: Views,
        *,
        fetch: bool,
        tokens_s: float | None,
    ) -> Agreed:
        """Of what full attention has and will have (`found`, from page `first` on).

        Args:
            keys: of the prompt's pages.
            num_tokens: of the request.
            fetch: whether tiers are asked.
            tokens_s: how many tokens would be computed in a second; None where that is not known.
        """
        most = min(first + found.pages + found.coming, self._groups.most_pages(num_tokens))
        there = self._groups.longest(first, most, lambda position: _present(keys, views(position)))
        if there == most or not fetch:
            return self._answer(first, found, there, most)
        if found.pending:  # where it ends is not known yet
            return self._answer(first, found, there, most, pending=True, wait_s=found.wait_s)
        prefill_s = (most - there) * self._page_tokens / tokens_s if tokens_s else None
        start = max(first, most - self._groups.widest_pages - _SOUGHT_PAGES)
        sought = {
            position: [view.seek(keys[start:most], prefill_s=prefill_s) for view in views(position)]
            for position in self._groups.positions
        }
        waits_s = [seen.wait_s for ranks in sought.values() for seen in ranks if seen.pending]
        if waits_s:
            return self._answer(first, found, there, most, pending=True, wait_s=min(waits_s))
        held = {
            position: [all(ranks) for ranks in zip(*(seen.found for seen in ranks), strict=True)]
            for position, ranks in sought.items()
        }

        def obtainable(position: int) -> Present:
            present = _present(keys, views(position))

            def look(begin: int, stop: int) -> list[bool]:
                elsewhere = held[position]
                return [
                    here or (page >= start and elsewhere[page - start])
                    for page, here in enumerate(present(begin, stop), start=begin)
                ]

            return look

        longest = self._groups.longest(first, most, obtainable)
        if longest <= max(there, first):
            unheard = any(seen.unheard for ranks in sought.values() for seen in ranks)
            return self._answer(first, found, there, most, unheard=unheard)
        return self._fetched(keys, first, found, there, longest, most, views)

    def _fetched(
        self, keys: list[bytes], first: int, found: Lookup, there: int, longest: int, most: int, views: Views
    ) -> Agreed:
        """Have fetched what a hit of `longest` pages takes: it is one where all of that is there or coming."""
        coming, waits_s, whole, unheard = {}, [], True, False
        for position in self._groups.positions:
            start = self._groups.needed(position, first, longest)
            seen = views(position)
            for view in seen:
                view.prefetch(keys[start:longest], patient=True)  # they are there: the first word is worth a wait
            one = self._leading(keys[start:longest], seen)
            if one.pages + one.coming < longest - start:
                whole, unheard = False, unheard or one.unheard
                waits_s.append(one.wait_s if one.pending else -math.inf)
            coming[position] = one.coming
        if whole:
            return self._answer(first, found, longest, most, coming)
        pending = min(waits_s) > -math.inf  # else one of them is not to be had
        wait_s = min(waits_s) if pending else math.inf
        return self._answer(first, found, there, most, pending=pending, wait_s=wait_s, unheard=unheard)

    def _answer(
        self, first: int, found: Lookup, stop: int, most: int, coming: Mapping[int, int] | None = None,
        *, pending: bool = False, wait_s: float = math.inf, unheard: bool = False,
    ) -> Agreed:  # fmt: skip
        """A hit of `stop` pages."""
        here = min(found.pages, max(stop - first, 0))
        lookup = Lookup(here, pending, max(stop - first - here, 0), wait_s)
        on_the_way = dict.fromkeys(self._groups.of_full_attention, lookup.coming) | dict(coming or {})
        return Agreed(lookup, most, on_the_way, unheard)


def _present(keys: Sequence[bytes], views: list[ShardView]) -> Present:
    def look(start: int, stop: int) -> list[bool]:
        return [all(ranks) for ranks in zip(*(view.contains(keys[start:stop]) for view in views), strict=True)]

    return look
