"""What the pages of a put hang on: the page before each in its chain, or full attention's page with the same key.

A page goes before the one that it hangs on, and whatever is used keeps its whole chain. Under the write lock only.
"""

from collections.abc import Mapping, Sequence

from store_client.embedded.names import Spaces, join_keys
from store_client.embedded.put import PutPages
from store_client.embedded.table import Table


class Chains:
    """See the module."""

    def __init__(self, table: Table, spaces: Spaces) -> None:
        self._table, self._spaces = table, spaces

    def slots_by_key(self, keys: Sequence[bytes], space: int) -> dict[bytes, int]:
        """The slots of those that are in the table."""
        slots = self._table.slots(join_keys(keys), space) if keys else []
        return {key: slot for key, slot in zip(keys, slots, strict=True) if slot >= 0}

    def beneath(self, pages: PutPages, indices: Sequence[int]) -> dict[int, int]:
        """Slots of the full attention's pages that these hang on, for pages of another group of layers: those with the
        same keys. So a window or a state goes before the page without which it is of no use."""
        found: dict[int, int] = {}
        for space in self._spaces.beneath(pages.namespace, pages.shard):
            rest = [i for i in indices if i not in found]
            slots = self._table.slots(join_keys([pages.keys[i] for i in rest]), space) if rest else []
            found.update({i: slot for i, slot in zip(rest, slots, strict=True) if slot >= 0})
        return found

    def split_orphans(
        self, pages: PutPages, absent: list[int], space: int, beneath: Mapping[int, int]
    ) -> tuple[list[int], list[int]]:
        """Pages that a prefix lookup will reach, and those whose parent is neither stored nor in this batch."""
        if pages.namespace.rests_on_others and pages.mark:  # brought for who asked for those pages as well
            return absent, []
        if pages.namespace.rests_on_others:
            return [i for i in absent if i in beneath], [i for i in absent if i not in beneath]
        rooted: set[bytes | None] = {None, *pages.follows, *self.slots_by_key(pages.parents_of(absent), space)}
        reachable, orphans = [], []
        for i in absent:
            if pages.parents[i] in rooted:
                rooted.add(pages.keys[i])
                reachable.append(i)
            else:
                orphans.append(i)
        return reachable, orphans

    def refresh(self, pages: PutPages, slots: list[int], present: list[int]) -> None:
        """A page put again counts as used, and its link to its parent is renewed."""
        self._table.touch([slots[i] for i in present], use=True)
        by_key = dict(zip(pages.keys, slots, strict=True))
        beneath = self.beneath(pages, present)
        for i in present:
            parent = beneath.get(i, by_key.get(pages.parents[i] or b"", -1))
            if parent >= 0 and self._table.depth[parent] < self._table.depth[slots[i]]:
                self._table.parent[slots[i]] = parent

    def touch_ancestors(self, parents: Sequence[int]) -> None:
        """Mark the chains that new pages hang on as used, so that making room never takes their beginnings."""
        chain: set[int] = set()
        for slot in parents:
            while 0 <= slot < self._table.max_pages and slot not in chain and self._table.granules[slot]:
                chain.add(slot)
                slot = int(self._table.parent[slot])
        if chain:
            self._table.touch(sorted(chain))
