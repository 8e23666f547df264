"""What this machine itself can do: copying memory, and looking a key up in a bare LMDB."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from mooncake_connector.cli.bench.measure import Scale, Task

Bytes = npt.NDArray[np.uint8]

_VALUE_NBYTES = 48
"""About the size of an index entry of the store."""


def memcpy_task(scale: Scale, source: Bytes, destination: Bytes) -> Task:
    """Copy all pages one by one with the C library's ``memmove``, as the store does. Both hold ``data_nbytes``."""
    nbytes = scale.page_nbytes
    pairs = [
        (destination.ctypes.data + offset, source.ctypes.data + offset) for offset in range(0, source.nbytes, nbytes)
    ]

    def copy() -> None:
        for target, origin in pairs:
            ctypes.memmove(target, origin, nbytes)

    return Task(copy)


def page_keys(count: int, label: str) -> list[bytes]:
    """``count`` keys of 32 bytes, spread as digests are; another label gives other keys."""
    return [hashlib.sha256(f"{label}/{number}".encode()).digest() for number in range(count)]


class RawLmdb:
    """A bare LMDB with ``keys`` in it: no checks, no decoding, one read transaction per call."""

    def __init__(self, folder: Path, keys: list[bytes]) -> None:
        self._env: Any = lmdb.open(
            str(folder), map_size=max(16 << 20, 512 * len(keys)), writemap=True, sync=False, metasync=False
        )
        with self._env.begin(write=True) as transaction:
            transaction.cursor().putmulti([(key, b"x" * _VALUE_NBYTES) for key in keys])

    def lookup(self, keys: list[bytes]) -> int:
        """How many of ``keys`` are there."""
        with self._env.begin(buffers=True) as transaction:
            get = transaction.get
            return sum(get(key) is not None for key in keys)

    def close(self) -> None:
        self._env.close()
