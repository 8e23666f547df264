"""The embedded store: a pool folder that any number of processes of one machine map. docs/store.md has the format."""

from store_client.embedded.store import EmbeddedStore, default_pool_path

__all__ = ["EmbeddedStore", "default_pool_path"]
