"""Reading pages: find, verify, hand out, look again. Takes no lock, so no stopped or killed process can hold it up.

A page may be evicted and overwritten while it is read. The row read before and after tells: rows of evicted pages are
cleared before their space is given to anybody else.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import xxhash

from mooncake_connector.kv.keys import KEY_NBYTES
from mooncake_connector.log import get_logger, log_once
from store_client.base import Bytes, Consume, Digests, Pieces, Settle
from store_client.embedded.arena import GRANULE, Arena, gather
from store_client.embedded.faults import CallersOwn
from store_client.embedded.hashing import completed, digest
from store_client.embedded.names import Bools, join_keys
from store_client.embedded.owners import Counters
from store_client.embedded.table import BROUGHT, READ, Found, Table

logger = get_logger(__name__)

_FEW = 64
"""So many keys are looked up one after the other."""

ConsumeAll: TypeAlias = Callable[[Sequence[tuple[int, Pieces, int]]], None]
"""Called with (number in the keys, pieces, XXH3-64) of every page that is there."""
_Page: TypeAlias = tuple[int, Found]
"""A page that is there, and its number in the keys."""
_NOTHING: Bytes = np.zeros(0, dtype=np.uint8)


class Reader:
    """Reads of one pool. All methods may be called from any thread."""

    def __init__(
        self, table: Table, arena: Arena, counters: Counters, doubt: Callable[[int, Found | None], None]
    ) -> None:
        self._table, self._arena, self._counters, self._doubt = table, arena, counters, doubt

    def prefix(self, keys: Sequence[bytes], space: int) -> int:
        """Leading keys that are present. The first alone decides most lookups that miss, so others are checked late."""
        try:
            if len(keys) <= _FEW:
                return self._table.cells.leading(keys, space)
            if not self._table.cells.leading(keys[:1], space):
                return 0
        except struct.error:  # a key of another length, of which is told next
            pass
        try:
            joined = join_keys(keys)
        except ValueError as error:  # says nothing about the pool
            raise CallersOwn from error
        present = self._table.present(joined, space)
        return len(present) if present.all() else int(present.argmin())

    def contains(self, keys: Sequence[bytes], space: int) -> list[bool]:
        if len(keys) == 1:
            return [self._table.present_one(keys[0], space)]
        return [slot >= 0 for slot in self._table.slots(join_keys(keys), space)]

    def present(self, keys: Sequence[bytes], space: int) -> Bools:
        """As `contains`, by fingerprints (`Cells.present`): a fifth of the time where there are many."""
        return self._table.present(np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, KEY_NBYTES), space)

    def sizes(self, keys: Sequence[bytes], space: int) -> list[int]:
        """Bytes of each page; 0 where it is not present."""
        slots = self._table.slots(join_keys(keys), space)
        rows = [self._table.at(slot, key, space) if slot >= 0 else None for slot, key in zip(slots, keys, strict=True)]
        return [found.row.nbytes if found is not None else 0 for found in rows]

    def read(
        self, keys: Sequence[bytes], space: int, consume: Consume, nbytes: int, settle: Settle | None = None
    ) -> list[bool]:
        """See `Space.read`."""
        done = [False] * len(keys)
        touched = []
        pages = self._find(keys, space, nbytes)
        for i, found in self._shown(pages, consume) if settle is None else self._begun(pages, consume, settle):
            done[i] = True
            touched.append(found.slot)
        if touched:
            self._table.touch(touched, READ, use=True)
        self._counters.add(read_pages=len(touched), read_nbytes=len(touched) * nbytes)
        return done

    def _find(self, keys: Sequence[bytes], space: int, nbytes: int) -> Iterator[_Page]:
        for i, slot in enumerate(self._table.slots(join_keys(keys), space)):
            if slot < 0:
                continue
            found = self._table.at(slot, keys[i], space)
            if found is None:
                self._doubt(slot, None)
            elif found.row.nbytes != nbytes:
                self._counters.add(geometry=1)
            else:
                yield i, found

    def _shown(self, pages: Iterable[_Page], consume: Consume) -> Iterator[_Page]:
        """Show one page after the other; those that were right and stayed."""
        for i, found in pages:
            whole, right = self._verified(found)
            if right:
                consume(i, _read_only(whole))
            if self._stayed(found, right):
                yield i, found

    def _begun(self, pages: Iterable[_Page], consume: Consume, settle: Settle) -> Iterator[_Page]:
        """Show all pages, have what reads them come to its end, and verify them; as `_shown`.

        They are found one by one: a device has the first one at work while others are looked for.
        """
        shown: list[tuple[_Page, Bytes]] = []  # a copy lives as long as it is read
        digests: Digests | None = None
        try:
            for page in pages:
                whole = self._whole(page[1])
                shown.append((page, whole))
                if len(whole):
                    consume(page[0], _read_only(whole))
        finally:
            if any(len(whole) for _, whole in shown):
                digests = settle()
        taken = iter(completed(digests, [whole for _, whole in shown if len(whole)]))
        for (i, found), whole in shown:
            if self._stayed(found, len(whole) > 0 and next(taken) == found.row.checksum):
                yield i, found

    def _whole(self, found: Found) -> Bytes:
        """The page's bytes in one piece; none where its row leads nowhere."""
        pieces = self.pieces(found)
        if pieces is None:
            return _NOTHING
        return pieces[0] if len(pieces) == 1 else gather(pieces, found.row.nbytes)

    def _verified(self, found: Found) -> tuple[Bytes, bool]:
        """The page's bytes, and whether they match its checksum."""
        whole = self._whole(found)
        return whole, len(whole) > 0 and digest(whole) == found.row.checksum

    def _stayed(self, found: Found, right: bool) -> bool:
        """The second look: whether a page that was `right` is still where it was."""
        if not self._table.unchanged(found):
            self._counters.add(changed=1)
            return False
        if not right:
            self._report_corrupt(found)
        return right

    def show(self, keys: Sequence[bytes], space: int, consume: ConsumeAll, nbytes: int) -> list[bool]:
        """See `EmbeddedSpace.show`."""
        shown: list[tuple[int, Pieces, int]] = []
        pages: list[Found] = []
        for i, slot in enumerate(self._table.slots(join_keys(keys), space)):
            found = self._table.at(slot, keys[i], space) if slot >= 0 else None
            if found is None or found.row.nbytes != nbytes:
                continue
            pieces = self.pieces(found)
            if pieces is not None:
                shown.append((i, [_read_only(piece) for piece in pieces], found.row.checksum))
                pages.append(found)
        if shown:
            consume(shown)
        stayed = [False] * len(keys)
        for (i, _, _), found in zip(shown, pages, strict=True):
            stayed[i] = self._table.unchanged(found)
        return stayed

    def brought(self, keys: Sequence[bytes], space: int) -> list[bool]:
        """See `EmbeddedSpace.brought`."""
        return self._table.marked(self._table.slots(join_keys(keys), space), BROUGHT)

    def check(self, found: Found) -> bool | None:
        """Whether the page's bytes are right; None if it went away meanwhile."""
        pieces = self.pieces(found)
        right = pieces is not None and _digest(pieces) == found.row.checksum
        if not self._table.unchanged(found):
            return None
        if not right:
            self._report_corrupt(found)
        return right

    def _report_corrupt(self, found: Found) -> None:
        self._doubt(found.slot, found)
        self._counters.add(corrupt_pages=1, corrupt=1)
        log_once(
            "store.corrupt", "page %s in the pool does not match its checksum: computed again, and dropped from the "
            "pool; `mooncake-connector store verify` checks the others", found.row.key.hex(), logger=logger,
        )  # fmt: skip

    def pieces(self, found: Found) -> list[Bytes] | None:
        """Where the page lies in the arena, or None if its row leads nowhere."""
        row = found.row
        if not row.is_listed:
            return self._arena.views(row.extents, row.nbytes)
        listed = self._arena.view(row.extents[0][0], GRANULE)
        if listed is None:
            return None
        count = min(row.num_extents - 1, GRANULE // 8)
        extents = listed[: count * 8].view("<u4").reshape(-1, 2)
        return self._arena.views([(int(first), int(size)) for first, size in extents], row.nbytes)


def _read_only(piece: Bytes) -> Bytes:
    view = piece[:]
    view.flags.writeable = False
    return view


def _digest(pieces: list[Bytes]) -> int:
    if len(pieces) == 1:
        return digest(pieces[0])
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece.data)
    return state.intdigest()
