"""Tier `object`: an S3-compatible object store, one object a page."""

from store_client.tiers.object.tier import ObjectStore

__all__ = ["ObjectStore"]
