"""What is left in the pool of each request, where `log_requests` is set: see :mod:`store_client.kept`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mooncake_connector.contain import contained, nothing
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.misses import Miss
from mooncake_connector.request_line import RequestLine
from store_client.kept import keep, look
from store_client.open import BackgroundStore
from store_client.sharded import ShardView

if TYPE_CHECKING:
    from vllm_plugin.prefix.tracked import Tracked


class Keeper:
    """Leaves records in the pool behind `store`."""

    def __init__(self, store: BackgroundStore, page_tokens: int) -> None:
        self._store, self._page_tokens = store, page_tokens

    @contained(nothing)
    def look(self, tracked: Tracked, namespace: Namespace | None, views: Sequence[ShardView]) -> None:
        """Before anything of it is loaded, computed or stored."""
        first = tracked.local_tokens // self._page_tokens
        stop = tracked.request.num_prompt_tokens // self._page_tokens
        keys: Sequence[bytes] = ()
        if views and tracked.root is not None and first < stop:
            keys = tracked.page_keys(stop, self._page_tokens)[first:stop]
        tracked.seen = look(namespace, views, keys, first)

    @contained(nothing)
    def keep(self, line: RequestLine, tracked: Tracked, missed: Mapping[Miss, int]) -> None:
        """The request is over, as far as its prompt goes."""
        seen, tracked.seen = tracked.seen, None
        if seen is not None:
            has_salt = tracked.request.cache_salt is not None
            keep(self._store, line, seen, page_tokens=self._page_tokens, missed=missed, has_salt=has_salt)
