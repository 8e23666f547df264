"""Does the space of a pool add up: is each granule of the arena and each slot of the table exactly one owner's?"""

import numpy as np

from store_client.embedded.extents import as_runs, clip_runs
from store_client.embedded.ledger import Draft
from store_client.embedded.table import Table


def unsound(draft: Draft, table: Table, arena_granules: int) -> str | None:
    """What does not add up between ledger and page table, or None. For the holder of the write lock, caught up.

    Looks at sums only: whatever gives space to two owners, or to none, puts them out, and every later change keeps
    the difference. Costs a look at two columns of the table.
    """
    held = draft.reservations()
    space = as_runs(run for reservation in held for run in reservation.space_runs.tolist())
    slots = as_runs(run for reservation in held for run in reservation.slot_runs.tolist())
    reserved = int(clip_runs(space, draft.high_water)[0][:, 1].sum(dtype=np.int64))
    if draft.capacity > arena_granules:
        return f"its arena has {arena_granules} granules and should have {draft.capacity}"
    if draft.high_water > draft.capacity:
        return f"{draft.high_water} granules are in use, its capacity is {draft.capacity}"
    if not (draft.free.is_sound(draft.high_water) and draft.slots.is_sound(table.max_pages)):
        return "its free space is listed twice, or lies outside"
    sums = {
        "granules": (draft.free.total + table.used_granules + reserved, draft.high_water),
        "slots": (draft.slots.total + table.pages + int(slots[:, 1].sum(dtype=np.int64)), table.max_pages),
        "granules of pages": (int(table.granules.sum(dtype=np.int64)), table.used_granules),
        "pages": (int(np.count_nonzero(table.granules)), table.pages),
        "names": (table.count_names(), table.pages),
    }
    wrong = [f"{found} {what} instead of {expected}" for what, (found, expected) in sums.items() if found != expected]
    return f"it accounts for {', '.join(wrong)}" if wrong else None
