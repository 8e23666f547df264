"""What time it is where the files are. The clocks of hosts differ, and so no host's is asked."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from store_client.tiers.folder.layout import clock_name


class ServerClock:
    """The time that the file server gives to files, and from then on what has passed on this host since."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._ahead_s: float | None = None

    def now(self) -> float | None:
        """Seconds; None before it was asked for the first time."""
        return None if self._ahead_s is None else time.monotonic() + self._ahead_s

    def ask(self) -> float:
        """Seconds, as a file has them that is written now. Raises OSError."""
        name = clock_name(self._root)
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, b"now")
                os.fsync(fd)
            finally:
                os.close(fd)
            server_s = os.stat(name).st_mtime
        finally:
            with suppress(OSError):
                os.unlink(name)
        self._ahead_s = server_s - time.monotonic()
        return server_s
