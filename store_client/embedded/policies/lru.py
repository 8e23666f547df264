"""Least recently used first."""

import numpy as np

from store_client.embedded.names import Slots
from store_client.embedded.policies.base import Candidates, Policy, lowest_first


class Lru(Policy):
    """Least recently used first. A page counts as used when any of its descendants is."""

    name = "lru"

    def victims(self, pages: Candidates, granules: int, count: int, used_before_ns: int, now_ns: int) -> Slots:
        alike = np.broadcast_to(np.uint8(0), len(pages.access))
        return lowest_first(pages, granules, count, used_before_ns, lambda slots: pages.access[slots], alike)
