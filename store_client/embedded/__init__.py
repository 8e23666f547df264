"""The embedded store: a pool folder that any number of processes of one machine map. docs/store.md has the format."""

from store_client.embedded.store import EmbeddedStore, default_pool_path
from store_client.embedded.users import pool_users
from store_client.embedded.whoami import PoolUser

__all__ = ["EmbeddedStore", "PoolUser", "default_pool_path", "pool_users"]
