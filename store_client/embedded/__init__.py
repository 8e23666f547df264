"""The embedded store: a pool folder that any number of processes of one machine map. docs/store.md has the format."""

# `np.unique` imports it at first use, which may be under a pool's write lock. A child forked while another thread
# imports it would wait there for ever, and keep the lock: nothing may be imported once a pool is open.
import numpy.ma  # noqa: F401

from store_client.embedded.folder import default_pool_path
from store_client.embedded.owners import PoolUser, pool_users
from store_client.embedded.space import EmbeddedSpace
from store_client.embedded.store import EmbeddedStore

__all__ = ["EmbeddedSpace", "EmbeddedStore", "PoolUser", "default_pool_path", "pool_users"]
