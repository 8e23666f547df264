"""The folder of a tier: made private, and refused where it is somebody else's."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from store_client.tiers.base import TierError

_NEUTRAL = "lost+found"
"""What an empty ext4 volume holds."""


def make_folder(tier: str, path: Path) -> None:
    """The folder, made if it is not there. Raises OSError; TierError where what it should lie in is not there
    either, and for what is no folder, or not ours alone."""
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        info = os.stat(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise TierError(
                f"{tier}: folder {path} is a link to {os.readlink(path)}, which is not there: mount it, or make it",
                "unavailable",
            ) from None
        raise TierError(
            f"{tier}: folder {path} cannot be made, {path.parent} is not there: mount what it lies on, or make it: "
            f"mkdir -p {path.parent} (it is never made by itself, which would be on the wrong disk without the mount)",
            "unavailable",
        ) from None
    if not stat.S_ISDIR(info.st_mode):
        raise _refusal(tier, path, "is no folder", "set `path` to a folder")
    if info.st_uid != os.geteuid():
        seen = f"belongs to user id {info.st_uid}, this process runs as {os.geteuid()}"
        raise _refusal(tier, path, seen, "set `path` to a folder of this user")
    if info.st_mode & 0o077:
        seen = f"has mode {info.st_mode & 0o777:04o}: others may reach it"
        raise _refusal(tier, path, seen, f"chmod 700 {path}")


def refuse_foreign(tier: str, path: Path, is_ours: Callable[[str], bool]) -> None:
    """Raises TierError for a folder that holds something else than what `is_ours` knows by name; OSError."""
    foreign = sorted(name for name in os.listdir(path) if name != _NEUTRAL and not is_ours(name))
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise _refusal(
            tier, path, f"holds something else already ({shown}), and nothing in it was touched",
            "set `path` to an empty folder, or to one that does not exist yet",
        )  # fmt: skip


def _refusal(tier: str, path: Path, seen: str, remedy: str) -> TierError:
    return TierError(f"{tier}: folder {path} {seen}; {remedy}", "denied", lasting=True)
