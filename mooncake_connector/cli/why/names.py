"""Which namespace of a pool a prompt's pages would be looked up in, and which others come close.

What an engine's namespace will be, the model's files and our configuration say for the most part. What only the engine
knows (overrides, a quantisation while loading) is taken from the pool, and said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_connector.config.schema import Config
from mooncake_connector.errors import ModelIdentityError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.identity.checkpoint import weights_digest
from mooncake_connector.kv.identity.shape import read_shape
from mooncake_connector.kv.namespace import Namespace
from store_client import SpaceInfo

_ENGINES_OWN = ("rope", "quantization", "kv_scales", "lora", "engine_overrides")
"""Empty unless an engine was told something that the model's files do not say."""
_NOT_COMPARED = ("model_name", "group", "format_version")


@dataclass(frozen=True, slots=True)
class Part:
    """One namespace: of a model with several groups of layers, that of one group."""

    namespace: Namespace
    whole: Shard
    """All layers and heads of which anything was stored."""

    @property
    def title(self) -> str:
        """What the group attends to; empty where a model has one group."""
        if not self.namespace.group:
            return ""
        group = json.loads(self.namespace.group)
        span = f" of {group['span']}" if group.get("span") else ""
        return f"{group.get('kind', 'unknown')} attention{span}" if group.get("kind") != "state" else "states"


@dataclass(frozen=True, slots=True)
class Family:
    """The namespaces of one model as one way of starting an engine has them: one, or one for each group of layers."""

    parts: tuple[Part, ...]
    """Those of full attention first."""
    pages: int
    idle_s: float

    @property
    def namespace(self) -> Namespace:
        return self.parts[0].namespace

    @property
    def id(self) -> str:
        return self.namespace.digest.hex()[:8]


def families(spaces: Iterable[SpaceInfo]) -> list[Family]:
    """What a pool has, the namespace that was used last first."""
    members: dict[bytes, dict[bytes, list[SpaceInfo]]] = {}
    for space in spaces:
        members.setdefault(space.namespace.family, {}).setdefault(space.namespace.digest, []).append(space)
    found = []
    for groups in members.values():
        parts = [Part(infos[0].namespace, _around([info.shard for info in infos])) for infos in groups.values()]
        parts.sort(key=lambda part: (part.namespace.rests_on_others, part.namespace.group))
        infos = [info for group in groups.values() for info in group]
        idle_s = min((info.idle_s for info in infos if info.pages), default=float("inf"))
        pages = max(sum(info.pages for info in group) for group in groups.values())
        found.append(Family(tuple(parts), pages, idle_s))
    return sorted(found, key=lambda family: (family.idle_s, -family.pages))


def _around(shards: Sequence[Shard]) -> Shard:
    return Shard(
        min(shard.layer_start for shard in shards), max(shard.layer_stop for shard in shards),
        min(shard.head_start for shard in shards), max(shard.head_stop for shard in shards),
    )  # fmt: skip


def asked_fields(model: Path, config: Config, kv_dtype: str | None) -> dict[str, Any]:
    """The fields of the namespace of an engine that serves the model in this folder, as far as files say them.

    Reads all weight files that it has not met yet. Raises ModelIdentityError where the model has no name.
    """
    fields: dict[str, Any] = dict.fromkeys(_ENGINES_OWN, "")
    fields["model_digest"] = config.model_id or weights_digest(str(model), None)
    if kv_dtype is not None:
        fields["kv_dtype"] = "fp8_e4m3" if kv_dtype == "fp8" else kv_dtype
    try:
        shape = read_shape(model)
    except ModelIdentityError:  # windows or states: the groups of layers are the engine's business, and their page too
        return fields
    fields.setdefault("kv_dtype", shape.dtype)
    fields |= {
        "page_tokens": int(config.page_tokens),
        "num_layers": shape.num_layers,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.k_dim,
    }
    return fields


def differing(asked: Mapping[str, Any], namespace: Namespace) -> list[str]:
    """The fields in which a namespace is another one than what is asked for."""
    has = namespace.to_dict()
    return [name for name, value in asked.items() if name not in _NOT_COMPARED and has[name] != value]


def choose(asked: Mapping[str, Any], known: Sequence[Family]) -> Family | None:
    """The one that is asked for: equal in all that files say, and closest in what only an engine is told."""
    alike = [(differing(asked, family.namespace), family) for family in known]
    fitting = [(fields, family) for fields, family in alike if set(fields) <= set(_ENGINES_OWN)]
    return min(fitting, key=lambda found: len(found[0]), default=(None, None))[1]


def unmet(asked: Mapping[str, Any], model: Path) -> Family | None:
    """The namespace that is asked for, of which the pool has nothing; None where files do not say enough."""
    try:
        name = Namespace(model_name=str(model), **asked)
    except TypeError:  # models with windows or states
        return None
    return Family((Part(name, Shard(0, name.num_layers, 0, name.num_kv_heads)),), 0, float("inf"))


def close_ones(
    asked: Mapping[str, Any], known: Sequence[Family], chosen: Family | None
) -> list[tuple[Family, list[str]]]:
    """Others of the same weights, or that differ in a single field, with the fields in which they do."""
    alike = [(family, differing(asked, family.namespace)) for family in known if family is not chosen]
    near = [(family, fields) for family, fields in alike if "model_digest" not in fields or len(fields) == 1]
    return sorted(near, key=lambda found: len(found[1]))
