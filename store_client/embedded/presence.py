"""Whether the files of an opened pool are still those in its folder: whoever tidies up /tmp does not ask."""

import os
import time
from pathlib import Path

from store_client.embedded.contents import DESCRIPTION

REPLACED = f"{DESCRIPTION} was replaced"
"""Another process has put another pool in the place of this one."""
_FILES = ("table", "feed", "arena", "spaces", "ledger/data.mdb")
_PERIOD_S = 1.0


class Presence:
    """Remembers the files as they were when the pool was opened."""

    def __init__(self, description: Path, data: Path) -> None:
        self._description = description
        self._files = [description, *(data / name for name in _FILES)]
        self._known = [os.stat(file) for file in self._files]
        self._next_look = 0.0

    def is_due(self) -> bool:
        """True once a second."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _PERIOD_S
        return True

    def lost(self) -> str | None:
        """What is gone, replaced or cut off."""
        for file, known in zip(self._files, self._known, strict=True):
            try:
                there = os.stat(file)
            except OSError:
                return f"{file.name} was deleted"
            if not os.path.samestat(there, known):
                return f"{file.name} was replaced"
            if there.st_size < known.st_size:
                return f"{file.name} was cut off"
        return None
