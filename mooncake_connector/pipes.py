"""Files that a person names, which may be pipes, as `<(zcat trace.gz)` is."""

from __future__ import annotations

import errno
from concurrent.futures import TimeoutError as LateError
from functools import partial
from pathlib import Path
from typing import IO, Any

from mooncake_connector.threads import apart

_WRITER_S = 10.0
"""Who names a pipe may start what writes to it in the next moment."""


def opened(path: Path, mode: str = "r", **how: Any) -> IO[Any]:
    """As `path.open`, to read. Raises OSError, also for a pipe that nobody opens to write to."""
    if not path.is_fifo():
        return path.open(mode, **how)
    try:
        return apart(partial(path.open, mode, **how)).result(_WRITER_S)
    except LateError:
        raise OSError(errno.ETIMEDOUT, "it is a pipe that nobody writes to", str(path)) from None
