"""How much of a prompt all groups of a hybrid model can go on from, and which of their pages that takes.

vLLM's own managers decide, one for each kind of attention: they are given what the pool holds in place of what vLLM's
blocks do. The unit is what all groups' blocks and pages have in common, so that what is loaded fills whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

from vllm.v1.core.kv_cache_coordinator import replay_boundaries
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_plugin.geometry import Geometry, Group

_LOOK_PAGES = 64
"""Pages looked up at a time, from the end of a prompt on: a window is found in the first look, as a rule."""

Present: TypeAlias = Callable[[int, int], Sequence[bool]]
"""Which of the pages `[start, stop)` of a prompt are in the pool, for all ranks."""


class GroupRules:
    """What vLLM's manager says of one group, in units of `unit_tokens`, of which each has `unit_pages` pages."""

    def __init__(self, group: Group, unit_tokens: int, unit_pages: int, retention_tokens: int | None) -> None:
        self._unit_tokens, self._unit_pages, self._retention_tokens = unit_tokens, unit_pages, retention_tokens
        assert group.spec is not None
        self.is_state = group.kind == "state"
        self._spec = group.spec.copy_with_new_block_size(unit_tokens)
        manager = KVCacheSpecRegistry.get_manager_class(self._spec)
        assert manager is not None
        self._manager: Any = manager

    def longest(self, num_units: int, present: Callable[[int], bool]) -> int:
        """Units that a request can go on from, of the first `num_units`."""
        block = SimpleNamespace(block_id=1)
        pool = SimpleNamespace(
            hash_block_size=self._unit_tokens,
            null_block=SimpleNamespace(block_id=0),
            get_cached_block=lambda unit, group_ids: [block] if present(unit) else None,
        )
        _, num_tokens = self._manager.find_longest_cache_hit(
            block_hashes=range(num_units),
            max_length=num_units * self._unit_tokens,
            kv_cache_group_ids=[0],
            block_pool=pool,
            kv_cache_spec=self._spec,
            drop_eagle_block=False,
            alignment_tokens=self._unit_tokens,
        )
        return int(num_tokens) // self._unit_tokens

    def kept(self, first: int, stop: int, boundaries: Sequence[int]) -> Sequence[bool] | None:
        """Which of the pages `[first, stop)` some later request may need; None for all of them.

        Args:
            boundaries: tokens at which a later request may part from this one.
        """
        start, end = first // self._unit_pages, -(-stop // self._unit_pages)
        mask = self._manager.reachable_block_mask(
            start_block=start,
            end_block=end,
            alignment_tokens=self._unit_tokens,
            kv_cache_spec=self._spec,
            use_eagle=False,
            retention_interval=self._retention_tokens,
            reachable_boundaries=boundaries,
        )
        return None if mask is None else [mask[page // self._unit_pages - start] for page in range(first, stop)]


class GroupsHit:
    """See the module; for models with several groups."""

    def __init__(self, geometry: Geometry, page_tokens: int) -> None:
        self._unit_tokens = geometry.unit_tokens(page_tokens)
        self._unit_pages = self._unit_tokens // page_tokens
        self._page_tokens, self._every = page_tokens, geometry.groups
        self.of_full_attention = [at for at, group in enumerate(geometry.groups) if group.kind == "full"]
        self._rules = {
            position: GroupRules(group, self._unit_tokens, self._unit_pages, geometry.retention_tokens)
            for position, group in enumerate(geometry.groups)
            if group.kind != "full"
        }

    @property
    def positions(self) -> Collection[int]:
        """Of the groups that are not of full attention."""
        return self._rules.keys()

    @property
    def widest_pages(self) -> int:
        """At most so many pages before the end of a hit does any of these need."""
        spans = [self._every[position].span or 0 for position in self._rules]
        return -(-max(spans, default=0) // self._unit_tokens) * self._unit_pages

    def needed(self, position: int, first: int, stop: int) -> int:
        """Of a hit of `stop` pages, the first one after `first` that a group needs."""
        if self._rules[position].is_state:
            return stop - 1
        kept = self._every[position].first_kept(stop * self._page_tokens)
        return max(first, kept // self._unit_tokens * self._unit_pages)

    def boundaries(self, num_prompt_tokens: int, junctions: Sequence[int]) -> list[int]:
        """Where later requests may part from one: where its prompt ends or is asked again, and where others parted."""
        again = replay_boundaries(num_prompt_tokens, self._unit_tokens, use_eagle=False)
        return [*again, num_prompt_tokens, *junctions]

    def most_pages(self, num_tokens: int) -> int:
        """At most so many pages of a request are of use: its last token is computed, and needs its window."""
        return (num_tokens - 1) // self._unit_tokens * self._unit_pages

    def kept(self, position: int, first: int, stop: int, boundaries: Sequence[int]) -> Sequence[bool] | None:
        """Which of the pages `[first, stop)` are stored of a group; None for all of them."""
        rules = self._rules.get(position)
        return None if rules is None else rules.kept(first, stop, boundaries)

    def longest(self, first: int, stop: int, present: Callable[[int], Present]) -> int:
        """Of pages `[0, stop)`, which all groups of full attention have, those that all groups can go on from.

        Args:
            first: pages that vLLM's own cache has of the prompt; a hit no longer than these is none.
            present: of the group at a position.
        """
        units, had = stop // self._unit_pages, first // self._unit_pages
        looks = {
            position: _Looks(present(position), had, self._unit_pages, last=rules.is_state)
            for position, rules in self._rules.items()
        }
        agreed = None
        while units > had and units != agreed:  # each may have shortened what others had agreed on
            agreed = units
            for position, seen in looks.items():
                units = self._rules[position].longest(units, seen.has)
        return max(units, had) * self._unit_pages


class _Looks:
    """Which units a group has, looked up from the last one asked for on; vLLM's own cache has the first `local`.

    A unit is there with all its pages, or, of states, with the `last` one.
    """

    def __init__(self, present: Present, local: int, unit_pages: int, *, last: bool) -> None:
        self._present, self._local, self._unit_pages, self._last = present, local, unit_pages, last
        self._pages: dict[int, bool] = {}

    def has(self, unit: int) -> bool:
        if unit < self._local:
            return True
        start, stop = unit * self._unit_pages, (unit + 1) * self._unit_pages
        if start not in self._pages:
            begin = max(self._local * self._unit_pages, (stop - _LOOK_PAGES) // self._unit_pages * self._unit_pages)
            begin = min(begin, start)
            self._pages.update(zip(range(begin, stop), self._present(begin, stop), strict=True))
        return all(self._pages[page] for page in range(stop - 1 if self._last else start, stop))
