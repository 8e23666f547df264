"""Least recently used first."""

from store_client.embedded.names import U64, Slots
from store_client.embedded.policies.base import Candidates, Policy, lowest_first


class Recency:
    """The rank of a page is its last use."""

    def __init__(self, pages: Candidates) -> None:
        self._access, self._one = pages.access, pages.access.data

    def all(self, slots: Slots) -> U64:
        return self._access[slots]

    def one(self, slot: int) -> float:
        return float(self._one[slot])


class Lru(Policy):
    """Least recently used first. A page counts as used when any of its descendants is."""

    name = "lru"

    def victims(self, pages: Candidates, granules: int, count: int, used_before_ns: int, now_ns: int) -> Slots:
        return lowest_first(self.frontier(pages, used_before_ns), granules, count, Recency(pages))
