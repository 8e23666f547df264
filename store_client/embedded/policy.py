"""What to evict: a policy ranks pages, and nothing else. It sees arrays, not the store."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from store_client.embedded.rows import NONE, U32, U64

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """All pages of a pool, as columns over the slots of its table. Slots without a page have `granules` 0."""

    access: U64
    """`clock.now_ns()` of the last use; never ahead of now."""
    parent: U32
    """Slot of the page before it in its chain, or NONE."""
    depth: U32
    """Greater than the parent's."""
    granules: U32


class Policy(ABC):
    @abstractmethod
    def victims(self, pages: Candidates, granules: int, count: int, used_before_ns: int) -> Index:
        """Slots to evict, in order, that together free `granules` and number `count`, or all that may go.

        No page comes before one of its descendants, and none that was used, itself or through a descendant, at or
        after `used_before_ns` comes at all.
        """


class Lru(Policy):
    """Least recently used first. A page counts as used when any of its descendants is."""

    def victims(self, pages: Candidates, granules: int, count: int, used_before_ns: int) -> Index:
        live = np.flatnonzero(pages.granules)
        used = effective_access(pages, live)[live]
        allowed = used < used_before_ns
        live, used = live[allowed], used[allowed]
        if not len(live):
            return live
        mean = max(1.0, float(pages.granules[live].mean()))
        wanted = max(count, int(1.25 * granules / mean) + 8)
        while True:
            oldest = live
            age = used
            if wanted < len(live):
                threshold = np.partition(used, wanted)[wanted]
                near = used <= threshold
                oldest, age = live[near], used[near]
            order = oldest[np.lexsort((-pages.depth[oldest].astype(np.int64), age))]
            reach = np.cumsum(pages.granules[order].astype(np.int64))
            if reach[-1] >= granules or len(order) == len(live):
                enough = max(int(np.searchsorted(reach, granules)) + 1, count)
                return order[:enough]
            wanted *= 2


def effective_access(pages: Candidates, live: Index) -> U64:
    """The latest use of each page or of any of its descendants.

    Follows the chains upwards from the pages whose use is later than their parent's. A link may be stale (its parent
    was forgotten and the slot holds another page): it only makes that page look younger, and the loop still ends,
    because every round raises a value.
    """
    used = pages.access.copy()
    children = live[pages.parent[live] < NONE]
    children = children[pages.parent[children] < len(used)]
    while len(children):
        parents = pages.parent[children].astype(np.int64)
        later = (used[children] > used[parents]) & (pages.granules[parents] > 0)
        children, parents = children[later], parents[later]
        np.maximum.at(used, parents, used[children])
        children = np.unique(parents)
        children = children[pages.parent[children] < len(used)]
    return used


POLICIES: dict[str, type[Policy]] = {"lru": Lru}
