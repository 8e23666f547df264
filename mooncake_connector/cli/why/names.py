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
_ENGINES_CHOICE = ("kv_dtype", "page_tokens")
"""What the model's files and the configuration suggest, and an engine may have been started with otherwise."""
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


@dataclass(frozen=True, slots=True)
class Asked:
    """The namespace that is asked for.

    Args:
        fields: as far as they are known.
        assumed: those of them that nobody has said: an engine may have been started with others.
    """

    fields: Mapping[str, Any]
    assumed: frozenset[str] = frozenset()


def asked_for(model: Path, config: Config, told: Mapping[str, Any]) -> Asked:
    """The namespace of an engine that serves the model in this folder, as far as files say it.

    Reads all weight files that it has not met yet. Raises ModelIdentityError where the model has no name.

    Args:
        told: fields that a person or a running server has said, or the configuration: they are not doubted.
    """
    fields: dict[str, Any] = dict.fromkeys(_ENGINES_OWN, "")
    fields["model_digest"] = config.model_id or weights_digest(str(model), None)
    try:
        shape = read_shape(model)
    except ModelIdentityError:  # windows or states: the groups of layers are the engine's business, and their page too
        return Asked({**fields, **told})
    fields |= {
        "kv_dtype": shape.dtype,
        "page_tokens": int(config.page_tokens),
        "num_layers": shape.num_layers,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.k_dim,
    }
    return Asked({**fields, **told}, frozenset(_ENGINES_CHOICE) - told.keys())


def differing(asked: Mapping[str, Any], namespace: Namespace) -> list[str]:
    """The fields in which a namespace is another one than what is asked for."""
    has = namespace.to_dict()
    return [name for name, value in asked.items() if name not in _NOT_COMPARED and has[name] != value]


def choose(asked: Asked, known: Sequence[Family]) -> Family | None:
    """The one that is asked for: equal in all that is known of it, and closest in what only an engine is told.

    Where such a one has no pages, and exactly one other has that differs only in what was assumed, that is the one;
    without any pages, the only one of those that the pool has known.
    """
    alike = [(set(differing(asked.fields, family.namespace)), family) for family in known]
    fitting = [(fields, family) for fields, family in alike if fields <= set(_ENGINES_OWN)]
    found = min(fitting, key=lambda one: len(one[0]), default=(None, None))[1]
    if found is not None and found.pages:
        return found
    close = [family for fields, family in alike if fields <= {*_ENGINES_OWN, *asked.assumed}]
    filled = [family for family in close if family.pages]
    if not filled and found is None:
        filled = close
    return filled[0] if len(filled) == 1 else found


def unmet(fields: Mapping[str, Any], model: Path) -> Family | None:
    """The namespace that is asked for, of which the pool has nothing; None where files do not say enough."""
    try:
        name = Namespace(model_name=str(model), **fields)
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
