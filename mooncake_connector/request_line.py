"""The one line that a request has in an engine's log where `log_requests` is set: key=value, in an order that stays."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from mooncake_connector.log import get_logger
from mooncake_connector.misses import Miss

NONE = "-"
"""Where there is nothing to name."""
_PLAIN_ID = 128

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """What became of a request's prompt.

    Args:
        id: as the engine calls it.
        prompt_tokens: all of the prompt.
        local_tokens: in the engine's own cache.
        hit_tokens: loaded from the pool.
        fetched_tokens: brought by a prefill instance.
        lookup_s: in lookups, and waiting for what tiers say.
        load_s: from the submission of the load to its end.
        transfer_s: from the announcement of the transfer to its end, prefill included.
        transport: which brought the KV of a transfer.
        tier: kind of the tier that may have brought pages of the hit; of several all that are configured.
        miss: why the first page was missing; None where none was.
    """

    id: str
    prompt_tokens: int
    local_tokens: int
    hit_tokens: int
    fetched_tokens: int = 0
    lookup_s: float = 0.0
    load_s: float = 0.0
    transfer_s: float = 0.0
    transport: str = ""
    tier: str = ""
    miss: Miss | None = None

    @property
    def computed_tokens(self) -> int:
        """What is left of the prompt for the engine."""
        return max(0, self.prompt_tokens - self.local_tokens - self.hit_tokens - self.fetched_tokens)

    def __str__(self) -> str:
        values = {
            "id": _quoted(self.id),
            "prompt_tokens": self.prompt_tokens,
            "local_tokens": self.local_tokens,
            "hit_tokens": self.hit_tokens,
            "fetched_tokens": self.fetched_tokens,
            "computed_tokens": self.computed_tokens,
            "lookup_ms": _ms(self.lookup_s),
            "load_ms": _ms(self.load_s),
            "transfer_ms": _ms(self.transfer_s),
            "transport": self.transport or NONE,
            "tier": self.tier or NONE,
            "miss": NONE if self.miss is None else self.miss.value,
        }
        return "request " + " ".join(f"{key}={value}" for key, value in values.items())

    def log(self) -> None:
        logger.log(logging.INFO, "%s", self)


def _quoted(name: str) -> str:
    """An id may be a stranger's: one with blanks, or very long, is a JSON string, so that no part of it is a key."""
    is_plain = 0 < len(name) <= _PLAIN_ID and name.isprintable() and not set(name) & set(' "=')
    return name if is_plain else json.dumps(name[:_PLAIN_ID])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"
