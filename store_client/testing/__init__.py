"""The conformance class that every store passes, for whoever writes another one, and pages to test with."""

from store_client.testing.conformance import MakeStore, StoreConformance, follow, leading
from store_client.testing.pages import (
    DEADLINE_S,
    PAGE_NBYTES,
    SHARD,
    chain,
    get_page,
    get_pages,
    namespace,
    page_bytes,
    parents_of,
    put_chain,
    put_pages,
)

__all__ = [
    "DEADLINE_S",
    "PAGE_NBYTES",
    "SHARD",
    "MakeStore",
    "StoreConformance",
    "chain",
    "follow",
    "get_page",
    "get_pages",
    "leading",
    "namespace",
    "page_bytes",
    "parents_of",
    "put_chain",
    "put_pages",
]
