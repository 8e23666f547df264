"""What the scheduler side of prefix reuse knows of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncake_connector.kv.keys import page_keys
from mooncake_connector.misses import Miss
from store_client.kept import Seen
from vllm_plugin.naming import named_tokens
from vllm_plugin.prefix.account import Account

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Offer:
    """What a lookup found.

    Args:
        local_tokens: what vLLM's own prefix cache held then.
        tokens: in the pool beyond those, or on their way there.
        coming: by position of a group, pages of these, the last ones, that are on their way.
        pending: the pool may have more in a moment.
        wait_s: asking again is worth it within so many seconds.
        good_until_s: from then on the pool is asked again.
        why: of the first page that is missing, where the lookup knew it; else the pool may remember it.
        unheard: whether tiers that may have that page had not said so by then.
    """

    local_tokens: int
    tokens: int
    coming: Mapping[int, int]
    pending: bool
    wait_s: float
    good_until_s: float
    why: Miss | None = None
    unheard: bool = False


@dataclass(slots=True)
class Tracked:
    """A request from its arrival to its end.

    Args:
        root: chain root, or None for a request whose KV has no name (prompt embeddings, say).
        keys: page keys known so far.
        local_tokens: leading tokens that vLLM's own prefix cache held when it last asked.
        saved_pages: leading pages that are in the pool or on their way there.
        offer: of the last lookup.
        patient_until_s: how long this request waits for answers that are pending; None before the first of them.
        aside_since_s: since when it is put aside for such an answer; None while it is not.
        known_pages: leading pages that the pool had when the request was announced; None where it was not.
        loading: (first token, end) of what the pool brings to blocks that no step has used yet; None once one has, or
            the load has ended. It may be nothing: another source brings more, or all, and does not say so here.
        refused: a load failed; the pool is not offered to this request again.
        junctions: tokens up to which the pool has the prompt's pages of full attention, where groups with a window
            could not go on from: others parted from it there, and this request leaves there what the next one needs.
        unasked: why the pool was not asked, when vLLM last did; None where it was.
        counted: its prompt is in the figures, or will be when its load has ended: it counts once, whatever comes.
        account: what will be counted then.
        lookup_s: what lookups took, and waits for tiers.
        seen: what the pool knew of the prompt, where that is to be kept.
        gives_away: another instance will want its KV.
    """

    request: Request
    root: bytes | None
    keys: list[bytes] = field(default_factory=list)
    local_tokens: int = 0
    saved_pages: int = 0
    offer: Offer | None = None
    patient_until_s: float | None = None
    aside_since_s: float | None = None
    known_pages: int | None = None
    loading: tuple[int, int] | None = None
    refused: bool = False
    junctions: set[int] = field(default_factory=set)
    unasked: Miss | None = None
    counted: bool = False
    account: Account | None = None
    lookup_s: float = 0.0
    seen: Seen | None = None
    gives_away: bool = False

    def page_keys(self, num_pages: int, page_tokens: int) -> list[bytes]:
        """Keys of at least the first `num_pages` pages."""
        keys = self.keys
        if len(keys) < num_pages:
            tokens = named_tokens(self.request, len(keys) * page_tokens, num_pages * page_tokens)
            parent = keys[-1] if keys else None
            keys += page_keys(tokens, page_tokens, root=self.root or b"", parent=parent)
        return keys
