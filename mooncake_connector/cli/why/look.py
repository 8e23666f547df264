"""What a pool has of one prompt, page by page, and the reason why a request would not get more of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncake_connector.cli.why import names
from mooncake_connector.cli.why.names import Family
from mooncake_connector.cli.why.reach import reachable_pages
from mooncake_connector.kv.keys import adapter_root_digest, page_keys, root_digest
from mooncake_connector.misses import Miss
from store_client import EmbeddedStore
from store_client.embedded.evicted import num_entries
from store_client.fate import Fate, Known
from store_client.runs import Run, runs_of
from store_client.sharded import ShardView

_REMEMBERED_SHARE = 4
"""Where more pages went than this part of what the pool has room to remember, some are forgotten."""


@dataclass(frozen=True, slots=True)
class Root:
    """What a prompt's chain of pages begins with beside its tokens."""

    salt: str | None = None
    extra_key: str | None = None
    adapter: str | None = None
    """Digest of a LoRA adapter's files."""

    def digest(self) -> bytes:
        if self.adapter is not None:
            return adapter_root_digest(self.adapter, self.salt)
        return root_digest(self.extra_key, self.salt)

    def without(self) -> dict[str, bytes]:
        """The roots of the same tokens with one of these less, by its name."""
        shorter = {
            "salt": Root(None, self.extra_key, self.adapter),
            "extra key": Root(self.salt, None, self.adapter),
            "adapter": Root(self.salt, self.extra_key, None),
        }
        given = {"salt": self.salt, "extra key": self.extra_key, "adapter": self.adapter}
        return {name: root.digest() for name, root in shorter.items() if given[name] is not None}


@dataclass(frozen=True, slots=True)
class Other:
    """Another namespace that comes close to the one that is asked for."""

    family: Family
    fields: list[str]
    """In which it differs."""
    pages: int
    """Leading pages of this prompt that it has."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of a prompt of `tokens` tokens."""

    tokens: int
    page_tokens: int
    family: Family | None
    groups: list[tuple[str, list[Run]]]
    """For each group of layers its title (empty where there is one) and its runs."""
    hit_pages: int
    """So many leading pages a request could load."""
    reason: Miss | None
    """Why not more; None where every full page is a hit."""
    others: list[Other] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """Fields in which the namespace is not as asked: its engines were started so."""
    without: Mapping[str, int] = field(default_factory=dict)
    """Leading pages of the same tokens that are there without the salt, extra key or adapter, where that is more."""
    forgets: bool = False

    @property
    def hit_tokens(self) -> int:
        return self.hit_pages * self.page_tokens


def explain(
    store: EmbeddedStore, tokens: Sequence[int], asked: Mapping[str, Any], chosen: Family | None,
    known: Sequence[Family], *, page_tokens: int, root: Root, min_hit_tokens: int | None,
) -> Explanation:  # fmt: skip
    """Look at one prompt.

    Args:
        asked: the fields of the namespace that is asked for, as far as they are known.
        chosen: the namespace that fits them; None where the pool has none and they are not all known.
        known: every namespace of the pool.
        page_tokens: where there is no such namespace.
        min_hit_tokens: shorter hits are computed; None for a page.
    """
    page_tokens = chosen.namespace.page_tokens if chosen is not None else page_tokens
    keys = page_keys(tokens, page_tokens, root=root.digest())
    fates = _fates(store, chosen, keys) if chosen is not None else [[Fate(Known.UNKNOWN)] * len(keys)]
    groups = [(part.title, runs_of(each)) for part, each in zip(_parts(chosen), fates, strict=False)]
    hit_pages = _reach(chosen, fates, page_tokens)
    others = [
        Other(family, fields, _hits(store, family, tokens, root.digest()))
        for family, fields in (names.close_ones(asked, known, chosen) if asked else ())
    ]
    without = {}
    if chosen is not None and not hit_pages:
        without = {name: _hits(store, chosen, tokens, digest) for name, digest in root.without().items()}
    stats = store.stats()
    gone = stats.evicted_pages + stats.removed_pages + stats.corrupt_pages
    return Explanation(
        len(tokens), page_tokens, chosen, groups, hit_pages,
        _reason(others, fates, hit_pages, page_tokens, len(tokens), min_hit_tokens or page_tokens), others,
        [] if chosen is None else names.differing(asked, chosen.namespace),
        {name: pages for name, pages in without.items() if pages},
        gone * _REMEMBERED_SHARE > num_entries(stats.max_pages),
    )  # fmt: skip


def _parts(family: Family | None) -> tuple[names.Part, ...]:
    return () if family is None else family.parts


def _fates(store: EmbeddedStore, family: Family, keys: list[bytes]) -> list[list[Fate]]:
    """For each group, what became of each page."""
    return [ShardView(store, part.namespace, part.whole, 1).explain(keys) for part in family.parts]


def _reach(family: Family | None, fates: Sequence[Sequence[Fate]], page_tokens: int) -> int:
    if family is None:
        return 0
    stored = [[fate.known is Known.STORED for fate in each] for each in fates]
    parts = [part.namespace for part in family.parts]
    return reachable_pages(list(zip(parts, stored, strict=True)), page_tokens)


def _hits(store: EmbeddedStore, family: Family, tokens: Sequence[int], root: bytes) -> int:
    page_tokens = family.namespace.page_tokens
    keys = page_keys(tokens, page_tokens, root=root)
    return _reach(family, _fates(store, family, keys), page_tokens)


def _reason(
    others: Sequence[Other], fates: Sequence[Sequence[Fate]], hit_pages: int,
    page_tokens: int, tokens: int, min_hit_tokens: int,
) -> Miss | None:  # fmt: skip
    if tokens < page_tokens:
        return Miss.SHORT
    if 0 < hit_pages * page_tokens < min_hit_tokens:
        return Miss.BELOW_MIN_HIT
    if hit_pages == tokens // page_tokens:
        return None
    missing = fates[0][hit_pages]
    if missing.known is Known.STORED:
        return Miss.GROUPS_DISAGREE
    if missing.cause is not None:
        return Miss.of_cause(missing.cause.value)
    elsewhere = max((other.pages * other.family.namespace.page_tokens for other in others), default=0)
    return Miss.OTHER_NAMESPACE if elsewhere > hit_pages * page_tokens else Miss.NEVER_STORED
