"""Namespaces: what must match, besides the tokens, for the bytes of a page to mean the same.

Two models, two KV dtypes or two page sizes never meet in one namespace. No field says which engine wrote: pages of
equal meaning are shared. How a model's digest comes about is `mooncake_connector.kv.identity.model`'s business.
"""

import dataclasses
import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mooncake_connector.errors import NamespaceError

PAGE_FORMAT_VERSION = 1

_PRIVATE = re.compile(r"private-[0-9a-f]{32}")
_ITEM_NBYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e4m3fnuz": 1, "fp8_e5m2": 1}
_DISPLAY_FIELDS = frozenset({"model_name"})


def canonical_json(value: Any) -> str:
    """The one JSON text for `value`: sorted keys, no spaces, ASCII. Raises ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def private_model_digest(of: str = "") -> str:
    """What stands for weights that nobody else has, such as those changed in memory: another one each time, or that of
    what only those know who have them."""
    return f"private-{hashlib.sha256(of.encode()).hexdigest()[:32] if of else uuid.uuid4().hex}"


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Identity of a set of interchangeable pages.

    GQA and MHA models have `num_kv_heads` over all ranks and `head_dim`; an MLA model has `num_kv_heads=1`,
    `kv_lora_rank` and `rope_dim`, and `head_dim = kv_lora_rank + rope_dim`.

    Raises NamespaceError for a count that is not positive, or a digest that is empty.
    """

    model_name: str
    """Shown to people; not part of the identity, since served names and paths say nothing about the weights."""
    model_digest: str
    """From `kv.identity.model.model_digest`, a name that the operator vouches for (`model_id`), or
    `private_model_digest`."""
    kv_dtype: str
    """How the engine stores K and V: "bfloat16", "float16", "float32", "fp8_e4m3" and such."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_lora_rank: int | None = None
    rope_dim: int | None = None
    page_tokens: int
    rope: str = ""
    """Canonical JSON of the rope parameters in force, where they can differ from config.json's."""
    quantization: str = ""
    """Quantisation of the weights that is applied while loading, so that the files do not show it."""
    kv_scales: str = ""
    """Digest of the K and V scales, for an fp8 KV dtype whose scales are not 1."""
    lora: str = ""
    """Digest of an adapter's files, where it applies to every request of the instance."""
    engine_overrides: str = ""
    """Canonical JSON of anything else that changes the KV bytes, such as overrides of config.json."""
    group: str = ""
    """Canonical JSON of what sets these layers apart, where an engine keeps a model's layers in several groups: their
    numbers and what they attend to. Groups of one instance differ in nothing else."""
    format_version: int = PAGE_FORMAT_VERSION

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim", "page_tokens", "format_version"):
            _check_count(field, getattr(self, field))
        for field in ("kv_lora_rank", "rope_dim"):
            if getattr(self, field) is not None:
                _check_count(field, getattr(self, field))
        for field in ("model_digest", "kv_dtype"):
            if not getattr(self, field):
                raise NamespaceError(f"namespace field {field} is empty: pages of different models would mix")
        if self.group and not _is_object(self.group):
            raise NamespaceError(f"namespace field group is {self.group!r}: expected a JSON object")

    @cached_property
    def digest(self) -> bytes:
        """32 bytes: SHA256 over the canonical JSON of all fields except those for display, and `group` if empty."""
        identity = {name: value for name, value in self.to_dict().items() if name not in _DISPLAY_FIELDS}
        if not self.group:  # as it was before there were groups
            del identity["group"]
        return hashlib.sha256(canonical_json(identity).encode("ascii")).digest()

    @cached_property
    def family(self) -> bytes:
        """The digest that all groups of a model have in common."""
        return dataclasses.replace(self, group="").digest

    @cached_property
    def rests_on_others(self) -> bool:
        """Whether its pages are of no use without those of the model's layers of full attention: windows and states."""
        return bool(self.group) and json.loads(self.group).get("kind") != "full"

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank is not None

    @property
    def unit_nbytes(self) -> int | None:
        """Bytes of one layer and one KV head of a page, K and V; None for formats that these fields do not describe."""
        itemsize = _ITEM_NBYTES.get(self.kv_dtype)
        if itemsize is None or self.group:
            return None
        return self.page_tokens * self.head_dim * itemsize * (1 if self.is_mla else 2)

    @property
    def is_private(self) -> bool:
        """Whether its pages are of use to one instance alone, as long as that runs: they stay in the pool."""
        return _PRIVATE.fullmatch(self.model_digest) is not None

    def to_dict(self) -> dict[str, Any]:
        """All fields by name; plain values that JSON and MessagePack carry unchanged."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Namespace":
        """The reverse of `to_dict`. Raises NamespaceError for a field that is unknown, missing or of a wrong type."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise NamespaceError(f"namespace has unknown fields {unknown}: written by another version of this package")
        for name, value in values.items():
            _check_type(name, value, str(known[name].type))
        try:
            return cls(**values)
        except TypeError as error:
            raise NamespaceError(f"namespace is incomplete: {error}") from None


def _check_count(field: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise NamespaceError(f"namespace field {field} is {value!r}: expected an integer of at least 1")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _check_type(name: str, value: Any, annotation: str) -> None:
    allowed: tuple[type, ...] = (str,) if "str" in annotation else (int,)
    if value is None and "None" in annotation:
        return
    if not isinstance(value, allowed) or isinstance(value, bool):
        raise NamespaceError(f"namespace field {name} is {value!r}: expected {annotation}")
