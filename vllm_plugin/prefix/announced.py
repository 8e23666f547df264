"""Which pages whoever reads this instance's KV events believes to be in the pool, and telling when one is not any more.

The pool's feed of changes says where to look, and the pool whether a page is gone: it may be back, or another shard may
have its layers and heads. Runs in vLLM's scheduler step: a bounded number of entries and pages is looked at in each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

from mooncake_connector.contain import contained
from store_client.base import Position, Store
from store_client.sharded import ShardView

_CHANGES_A_STEP = 2048
_LOOKS_A_STEP = 1024
"""Pages, of those announced before a gap in the feed."""


class AnnouncedPages:
    """See the module."""

    def __init__(self) -> None:
        self._pages: OrderedDict[bytes, None] = OrderedDict()
        self._unsure = 0
        """So many of them, the first ones, are to be looked at: the feed had a gap."""
        self._position: Position | None = None

    @contained(list)
    def follow(
        self, store: Store | None, namespace_digest: bytes, views: Sequence[ShardView], events: Iterable[KVCacheEvent]
    ) -> list[KVCacheEvent]:
        """What to publish after `events`: BlockRemoved for announced pages that are gone, each once.

        Args:
            views: what each rank sees of the instance's namespace; none while there is no store.
        """
        touched = self._take_in(events)
        if store is None or not views:
            self._position = None  # the first answer is a gap
            return []
        answer = store.changes(self._position, _CHANGES_A_STEP)
        self._position = answer.position
        if answer.gap:
            self._unsure = len(self._pages)
        for change in answer.changes:
            if not change.stored and change.namespace_digest == namespace_digest:
                touched.update(dict.fromkeys(key for key in change.keys if key in self._pages))
        touched.update(dict.fromkeys(self._next_unsure()))
        gone = _absent(views, list(touched))
        for key in gone:
            del self._pages[key]
        return [BlockRemoved(block_hashes=gone, medium=MEDIUM_CPU)] if gone else []

    def _take_in(self, events: Iterable[KVCacheEvent]) -> dict[bytes, None]:
        """Pages announced just now: they may have been evicted before anybody heard of them."""
        new: dict[bytes, None] = {}
        for event in events:
            if isinstance(event, BlockStored):
                new.update(dict.fromkeys(event.block_hashes))
            elif isinstance(event, AllBlocksCleared):
                new.clear()
                self._pages.clear()
        self._pages.update(new)
        return new

    def _next_unsure(self) -> list[bytes]:
        """Some of the pages announced before a gap, which are looked at now and so last in line."""
        keys = list(islice(self._pages, min(self._unsure, _LOOKS_A_STEP)))
        for key in keys:
            self._pages.move_to_end(key)
        self._unsure = max(0, self._unsure - _LOOKS_A_STEP)
        return keys


def _absent(views: Sequence[ShardView], keys: list[bytes]) -> list[bytes]:
    """Those that at least one rank would not find."""
    found = zip(*(view.contains(keys) for view in views), strict=True) if keys else ()
    return [key for key, present in zip(keys, found, strict=True) if not all(present)]
