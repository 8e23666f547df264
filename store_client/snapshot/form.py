"""What a snapshot's bytes mean. Everything read from a folder goes through here: it is understood, or a SnapshotError.

<snapshot>/manifest.json   what is in it, with the digest of the index; it has its own digest, and is written last
<snapshot>/index           an entry of 72 bytes a page, in the order in which pages come back: a parent before its child
<snapshot>/pages.NNNNN     the bytes of the pages, one after the other
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_connector.errors import NamespaceError, SnapshotError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import KEY_NBYTES
from mooncake_connector.kv.namespace import Namespace

KIND = "pool of mooncake-connector"
FORMAT_VERSION = 1
MANIFEST, INDEX = "manifest.json", "index"
MAX_MANIFEST_NBYTES = 16 << 20

MAX_PAGES = 1 << 27
"""An index of more is not believed: it is read into memory. As many of the smallest pages are a pool of 4 TiB."""

NO_PARENT = 0xFFFFFFFF
ENTRY = np.dtype(
    [
        ("key", "u1", KEY_NBYTES),
        ("checksum", "<u8"),
        ("idle_ns", "<u8"),
        ("offset", "<u8"),
        ("nbytes", "<u4"),
        ("file", "<u4"),
        ("space", "<u4"),
        ("parent", "<u4"),
    ]
)
"""A page of the index: XXH3-64 of its bytes, nanoseconds since its last use when the snapshot was taken, where its
bytes lie, the place of its namespace and shard in the manifest, and its parent's place in the index."""
Entries = npt.NDArray[np.void]
"""Of dtype ENTRY."""
_ROWS_AT_ONCE = 1 << 20

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Bound = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class SpaceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One namespace and shard, and what the snapshot has of it."""

    namespace: dict[str, Any]
    shard: tuple[Bound, Bound, Bound, Bound]
    pages: Count
    nbytes: Count

    def name(self) -> tuple[Namespace, Shard] | None:
        """What the pages are; None for what this version does not know, such as a field that came later."""
        try:
            return Namespace.from_dict(self.namespace), Shard(*self.shard)
        except (NamespaceError, ValueError):
            return None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    package: str
    """Version of mooncake-connector that wrote it."""
    taken: Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
    """Unix time in seconds."""
    capacity_nbytes: Count
    """Of the pool."""
    spaces: list[SpaceEntry]
    pages: Annotated[int, msgspec.Meta(ge=0, le=MAX_PAGES)]
    files: list[Count]
    """Sizes of the files of pages, in bytes."""
    index_sha256: str


class _Envelope(msgspec.Struct, frozen=True):
    """Outside the digest is what tells whether the rest can be understood."""

    kind: str
    format: int
    sha256: str = ""
    manifest: msgspec.Raw = msgspec.Raw()


def pages_file(number: int) -> str:
    return f"pages.{number:05d}"


def encode_manifest(manifest: Manifest) -> bytes:
    inner = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Envelope(KIND, FORMAT_VERSION, hashlib.sha256(inner).hexdigest(), msgspec.Raw(inner)))


def parse_manifest(raw: bytes, where: Path) -> Manifest:
    """Raises SnapshotError; the message says what to do."""
    try:
        envelope = msgspec.json.decode(raw, type=_Envelope)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise damaged(where, f"{MANIFEST}: {error}") from None
    if envelope.kind != KIND:
        raise SnapshotError(
            f"{where} is not a snapshot of a pool (its {MANIFEST} is of another kind): name a folder that "
            "`mooncake-connector store snapshot` wrote"
        )
    if envelope.format != FORMAT_VERSION:
        raise SnapshotError(
            f"snapshot {where} has format {envelope.format}, this version reads {FORMAT_VERSION}: restore it with the "
            "version that wrote it, or delete it; engines then begin with what the pool has"
        )
    inner = bytes(envelope.manifest)
    if hashlib.sha256(inner).hexdigest() != envelope.sha256:
        raise damaged(where, f"{MANIFEST} does not match its SHA-256")
    try:
        return msgspec.json.decode(inner, type=Manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise damaged(where, f"{MANIFEST}: {error}") from None


def damaged(where: Path, why: str) -> SnapshotError:
    return SnapshotError(
        f"snapshot {where} is damaged ({why}) and nothing of it is used: delete it, and take another one; engines "
        "begin with what the pool has, and compute the rest again"
    )


def check_entries(entries: Entries, manifest: Manifest, where: Path) -> None:
    """Raises SnapshotError unless every entry leads somewhere, parents come first, and the counts are those said."""
    sizes = np.array(manifest.files, dtype=np.uint64)
    counted = np.zeros((len(manifest.spaces), 2), dtype=np.int64)
    for at in range(0, len(entries), _ROWS_AT_ONCE):
        part = entries[at : at + _ROWS_AT_ONCE]
        if (part["space"] >= len(manifest.spaces)).any() or (part["file"] >= len(sizes)).any():
            raise damaged(where, "its index names what the manifest does not")
        size, nbytes = sizes[part["file"]], part["nbytes"].astype(np.uint64)
        outside = (nbytes == 0) | (nbytes > size) | (part["offset"] > size - np.minimum(nbytes, size))
        if outside.any():
            raise damaged(where, f"entry {at + int(outside.argmax())} of its index lies outside its file")
        linked = np.flatnonzero(part["parent"] != NO_PARENT)
        parents = part["parent"][linked].astype(np.int64)
        if (parents >= linked + at).any() or _are_strangers(part[linked], entries[parents], manifest):
            raise damaged(where, "its index puts a page before its parent, or into another namespace")
        np.add.at(counted, part["space"], np.stack([np.ones(len(part), dtype=np.int64), nbytes.astype(np.int64)], 1))
    if counted.tolist() != [[space.pages, space.nbytes] for space in manifest.spaces]:
        raise damaged(where, "its index has other pages than the manifest says")


def _are_strangers(entries: Entries, parents: Entries, manifest: Manifest) -> bool:
    """Whether any of them is in another namespace than its parent, and not a page of two groups of a model's layers."""
    grouped = np.array([bool(space.namespace.get("group")) for space in manifest.spaces], dtype=np.bool_)
    of_groups = grouped[entries["space"]] & grouped[parents["space"]] & (entries["key"] == parents["key"]).all(axis=1)
    return bool(((entries["space"] != parents["space"]) & ~of_groups).any())


def entry_of(name: tuple[Namespace, Shard], pages: int, nbytes: int) -> SpaceEntry:
    namespace, shard = name
    bounds = (shard.layer_start, shard.layer_stop, shard.head_start, shard.head_stop)
    fields: Mapping[str, Any] = namespace.to_dict()
    return SpaceEntry(namespace=dict(fields), shard=bounds, pages=pages, nbytes=nbytes)
