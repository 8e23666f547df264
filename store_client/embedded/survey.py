"""All pages of a pool at one moment, and a look at their bytes that counts as no use: for who copies a pool away.

Nothing here takes a lock. What changes meanwhile shows when a page is looked at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import KEY_NBYTES
from mooncake_connector.kv.namespace import Namespace
from store_client.base import Pieces
from store_client.embedded.pool import Pool
from store_client.embedded.row import ROW_DTYPE
from store_client.embedded.table import Found, Table, now_ns

PAGE = np.dtype(
    [
        ("key", "u1", KEY_NBYTES),
        ("checksum", "<u8"),
        ("generation", "<u8"),
        ("idle_ns", "<u8"),
        ("number", "<u8"),
        ("parent", "<i8"),
        ("space", "<u4"),
        ("nbytes", "<u4"),
        ("depth", "<u4"),
        ("slot", "<u4"),
    ]
)
"""A page of a survey: `space` is a place in `Survey.spaces` and `number` its identity in the pool, `parent` a place in
`Survey.pages` or -1, `idle_ns` the time since its last use, and `checksum` its XXH3-64."""

Pages = npt.NDArray[np.void]
"""Of dtype PAGE."""
View = Callable[[Sequence[tuple[int, Pieces]]], None]

_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class Survey:
    """What a pool held at one moment."""

    pages: Pages
    spaces: list[tuple[Namespace, Shard]]
    """Those whose pages hang on others' last."""
    unnamed: int
    """Further pages, of which nobody can say what they are: the pool's list of namespaces was damaged."""


def survey(pool: Pool, namespace_digest: bytes | None) -> Survey:
    """The pages of one namespace, or of all."""
    names = pool.spaces.all()
    pages, row_parents = _read(pool.table)
    known = np.isin(pages["number"], np.fromiter(names, dtype=np.uint64, count=len(names)))
    wanted = {number: name for number, name in names.items() if namespace_digest in (None, name[0].digest)}
    numbers = np.array(sorted(wanted), dtype=np.uint64)
    spaces = sorted(range(len(numbers)), key=lambda at: wanted[int(numbers[at])][0].rests_on_others)
    mine = np.isin(pages["number"], numbers)
    unnamed = int(np.count_nonzero(~known)) if namespace_digest is None else 0
    pages, row_parents = pages[mine], row_parents[mine]
    pages["space"] = np.argsort(spaces)[np.searchsorted(numbers, pages["number"])]
    names_of = [wanted[int(numbers[at])] for at in spaces]
    rests = np.array([name.rests_on_others for name, _ in names_of], dtype=np.bool_)
    pages["parent"] = _parents(pool.table, pages, row_parents, rests)
    return Survey(pages, names_of, unnamed)


def _read(table: Table) -> tuple[Pages, npt.NDArray[np.uint32]]:
    """Every page that its row names, without parents, and the parent's slot that the row was written with."""
    live = table.live_slots()
    pages = np.zeros(len(live), dtype=PAGE)
    row_parents = np.zeros(len(live), dtype=np.uint32)
    now = now_ns()
    for at in range(0, len(live), _ROWS_AT_ONCE):
        slots, part = live[at : at + _ROWS_AT_ONCE], pages[at : at + _ROWS_AT_ONCE]
        rows = np.take(table.rows, slots, axis=0).reshape(-1).view(ROW_DTYPE)
        for name in ("key", "checksum", "generation", "nbytes", "depth"):
            part[name] = rows[name]
        part["number"], part["slot"] = rows["space"], slots
        part["idle_ns"] = now - np.minimum(table.access[slots], np.uint64(now))
        row_parents[at : at + _ROWS_AT_ONCE] = rows["parent"]
    there = (pages["generation"] > 0) & (pages["nbytes"] > 0)  # not gone since
    return pages[there], row_parents[there]


def _parents(
    table: Table, pages: Pages, row_parents: npt.NDArray[np.uint32], rests: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Places of the parents, where a link leads to one: its slot may hold another page by now.

    Args:
        rests: of each space, whether its pages hang on those of full attention with the same keys.
    """
    places = np.full(table.max_pages + 1, -1, dtype=np.int64)
    places[pages["slot"]] = np.arange(len(pages))
    links = table.parent[pages["slot"]]
    parents: npt.NDArray[np.int64] = places[np.minimum(links, table.max_pages)]
    above = pages[parents]  # of those without one, any page
    beneath = rests[pages["space"]] & ~rests[above["space"]] & (above["key"] == pages["key"]).all(axis=1)
    right = (above["number"] == pages["number"]) | beneath
    right &= above["depth"] < pages["depth"]
    # A page that took the slot later is younger; but then a link may also have been renewed since.
    right &= (above["generation"] < pages["generation"]) | (links != row_parents)
    return np.where(right, parents, -1)


def peek(pool: Pool, pages: Pages, view: View) -> list[bool | None]:
    """Show the bytes of those pages that are still there and right to `view`, all at once: (i, read-only pieces).

    Returns for each page whether it is right; None where it changed before or while it was shown, and what `view` made
    of it is worth nothing.
    """
    founds: list[Found | None] = []
    results: list[bool | None] = []
    shown: list[tuple[int, Pieces]] = []
    for i, page in enumerate(pages):
        found = _find(pool, page)
        founds.append(found)
        results.append(pool.reader.check(found) if found is not None else None)
        pieces = pool.reader.pieces(found) if found is not None and results[i] else None
        if pieces is not None:
            shown.append((i, pieces))
    view(shown)
    for i, _ in shown:
        found = founds[i]
        if found is None or not pool.table.unchanged(found):
            results[i] = None
    return results


def _find(pool: Pool, page: np.void) -> Found | None:
    found = pool.table.any_at(int(page["slot"]))
    if found is None:
        return None
    row = found.row
    seen = (row.key, row.checksum, row.generation, row.space, row.nbytes)
    surveyed = tuple(page[name] for name in ("checksum", "generation", "number", "nbytes"))
    return found if seen == (page["key"].tobytes(), *surveyed) else None
