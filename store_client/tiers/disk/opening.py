"""Opens the folder of a disk: `pages`, one file, and `index`, an LMDB that says what lies in it.

What cannot be used any more is given up: a disk is a cache. What is not ours is refused and stays as it is.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import lmdb

from mooncake_connector.log import get_logger
from store_client.tiers.base import TierError
from store_client.tiers.disk.index import Index, Meta, Page
from store_client.tiers.disk.pagefile import GRANULE, Locked, PageFile
from store_client.tiers.disk.pages import check_places
from store_client.tiers.own_folder import make_folder, refuse_foreign

PAGES, INDEX = "pages", "index"

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    file: PageFile
    index: Index
    meta: Meta
    """As the one before left it."""
    pages: dict[bytes, Page]
    """By name."""


def open_folder(tier: str, path: Path, limit: int, *, direct: bool) -> Opened:
    """`limit` is the capacity in granules; `tier` is what messages begin with.

    Raises TierError, OSError, lmdb.Error.
    """
    make_folder(tier, path)
    refuse_foreign(tier, path, lambda name: _is_ours(path, name))
    try:
        file = PageFile(path / PAGES, direct=direct)
    except Locked:
        raise TierError(
            f"{tier}: folder {path} is in use by another agent; a disk serves one pool: set another `path`, or end the "
            "other agent",
            "unavailable",
        ) from None
    try:
        index, meta, pages = _open_index(tier, path / INDEX, limit * GRANULE, file)
        _fit_into(limit, file, index, meta, pages)
        return Opened(file, index, meta, pages)
    except BaseException:
        file.close()
        raise


def _is_ours(path: Path, name: str) -> bool:
    if name == INDEX:
        return set(_names(path / INDEX)) <= {"data.mdb"} and (path / PAGES).exists()
    return name == PAGES and PageFile.is_one(path / PAGES)


def _open_index(tier: str, path: Path, capacity_nbytes: int, file: PageFile) -> tuple[Index, Meta, dict[bytes, Page]]:
    """The index of this very file, or an empty one where there is none or it is damaged."""
    found = _read_index(path, capacity_nbytes, file)
    if not isinstance(found, str):
        return found
    if found:
        logger.warning("%s: folder %s starts empty, what it held cannot be used (%s)", tier, path.parent, found)
    with suppress(FileNotFoundError):
        shutil.rmtree(path)
    index, meta = Index(path, capacity_nbytes), Meta(file.id)
    index.commit({}, meta)
    return index, meta, {}


def _read_index(path: Path, capacity_nbytes: int, file: PageFile) -> tuple[Index, Meta, dict[bytes, Page]] | str:
    """What it says, or why it cannot be used: "" for a new one."""
    try:
        index = Index(path, capacity_nbytes)
    except lmdb.Error as error:
        return str(error)
    why = ""
    try:
        meta = index.meta()
        if meta is not None and meta.file == file.id:
            pages = dict(index.pages())
            check_places(pages.values(), 1, file.granules)
            return index, meta, pages
        if meta is not None:
            why = "its index is of another file"
    except (lmdb.Error, ValueError) as error:
        why = str(error)
    index.close()
    return why


def _fit_into(limit: int, file: PageFile, index: Index, meta: Meta, pages: dict[bytes, Page]) -> None:
    """Forget what lies beyond the capacity, should that be smaller than it was."""
    beyond = [name for name, page in pages.items() if any(sum(extent) > limit for extent in page.extents)]
    if beyond:
        index.commit(dict.fromkeys(beyond), meta)
        for name in beyond:
            del pages[name]
    if file.granules > limit:
        file.cut(limit)


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []
