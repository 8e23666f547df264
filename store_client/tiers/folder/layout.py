"""What lies where in a shared folder, and by which names it is recognised.

    <path>/mooncake-connector-pages.txt               says whose folder it is; where it is missing nothing is mounted
    <path>/pages/<namespace>/<shard>/<2 digits>/<key>   a page, and behind it its seal of 64 bytes
    ...<key>.<16 random digits>.new                     a page that is being written, or was when its writer ended

The digest of the namespace and the key are in hexadecimal; the two digits are the key's first; a shard is
"0-32.0-8", its layers and KV heads. Nothing else is ever read or removed, and no link is followed: whoever may write
there could point it at files elsewhere.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mooncake_connector.kv.geometry import Shard
from store_client.embedded.locks import write_file
from store_client.tiers.base import SEAL_NBYTES, SpaceName, TierError
from store_client.tiers.own_folder import refuse_foreign

MARKER = "mooncake-connector-pages.txt"
SWEPT, PAGES = "swept", "pages"
_MARKER_TEXT = "Pages of KV cache that mooncake-connector shares between hosts. See docs/fleet.md.\n"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"(\d{1,9})-(\d{1,9})\.(\d{1,9})-(\d{1,9})")
_FAN = re.compile(r"[0-9a-f]{2}")
_NEW = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.new")
_CLOCK = re.compile(r"[0-9a-f]{16}\.clock")
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ON_THE_WAY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
"""Costs a look-up and no more: the file server opens nothing."""


def space_folder(root: Path, space: SpaceName) -> str:
    shard = space.shard
    where = f"{shard.layer_start}-{shard.layer_stop}.{shard.head_start}-{shard.head_stop}"
    return f"{root}/pages/{space.namespace.hex()}/{where}"


def page_path(folder: str, key: bytes) -> str:
    name = key.hex()
    return f"{folder}/{name[:2]}/{name}"


def new_name(page: str) -> str:
    return f"{page}.{os.urandom(8).hex()}.new"


def clock_name(root: Path) -> str:
    return f"{root}/{os.urandom(8).hex()}.clock"


def is_page(name: str) -> bool:
    return _DIGEST.fullmatch(name) is not None


def is_new(name: str) -> bool:
    return _NEW.fullmatch(name) is not None


def claim(tier: str, root: Path) -> None:
    """Make an empty folder ours, or see that it is. Raises TierError, OSError."""
    if not is_claimed(root):
        _claim_new(tier, root)
    with suppress(FileExistsError):
        os.mkdir(root / PAGES, 0o700)


def _claim_new(tier: str, root: Path) -> None:
    if not root.is_dir():
        if root.exists():
            raise TierError(f"{tier}: {root} is no folder; set `path` to a folder", "denied", lasting=True)
        raise TierError(
            f"{tier}: folder {root} is not there: mount what it lies on, or make it once, from one host: "
            f"mkdir -m 700 {root} (it is never made by itself, which would be on the wrong disk without the mount)",
            "unavailable",
        )  # fmt: skip
    try:
        refuse_foreign(tier, root, lambda name: name in (MARKER, SWEPT) or is_clock(name))
    except TierError:
        if MARKER in os.listdir(root):  # another host has just claimed it, and put there what was found
            return
        raise
    write_file(root / MARKER, _MARKER_TEXT.encode())


def is_claimed(root: Path) -> bool:
    """Raises OSError where nobody can tell."""
    return _mode(root / MARKER) is not None


def is_mounted(root: Path) -> bool:
    """Whether what was claimed is still there. Raises OSError where nobody can tell."""
    mode = _mode(root / PAGES)
    return mode is not None and stat.S_ISDIR(mode)


def _mode(path: Path) -> int | None:
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_clock(name: str) -> bool:
    return _CLOCK.fullmatch(name) is not None


def page_folders(root: Path, namespace: bytes | None = None) -> Iterator[str]:
    """The folders that hold files of pages, in an order that differs from host to host; those above them are told after
    them. Folders that vanish meanwhile are left out."""
    top = f"{root}/{PAGES}"
    for digest in _below(top, _DIGEST) if namespace is None else [f"{top}/{namespace.hex()}"]:
        for shard in _below(digest, _SHARD):
            yield from _below(shard, _FAN)
            yield shard
        yield digest


def shards(root: Path, namespace: bytes) -> list[Shard]:
    """Those that have a folder. Raises OSError where nobody can tell."""
    found = []
    for folder in _below(f"{root}/{PAGES}/{namespace.hex()}", _SHARD):
        bounds = _SHARD.fullmatch(folder.rpartition("/")[2])
        with suppress(ValueError):  # a stranger's
            found += [Shard(*map(int, bounds.groups()))] if bounds else []
    return found


def _below(folder: str, wanted: re.Pattern[str]) -> list[str]:
    try:
        with opened(folder, to_list=True) as fd, os.scandir(fd) as entries:
            names = [one.name for one in entries if wanted.fullmatch(one.name) and one.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [f"{folder}/{name}" for name in names]


@contextmanager
def opened(folder: str, *, to_list: bool = False) -> Iterator[int]:
    """As `open_folder`, and closed again."""
    fd = open_folder(folder, to_list=to_list)
    try:
        yield fd
    finally:
        os.close(fd)


def open_folder(folder: str, *, to_list: bool = False, make: bool = False) -> int:
    """A descriptor of `pages` or a folder below it, for the `dir_fd` of other calls; with `to_list` also to be listed.

    With `make` folders that are missing are made, but not `pages`, which is missing where nothing is mounted. Raises
    OSError, ENOTDIR where one of them is a link.
    """
    root, _, below = folder.rpartition(f"/{PAGES}")
    names = [PAGES, *below.split("/")[1:]]
    fd = os.open(root, _ON_THE_WAY)  # that may be a link: whoever sets up the tier says where it is
    for number, name in enumerate(names):
        flags = _LISTED if to_list and number == len(names) - 1 else _ON_THE_WAY
        above = fd
        try:
            if make and number:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=above)
            fd = os.open(name, flags | os.O_NOFOLLOW, dir_fd=above)
        finally:
            os.close(above)
    return fd


def page_nbytes(file_nbytes: int) -> int:
    return file_nbytes - SEAL_NBYTES
