"""How far a request gets with what the groups of a hybrid model have: full attention, and what the others need."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mooncake_connector.kv.namespace import Namespace


def reachable_pages(groups: Sequence[tuple[Namespace, Sequence[bool]]], page_tokens: int) -> int:
    """The longest hit in pages; each group comes with which of the chain's pages it has.

    An engine may end its hits a little earlier, where its blocks do.
    """
    pages = min((_leading(stored) for name, stored in groups if not name.rests_on_others), default=0)
    others = [(json.loads(name.group), stored) for name, stored in groups if name.rests_on_others]
    while pages and not all(_goes_on(group, stored, pages, page_tokens) for group, stored in others):
        pages -= 1
    return pages


def _leading(stored: Sequence[bool]) -> int:
    return next((i for i, there in enumerate(stored) if not there), len(stored))


def _goes_on(group: dict[str, object], stored: Sequence[bool], pages: int, page_tokens: int) -> bool:
    """Whether a group has what the first token behind so many pages attends to, or the state before it."""
    tokens, span = pages * page_tokens, group.get("span")
    if group.get("kind") == "state" or not isinstance(span, int):
        return stored[pages - 1]
    first = tokens // span * span if group.get("kind") == "chunked" else max(0, tokens - span + 1)
    return all(stored[first // page_tokens : pages])
