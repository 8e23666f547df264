"""A tier in a folder that several hosts mount: one file a page, and no host that coordinates."""

from store_client.tiers.folder.tier import SharedFolder

__all__ = ["SharedFolder"]
