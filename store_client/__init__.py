"""The store of KV pages: abstract classes, and the embedded pool that all processes of a machine share.

Not responsible for what the bytes of a page mean (`mooncake_connector.kv.page`) nor for when an engine loads and saves.
"""

from store_client.base import Lookup, Put, Space, SpaceInfo, Store, StoreStats, VerifyReport
from store_client.embedded import EmbeddedStore

__all__ = [
    "EmbeddedStore",
    "Lookup",
    "Put",
    "Space",
    "SpaceInfo",
    "Store",
    "StoreStats",
    "VerifyReport",
]
