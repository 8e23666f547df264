"""Up to which pages of a prompt its states (Mamba, sliding windows) are there: without them its KV is of no use.

A state is kept for a few pages only, and a prefix is restored to where one lies: so pages are asked for one by one,
from the end of the prompt backwards, where a prompt that goes on has the last one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

from sglang_backend.stored_pool import StoredPool

_ROUNDS = (8, 24, 96)
"""Pages of which the tiers are asked for states: the next ones only where none of these has one, and time is left."""
_LONGEST_WINDOW = 128
"""In pages. Of a longer one the tiers are not asked for states."""


def restorable(present: Sequence[bool], transfer: PoolTransfer) -> set[int]:
    """Prefix lengths, in pages, at which a pool has what its hit policy asks for."""
    length = present.index(False) if False in present else len(present)
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, length + 1))
    window = window_of(transfer)
    lengths, run = set(), 0
    for pages, here in enumerate(present, start=1):
        run = run + 1 if here else 0
        if run >= min(window, pages):
            lengths.add(pages)
    return lengths


def window_of(transfer: PoolTransfer) -> int:
    """So many pages before a length must have their state."""
    return max(1, len(transfer.keys or ()))


def longest(present: Mapping[str, Sequence[bool]], transfers: Sequence[PoolTransfer]) -> int:
    """The longest prefix, in pages, that can be restored as far as these pools are concerned."""
    lengths = [restorable(present[transfer.name], transfer) for transfer in transfers]
    return max(set.intersection(*lengths), default=0) if lengths else 0


def look_for_states(
    transfers: Sequence[PoolTransfer], pools: Mapping[str, StoredPool], names: Sequence[bytes], wait_s: float | None
) -> dict[str, list[bool]]:
    """By pool, of which pages its state is present; where tiers are asked, also where it is coming, from now on.

    `wait_s`: for how long in all to wait for the tiers' answers; None where they are not asked. Each state is a
    question of its own, so the next ones are asked for only where that time is enough for them, at the pace so far.
    """
    found = {one.name: pools[one.name].contains(names) for one in transfers if one.name in pools}
    present: dict[str, list[bool]] = {one.name: found.get(one.name) or [False] * len(names) for one in transfers}
    window = max(map(window_of, transfers), default=0)
    if wait_s is None or len(found) < len(transfers) or window > _LONGEST_WINDOW:
        return present
    began_s, stop = time.monotonic(), len(names)
    for pages in _ROUNDS:
        start = max(0, stop - pages - (window if stop == len(names) else 0))
        spent_s, asked = time.monotonic() - began_s, len(names) - stop
        if asked and spent_s / asked * (stop - start) > wait_s - spent_s:
            break
        for name, here in present.items():
            left_s = max(wait_s - (time.monotonic() - began_s), 0.0)
            here[start:stop] = pools[name].each(names[start:stop], left_s)
        if start == 0 or longest(present, transfers) > start:
            break
        stop = start
    return present
