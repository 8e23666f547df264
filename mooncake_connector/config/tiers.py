"""Settings of the tiers: what lies behind the pool of a host. `tiers` in the configuration is a list of these.

An entry is a mapping whose `kind` says which tier it is, or the kind's name alone where it needs nothing else. The
order of the list is the order in which the agent asks them: nearest first.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from mooncake_connector.config.values import Nbytes, decode, shown

MAX_TIERS = 8

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-z0-9][a-z0-9_-]*$")]
Text: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]


class TierSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """What every tier has.

    Args:
        name: in metrics, messages and `store stats`; the kind where it is not set. Two tiers must differ in it.
        write: which pages of the pool it is given: all new ones, those with a second use, or none.
        share: whether it is also given pages that another tier had; without it only what this host computed.
        bandwidth: bytes a second that may be written to it at most; None for no bound.
        timeout_s: a call that takes longer has failed, and the tier is left alone for a while.
    """

    name: Name | None = None
    write: Literal["all", "reused", "none"] = "all"
    share: bool = False
    bandwidth: Nbytes | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 5.0

    needs_secret: ClassVar[bool] = False
    """Others may write there: its pages carry a MAC, and `secret_file` must be set."""
    is_local: ClassVar[bool] = False
    """Only this host reads it."""
    medium: ClassVar[Literal["CPU", "DISK"]] = "DISK"
    """What routers are told that its pages lie on."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def title(self) -> str:
        return self.name or self.kind


class MooncakeTier(TierSettings, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="mooncake"):
    """A Mooncake Store cluster. What is not set is taken from Mooncake's own file and variables
    (MOONCAKE_CONFIG_PATH, MOONCAKE_MASTER, ...), then from its defaults."""

    medium = "CPU"

    master: Text | None = None
    metadata: Text | None = None
    host: Text | None = None
    protocol: Literal["tcp", "rdma"] | None = None
    device: Annotated[str, Meta(max_length=1024)] | None = None
    segment: Nbytes | None = None
    buffer: Nbytes | None = None
    replicas: Annotated[int, Meta(ge=1, le=16)] = 1
    soft_pin: bool = False
    tenant: Text | None = None
    cluster_id: Text | None = None


class DiskTier(TierSettings, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="disk"):
    """A folder on a disk of this host, used by one agent at a time."""

    is_local = True

    path: Path
    capacity: Nbytes
    daily_writes: Nbytes | None = None
    direct: bool = True


class FolderTier(TierSettings, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="folder"):
    """A folder that several hosts mount (NFS, 3FS, CephFS, FUSE). Its pages carry a MAC: `secret_file` must be set."""

    needs_secret = True

    path: Path
    capacity: Nbytes | None = None
    keep_days: Annotated[float, Meta(gt=0, le=36500)] | None = None


class ObjectTier(TierSettings, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="object"):
    """An S3-compatible object store: `url` is s3://bucket/prefix. Credentials come from the environment, as AWS's tools
    take them. Its pages carry a MAC: `secret_file` must be set."""

    needs_secret = True

    url: Annotated[str, Meta(min_length=6, max_length=1024, pattern=r"^s3://[^\s@]+$")]
    endpoint: Annotated[str, Meta(max_length=1024, pattern=r"^https?://[^\s@]+$")] | None = None
    region: Text | None = None
    capacity: Nbytes | None = None
    keep_days: Annotated[float, Meta(gt=0, le=36500)] | None = None


AnyTier: TypeAlias = MooncakeTier | DiskTier | FolderTier | ObjectTier
KINDS: dict[str, type[TierSettings]] = {
    "mooncake": MooncakeTier, "disk": DiskTier, "folder": FolderTier, "object": ObjectTier,
}  # fmt: skip


_SIZE = "a size from 1MiB to 1PiB, such as 800GiB"
_TEXT = "text of 1 to 1024 characters"
ALLOWED = {
    "name": "1 to 64 of a-z, 0-9, _ and -, beginning with a letter or a digit",
    "write": '"all", "reused" or "none"',
    **dict.fromkeys(("share", "direct", "soft_pin"), "true or false"),
    "bandwidth": "bytes a second, at least 1MiB, such as 200MiB",
    "timeout_s": "seconds, more than 0 and at most 600",
    "path": "an absolute path",
    **dict.fromkeys(("capacity", "daily_writes", "segment", "buffer"), _SIZE),
    **dict.fromkeys(("master", "metadata", "host", "tenant", "cluster_id", "region"), _TEXT),
    "protocol": '"tcp" or "rdma"',
    "device": "text of at most 1024 characters",
    "replicas": "a whole number from 1 to 16",
    "url": "s3://BUCKET/PREFIX without blanks and @; credentials come from the environment",
    "endpoint": "http://HOST:PORT or https://HOST:PORT without blanks and @; credentials come from the environment",
    "keep_days": "days, more than 0 and at most 36500",
}
"""What each key may be, in words."""
_PRIVATE = {"url", "endpoint"}
"""Keys in which a person may put a password: a message does not repeat what was refused."""


