"""What is left in the pool of each request, where `log_requests` is set: see :mod:`store_client.kept`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mooncake_connector.contain import contained, nothing
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.misses import Miss
from mooncake_connector.request_line import RequestLine
from sglang_backend.calls import page_keys
from sglang_backend.stored_pool import StoredPool
from store_client.kept import Seen, keep, look
from store_client.open import BackgroundStore
from store_client.sharded import ShardView


class Records:
    """Of one backend.

    Args:
        now: what it has: the store, the pages of the KV alone, their namespace.
        whole: pages with the parts of all ranks, or None where these are not to be seen here.
    """

    def __init__(
        self,
        now: Callable[[], tuple[BackgroundStore | None, StoredPool | None, Namespace | None]],
        whole: Callable[[], ShardView | None],
    ) -> None:
        self._now, self._whole = now, whole

    @contained(nothing)
    def look(self, keys: Sequence[str], first: int) -> Seen | None:
        """What the pool knows of the pages of a prompt from its page `first` on."""
        _, kv, namespace = self._now()
        view = None if kv is None else kv.view
        return look(None, (), (), first) if view is None else look(namespace, [view], page_keys(keys), first)

    @contained(lambda: Miss.RANKS_DISAGREE)
    def why_not_everywhere(self, key: str) -> Miss:
        """Why a page that this rank has was missing for another one."""
        _, kv, _ = self._now()
        return Miss.RANKS_DISAGREE if kv is None else kv.why_not_everywhere(page_keys([key])[0], self._whole())

    @contained(nothing)
    def keep(self, line: RequestLine, seen: Seen, missed: Mapping[Miss, int], *, has_salt: bool) -> None:
        store, kv, _ = self._now()
        if store is not None and kv is not None:
            keep(store, line, seen, page_tokens=kv.pages.page_slots, missed=missed, has_salt=has_salt)
