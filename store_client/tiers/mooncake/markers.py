"""Which shards a namespace has, in a store that can list nothing: small objects under names that anybody can guess.

There are so many numbers, and each stands for one shard or for none. Whoever stores pages of a shard that no number
stands for takes the first free one. Mooncake tells nobody that another was first, so a marker is read again before it
counts; it may be evicted like a page, so it is looked for, and written, anew now and then.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import xxhash

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.log import get_logger, kind_of, log_once
from store_client.base import Pieces, Put
from store_client.tiers.base import Sealed, SpaceName
from store_client.tiers.mooncake.names import marker_name
from store_client.tiers.seal import seal, why_broken

_NUMBERS = 64
_NOTED_S = 60.0
"""For so long a marker that was seen is taken to be there."""
_PAUSE_S = 5.0
"""After one could not be written."""
_TRIES = 4
"""Others may be first, and what cannot be read again must not take all numbers."""
_MOST_NOTED = 4096
_CONTENT = struct.Struct("<4I")

_log = get_logger(__name__)

AreThere: TypeAlias = Callable[[Sequence[str], float], list[bool]]
Read: TypeAlias = Callable[[Sequence[str], Sequence[Pieces], int, float], list[bytes | None]]
Write: TypeAlias = Callable[[Sequence[str], Sequence[Sealed], int, float], list[Put]]
Remove: TypeAlias = Callable[[Sequence[str], float], int]


class Markers:
    """Args: the tier's own calls, which take names of objects and at last the seconds that they may take."""

    def __init__(self, title: str, are_there: AreThere, read: Read, write: Write, remove: Remove) -> None:
        self._title = title
        self._are_there, self._read, self._write, self._remove = are_there, read, write, remove
        self._again_s: dict[SpaceName, float] = {}
        """When to look for the marker again."""
        self._clears = 0
        """So many so far: a marker that was noted before one may be gone with it."""
        self._lock = threading.Lock()

    def shards(self, namespace: bytes, deadline_s: float) -> list[Shard]:
        """Raises TierError."""
        return list(dict.fromkeys(self._found(namespace, time.monotonic() + deadline_s)[0]))

    def note(self, space: SpaceName, deadline_s: float) -> None:
        """See to it that the shard has a marker. A failure costs hits of instances with another split, no page."""
        now = time.monotonic()
        with self._lock:
            if now < self._again_s.get(space, 0.0):
                return
            if len(self._again_s) >= _MOST_NOTED:
                self._again_s.clear()
            self._again_s[space] = now + _PAUSE_S  # nor does another thread try it now
            clears = self._clears
        try:
            noted = self._note(space, now + deadline_s)
        except Exception as error:  # the pages were stored
            said = "tier %s: what shards a model has is not written down now: %s"
            log_once(f"tiers.mooncake.marker:{kind_of(str(error))}", said, self._title, error, logger=_log)
            return
        with self._lock:
            if noted and clears == self._clears:
                self._again_s[space] = time.monotonic() + _NOTED_S

    def clear(self, namespace: bytes | None, deadline_s: float) -> None:
        """Remove the markers of a namespace; of all, they go with the pages, and then it is to `look_again`."""
        try:
            if namespace is not None:
                self._remove([marker_name(namespace, number) for number in range(_NUMBERS)], deadline_s)
        finally:
            self.look_again()

    def look_again(self) -> None:
        """Markers may be gone, also those of a `note` that is under way."""
        with self._lock:
            self._again_s.clear()
            self._clears += 1

    def _note(self, space: SpaceName, end_s: float) -> bool:
        for _ in range(_TRIES):
            if time.monotonic() >= end_s:
                break
            shards, free = self._found(space.namespace, end_s)
            if space.shard in shards:
                return True
            if free is None:
                said = "tier %s: a model has more than %d shards: instances with another TP or PP size do not find all"
                log_once("tiers.mooncake.markers", said, self._title, _NUMBERS, logger=_log)
                return True
            shard = space.shard
            bounds = (shard.layer_start, shard.layer_stop, shard.head_start, shard.head_stop)
            page = np.frombuffer(_CONTENT.pack(*bounds), dtype=np.uint8)
            sealed = seal(space, _key(free), [page], xxhash.xxh3_64_intdigest(page.data))
            marker = Sealed(_key(free), [page], sealed)
            name = marker_name(space.namespace, free)
            if self._write([name], [marker], len(page), end_s - time.monotonic()) == [Put.FAILED]:
                return False
        return False

    def _found(self, namespace: bytes, end_s: float) -> tuple[list[Shard], int | None]:
        """The shards that have markers, and the first number that stands for none."""
        names = [marker_name(namespace, number) for number in range(_NUMBERS)]
        there = self._are_there(names, end_s - time.monotonic())
        numbers = [number for number, is_there in enumerate(there) if is_there]
        pages = [np.zeros(_CONTENT.size, dtype=np.uint8) for _ in numbers]
        seals: Sequence[bytes | None] = ()
        if numbers:
            places = [[page] for page in pages]
            seals = self._read([names[number] for number in numbers], places, _CONTENT.size, end_s - time.monotonic())
        shards = []
        for number, page, found in zip(numbers, pages, seals, strict=True):
            try:
                shard = Shard(*_CONTENT.unpack(page.tobytes()))
            except ValueError:
                continue
            checksum = xxhash.xxh3_64_intdigest(page.data)
            space = SpaceName(namespace, shard)
            if found is not None and why_broken(found, space, _key(number), [page], checksum) is None:
                shards.append(shard)
        return shards, next((number for number, is_there in enumerate(there) if not is_there), None)


def _key(number: int) -> bytes:
    return number.to_bytes(32, "little")
