"""A tier on a disk of this host: one file of pages, and an index that says what lies where."""

from store_client.tiers.disk.tier import Disk

__all__ = ["Disk"]
