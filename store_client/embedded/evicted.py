"""What a pool remembers of pages that it does not have: when each went or was refused, why, and how long it was unused.

A direct-mapped table in a mapped file: a page's name gives its place, and whoever comes later takes it. It explains and
decides nothing. An entry that is torn, overwritten or lost with a killed process is a page of which nothing is known,
and a pool without the file, of an older version or on a full file system, works like one with it.

Anybody writes and reads without a lock: the two words of an entry prove each other.
"""

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mooncake_connector.log import get_logger, log_once
from store_client.embedded.locks import open_file, secure_bytes
from store_client.embedded.names import U8, U64, hash_key, hash_keys
from store_client.embedded.table import now_ns
from store_client.fate import UNKNOWN, Fate, Known, Lost

logger = get_logger(__name__)

_ENTRY_NBYTES = 16
_FEWEST, _MOST = 1 << 12, 1 << 18
_TICK_BITS = 26
"""Times are kept in units of 2^26 ns, 67 ms: 32 bits of them last 9 years, 24 bits 13 days."""
_LONGEST = np.uint64((1 << 24) - 1)
_UNUSED_SHIFT, _WHEN_SHIFT = np.uint64(8), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)

_CODES: dict[Lost, int] = {
    Lost.PRESSURE: 1, Lost.SHRUNK: 2, Lost.REMOVED: 3, Lost.CLEARED: 4, Lost.CORRUPT: 5,
    Lost.FULL: 16, Lost.NO_SPACE: 17, Lost.BUSY: 18, Lost.INDEX: 19, Lost.ERROR: 20,
}  # fmt: skip
"""In files: a number is never given another meaning."""
_LOST = {code: lost for lost, code in _CODES.items()}


def num_entries(max_pages: int) -> int:
    """A power of two, so that a page's place is some bits of its hash: for each two pages that the index has room for,
    which is more than a pool has, as pages are larger than the index reckons with."""
    return min(_MOST, max(_FEWEST, (1 << max(0, max_pages - 1).bit_length()) // 2))


def evicted_nbytes(max_pages: int) -> int:
    return num_entries(max_pages) * _ENTRY_NBYTES


class Evicted:
    """The table in the file `path`, which is made if it is not there, or not of the size for `max_pages`.

    Only who holds the pool's open lock makes one.
    """

    def __init__(self, path: Path, max_pages: int) -> None:
        self._entries: U64 = np.zeros((0, 2), dtype=np.uint64)
        try:
            mapped = _mapped(path, evicted_nbytes(max_pages))
        except OSError as error:
            log_once(
                "store.evicted", "%s cannot be made (%s): nothing is remembered of pages that go", path, error.strerror,
                logger=logger,
            )  # fmt: skip
            return
        self._entries = np.frombuffer(mapped, dtype="<u8").reshape(-1, 2)

    def note(self, hashes: U64, cause: Lost, used_ns: U64 | None = None) -> None:
        """The pages with these hashes (`names.hash_keys`) are gone, or were refused.

        `used_ns`: `table.now_ns()` of their last uses; None for pages that were never there.
        """
        if not len(self._entries) or not len(hashes):
            return
        now = now_ns()
        what = np.full(len(hashes), (now >> _TICK_BITS) << int(_WHEN_SHIFT) | _CODES[cause], dtype=np.uint64)
        if used_ns is not None:
            unused = (np.uint64(now) - np.minimum(used_ns, np.uint64(now))) >> np.uint64(_TICK_BITS)
            what |= np.minimum(unused, _LONGEST) << _UNUSED_SHIFT
        places = self._places(hashes)
        self._entries[places, 0] = hashes ^ what
        self._entries[places, 1] = what

    def fates(self, keys: U8, space: int) -> list[Fate]:
        """What is remembered of each page; `keys` is (n, 32), `space` their identity. UNKNOWN where nothing is."""
        if not len(self._entries):
            return [UNKNOWN] * len(keys)
        hashes = hash_keys(keys, space)
        entries = self._entries[self._places(hashes)]
        what = entries[:, 1]
        known = ((entries[:, 0] ^ what) == hashes) & (what != 0)
        now = now_ns() >> _TICK_BITS
        told = {word: _fate(word, now) for word in set(what[known].tolist())}  # those that went together are alike
        return [told[word] if right else UNKNOWN for word, right in zip(what.tolist(), known.tolist(), strict=True)]

    def fate(self, key: bytes, space: int) -> Fate:
        """As `fates`, of one page, for a tenth of the time: an engine asks so of each prompt that is not all there."""
        if not len(self._entries):
            return UNKNOWN
        hashed = hash_key(key, space)
        place = 2 * ((hashed & 0xFFFFFFFF) >> 33 - len(self._entries).bit_length())
        proof, what = self._entries.item(place), self._entries.item(place + 1)
        return _fate(what, now_ns() >> _TICK_BITS) if what and proof ^ what == hashed else UNKNOWN

    def _places(self, hashes: U64) -> npt.NDArray[np.int64]:
        """The high bits of the hash's low half: the hash cells of the page table use its high half to tell names."""
        bits = len(self._entries).bit_length() - 1
        return ((hashes & _LOW) >> np.uint64(32 - bits)).astype(np.int64)


def _fate(what: int, now: int) -> Fate:
    lost = _LOST.get(what & 0xFF)
    if lost is None:
        return UNKNOWN
    ago_s = _seconds(max(0, now - (what >> int(_WHEN_SHIFT))))
    if lost.refused:
        return Fate(Known.REFUSED, lost, ago_s)
    return Fate(Known.GONE, lost, ago_s, _seconds(what >> int(_UNUSED_SHIFT) & int(_LONGEST)))


def _seconds(ticks: int) -> float:
    return (ticks << _TICK_BITS) / 1e9


def _mapped(path: Path, nbytes: int) -> mmap.mmap:
    """The file, mapped; all of it is allocated, since a store into a hole of a full file system kills the process."""
    with contextlib.suppress(OSError):
        fd = open_file(path, os.O_RDWR)
        try:
            if os.fstat(fd).st_size == nbytes:
                return mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # who has it mapped keeps it
    fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        secure_bytes(fd, 0, nbytes)
        return mmap.mmap(fd, nbytes)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def refusal(cause: str) -> Lost:
    """What to remember of a put that failed for `cause` (`table.CAUSES`)."""
    return next((lost for lost in _CODES if lost.refused and lost.value == cause), Lost.ERROR)

