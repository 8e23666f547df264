"""The last requests that engines tell of, in a mapped file of the pool: for people who ask what became of one.

A fixed number of slots; a request's name gives its slot, and a later one takes it. Anybody writes and reads without a
lock: a slot that is torn does not agree with its checksum, and is empty. The file is made when the first is noted.
"""

import mmap
import os
import struct
from pathlib import Path

import xxhash

from mooncake_connector.log import get_logger, log_once
from store_client.embedded.locks import open_file

logger = get_logger(__name__)

_SLOTS, _SLOT_NBYTES = 512, 4096
REQUESTS_NBYTES = _SLOTS * _SLOT_NBYTES
_HEAD = struct.Struct("<QI")
"""XXH3-64 of what follows, and how many bytes of it are in use."""
MOST_NBYTES = _SLOT_NBYTES - _HEAD.size
"""Of one request."""


class Requests:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._failed = False

    def note(self, name: str, told: bytes) -> bool:
        """Keep what is told of a request, in place of what shares its slot. False where it is too long, or no file can
        be had."""
        if len(told) > MOST_NBYTES or not self._open():
            return False
        assert self._map is not None
        at = xxhash.xxh3_64_intdigest(name.encode()) % _SLOTS * _SLOT_NBYTES
        kept = struct.pack("<I", len(told)) + told
        self._map[at : at + 8 + len(kept)] = struct.pack("<Q", xxhash.xxh3_64_intdigest(kept)) + kept
        return True

    def all(self) -> list[bytes]:
        """What was told of each request that is kept, in no order."""
        try:
            fd = open_file(self._path, os.O_RDONLY)
        except OSError:
            return []
        with os.fdopen(fd, "rb") as file:
            content = file.read(REQUESTS_NBYTES)
        found = []
        for at in range(0, len(content) - _SLOT_NBYTES + 1, _SLOT_NBYTES):
            check, nbytes = _HEAD.unpack_from(content, at)
            if 0 < nbytes <= MOST_NBYTES:
                kept = content[at + 8 : at + _HEAD.size + nbytes]
                if xxhash.xxh3_64_intdigest(kept) == check:
                    found.append(kept[4:])
        return found

    def _open(self) -> bool:
        if self._map is None and not self._failed:
            try:
                fd = open_file(self._path, os.O_RDWR | os.O_CREAT)
                try:
                    os.posix_fallocate(fd, 0, REQUESTS_NBYTES)  # a store into a hole of a full file system kills
                    self._map = mmap.mmap(fd, REQUESTS_NBYTES)
                finally:
                    os.close(fd)
            except OSError as error:
                self._failed = True
                log_once(
                    "store.requests", "%s cannot be made (%s): requests are not kept for `why --request`", self._path,
                    error.strerror, logger=logger,
                )  # fmt: skip
        return self._map is not None
