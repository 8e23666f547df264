"""In which order pages come back, and when they were used last on the clock of the machine that they come back to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from store_client.embedded.names import U32, U64
from store_client.embedded.row import NONE
from store_client.embedded.survey import Pages

_WINDOW_NBYTES = 128 << 20
"""Within so much, pages of one namespace and shard stand together: they are written to a pool in batches."""

_APART_NS = np.uint64(64)
"""A pool keeps marks and a count in the lowest bits of such times."""

Order = npt.NDArray[np.int64]


def returning_order(pages: Pages) -> Order:
    """Places in a survey, what was used last first and every page behind its parent.

    So whatever part of them a pool has room for is what is most worth having, in whole chains. A page counts as used
    when any of its descendants is.
    """
    if not len(pages):
        return np.zeros(0, dtype=np.int64)
    # Of clocks that run forwards: the least is the oldest.
    used = np.uint64(pages["idle_ns"].max()) - pages["idle_ns"]
    parents = np.where(pages["parent"] < 0, NONE, pages["parent"]).astype(np.uint32)
    used = effective_use(used, parents)
    order: Order = np.lexsort((pages["depth"], pages["idle_ns"].max() - used))
    window = np.cumsum(pages["nbytes"][order], dtype=np.int64) // _WINDOW_NBYTES
    return order[np.lexsort((np.arange(len(order)), pages["space"][order], window))]


def effective_use(used: U64, parent: U32) -> U64:
    """The latest use of each page or of any of its descendants; `parent` are places of the same pages, or NONE.

    Follows the chains upwards from the pages whose use is later than their parent's. It ends, because every round
    raises a value.
    """
    used = used.copy()
    children = np.flatnonzero(parent < len(used))
    while len(children):
        parents = parent[children].astype(np.int64)
        later = used[children] > used[parents]
        children, parents = children[later], parents[later]
        np.maximum.at(used, parents, used[children])
        children = np.unique(parents)
        children = children[parent[children] < len(used)]
    return used


def times_of_use(idle_ns: npt.NDArray[np.uint64], elapsed_ns: int, now_ns: int) -> npt.NDArray[np.uint64]:
    """When pages were used, on a clock that says `now_ns`, if they were idle for `idle_ns` and then for `elapsed_ns`.

    That clock begins at boot. What was used before comes first on it, some nanoseconds apart, so the order stays.
    """
    ages, rank = np.unique(idle_ns, return_inverse=True)  # the youngest first
    oldest_first = (len(ages) - rank.reshape(-1)).astype(np.uint64) * _APART_NS
    age = idle_ns + np.uint64(elapsed_ns)
    age[age < idle_ns] = np.iinfo(np.uint64).max  # beyond what can be counted
    on_the_clock = np.uint64(now_ns) - np.minimum(age, np.uint64(now_ns))
    return np.minimum(np.maximum(on_the_clock, oldest_first), np.uint64(now_ns))