class Tiers(tuple[AnyTier, ...]):
    """The tiers of a pool, nearest first."""


def decode_tiers(value: Any, *, strict: bool) -> Tiers:
    """Tiers from what a file or the engine's JSON holds, or where not `strict` from text, which is JSON or names.

    Raises ValueError that says which entry and key is wrong, what it is, and what is allowed.
    """
    if isinstance(value, str) and not strict:
        text = value.strip()
        value = _parsed(text) if text[:1] in ("[", "{") else [name.strip() for name in text.split(",")]
    if not isinstance(value, list) or len(value) > MAX_TIERS:
        seen = f"{len(value)} tiers" if isinstance(value, list) else _seen(value)
        raise ValueError(f"{seen}: expected a list of at most {MAX_TIERS} tiers")
    tiers = Tiers(_decode_tier(number, entry) for number, entry in enumerate(value, 1))
    titles = [tier.title for tier in tiers]
    if twice := sorted({title for title in titles if titles.count(title) > 1}):
        raise ValueError(f"two tiers are called {twice[0]!r}: give each a `name` of its own")
    titles_at: dict[str, str] = {}
    for tier in tiers:
        place = place_of(tier)
        if place is not None and (other := titles_at.setdefault(place, tier.title)) != tier.title:
            raise ValueError(f"{other} and {tier.title} have the same path {shown(place)}: give each its own")
    return tiers


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"it begins as JSON and is none: {error}; put it in single quotes for a shell") from None


def place_of(tier: AnyTier) -> str | None:
    """The folder that a tier keeps its pages in, by the one name that it has; None for a tier without a folder.

    A shared folder is taken as it is written: to follow links is to ask its server, which may never answer.
    """
    if isinstance(tier, FolderTier):
        return os.path.normpath(tier.path)
    return os.path.realpath(tier.path) if isinstance(tier, DiskTier) else None


def _decode_tier(number: int, entry: Any) -> AnyTier:
    fields = {"kind": entry} if isinstance(entry, str) else entry
    allowed = f"expected a mapping with `kind`, one of {', '.join(KINDS)}"
    if not isinstance(fields, dict):
        raise ValueError(f"tier {number} is {_seen(entry)}: {allowed}")
    if "kind" not in fields:
        raise ValueError(f"tier {number} has no `kind`: {allowed}")
    kind = fields["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"tier {number} is of kind {_seen(kind)}: {allowed}")
    known = msgspec.structs.fields(KINDS[kind])
    names = [field.name for field in known]
    for key in fields:
        if key != "kind" and key not in names:
            close = difflib.get_close_matches(str(key), names, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(
                f"tier {number} ({kind}) has an unknown key {shown(key)}{hint}; known are {', '.join(names)}"
            )
    for field in known:
        if field.required and field.name not in fields:
            raise ValueError(f"tier {number} ({kind}) lacks `{field.name}`: expected {ALLOWED[field.name]}")
    made = KINDS[kind](**{
        field.name: _decode_field(f"tier {number} ({kind})", field, fields[field.name])
        for field in known
        if field.name in fields
    })  # fmt: skip
    assert isinstance(made, AnyTier)
    return made


def _decode_field(where: str, field: msgspec.structs.FieldInfo, value: Any) -> Any:
    try:
        return msgspec.convert(value, field.type, dec_hook=lambda wanted, seen: decode(wanted, seen, True))
    except (msgspec.ValidationError, ValueError, OverflowError):
        seen = "not shown here" if field.name in _PRIVATE and isinstance(value, str) else _seen(value)
        allowed = ALLOWED[field.name] + (", or null" if field.default is None else "")
        raise ValueError(f"{where}: {field.name} is {seen}: expected {allowed}") from None


def _seen(value: Any) -> str:
    """As a message shows it; of what has values inside, which may be secret, only that it has."""
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else shown(value)
