"""Names of objects: where in a bucket a page lies, and the way back from a name that a listing gave.

    PREFIX/mckv1/NAMESPACE/SHARD/NBYTES/KEY     a page and its seal; digests in hex, the shard as layers and heads
    PREFIX/mckv1/clock, PREFIX/mckv1/swept      what retention notes

What has no such name was put there by somebody else: it is not counted and never deleted.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mooncake_connector.kv.geometry import Shard
from store_client.tiers.base import SEAL_NBYTES, SpaceName

FOLDER = "mckv1"
CLOCK = f"{FOLDER}/clock"
SWEPT = f"{FOLDER}/swept"

_URL = re.compile(r"s3://([a-z0-9][a-z0-9._-]{1,61}[a-z0-9])((?:/[A-Za-z0-9!_.*'()=-]+)*)/?")
_SHARD = re.compile(r"(\d{1,9})-(\d{1,9})x(\d{1,9})-(\d{1,9})")
_PAGE = re.compile(rf"{FOLDER}/([0-9a-f]{{64}})/(\d+-\d+x\d+-\d+)/(\d{{1,15}})/([0-9a-f]{{64}})")


class PageName(NamedTuple):
    """What the name of a page says."""

    namespace: bytes
    nbytes: int
    """Of the page; its object has SEAL_NBYTES more."""


def split_url(url: str) -> tuple[str, str] | None:
    """(bucket, prefix) of s3://bucket/prefix, or None where it is something else; the prefix may be empty."""
    found = _URL.fullmatch(url)
    return (found[1], found[2].strip("/")) if found and "/../" not in url + "/" and "/./" not in url + "/" else None


def of_namespace(namespace: bytes | None) -> str:
    """What all pages of a namespace lie under, or all pages."""
    return FOLDER if namespace is None else f"{FOLDER}/{namespace.hex()}"


def of_space(space: SpaceName) -> str:
    return f"{of_namespace(space.namespace)}/{_shard(space.shard)}"


def of_page(space: SpaceName, key: bytes, nbytes: int) -> str:
    return f"{of_space(space)}/{nbytes}/{key.hex()}"


def read_name(path: str, object_nbytes: int) -> PageName | None:
    """The page that an object of this name and size is, or None for a stranger's. One that was cut is a page too."""
    found = _PAGE.fullmatch(path)
    return PageName(bytes.fromhex(found[1]), max(0, object_nbytes - SEAL_NBYTES)) if found else None


def read_shard(folder: str) -> Shard | None:
    """The shard whose folder this is, or None for a stranger's."""
    found = _SHARD.fullmatch(folder.rpartition("/")[2])
    try:
        return Shard(*map(int, found.groups())) if found else None
    except ValueError:
        return None


def _shard(shard: Shard) -> str:
    return f"{shard.layer_start}-{shard.layer_stop}x{shard.head_start}-{shard.head_stop}"
