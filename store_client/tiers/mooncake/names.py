"""The names of our pages in a cluster that others use too: mckv/NAMESPACE/SHARD/KEY, hex digits and plain numbers.
Beside them mckv/NAMESPACE/shards/NUMBER, which say what shards there are (`markers`).

The size is no part of the name: namespace and shard determine it, and the seal says it once more.
"""

from __future__ import annotations

from store_client.tiers.base import SpaceName

_OURS = "mckv/"


def page_name(space: SpaceName, key: bytes) -> str:
    shard = space.shard
    where = f"{shard.layer_start}-{shard.layer_stop}.{shard.head_start}-{shard.head_stop}"
    return f"{_OURS}{space.namespace.hex()}/{where}/{key.hex()}"


def marker_name(namespace: bytes, number: int) -> str:
    return f"{_OURS}{namespace.hex()}/shards/{number}"


def pattern(namespace: bytes | None) -> str:
    """A regular expression that finds all names of a namespace, or all of ours, and no other."""
    return f"^{_OURS}" if namespace is None else f"^{_OURS}{namespace.hex()}/"


PROBE = f"{_OURS}probe"
"""A name that no page has, to ask the master for."""
