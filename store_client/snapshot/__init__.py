"""A pool as a folder on disk and back: over a reboot, or an upgrade whose pool has another format.

The format of a snapshot (`form`) stays the same while that of pools changes.
"""

from store_client.snapshot.reading import Snapshot
from store_client.snapshot.restoring import RestoreReport, restore
from store_client.snapshot.writing import SnapshotReport, take_snapshot

__all__ = ["RestoreReport", "Snapshot", "SnapshotReport", "restore", "take_snapshot"]
