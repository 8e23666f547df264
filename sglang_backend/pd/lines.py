"""The line of a request that was handed over, where `log_requests` is set: one on each side, by the first of its ranks.

Where HiCache looked for the prompt as well, what became of that is in the same line.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mooncake_connector.contain import contained, nothing
from mooncake_connector.misses import Miss
from mooncake_connector.request_line import RequestLine
from sglang_backend.pd.prompts import computed_ids
from sglang_backend.told import Told, waiting
from transfer.protocol.incoming import Incoming
from transfer.protocol.outgoing import Outgoing


class TransferLines:
    """Of one rank; `req` is SGLang's request, or None for what no queue of SGLang's made."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        if enabled:
            waiting.is_on = True

    @contained(nothing)
    def sent(self, transfer: Outgoing, req: Any) -> None:
        """The decode instance has all of it."""
        if not self._enabled or req is None:
            return
        told = waiting.take(req.rid) or _untold(
            RequestLine(
                id=req.rid, prompt_tokens=0, local_tokens=req.cached_tokens_device + req.cached_tokens_host,
                hit_tokens=req.cached_tokens_storage,
            )
        )  # fmt: skip
        line = replace(
            told.line, prompt_tokens=len(computed_ids(req)), transfer_s=transfer.seconds, transport=transfer.transport
        )
        replace(told, line=line).say()

    @contained(lambda: 0)
    def prompt_tokens(self, req: Any) -> int:
        """To be asked before the transfer: with its end SGLang adds a token to those that a request had generated."""
        return len(computed_ids(req)) if self._enabled and req is not None else 0

    @contained(nothing)
    def fetched(self, transfer: Incoming, req: Any, prompt_tokens: int, prefix_tokens: int) -> None:
        """All of it is here, but for so many tokens at its beginning, which were here before or came from the pool."""
        if not self._enabled or req is None:
            return
        told = waiting.take(req.rid) or _untold(RequestLine(id=req.rid, prompt_tokens=0, local_tokens=0, hit_tokens=0))
        hit_tokens, fetched = min(told.line.hit_tokens, prefix_tokens), prompt_tokens - prefix_tokens
        line = replace(
            told.line, prompt_tokens=prompt_tokens, local_tokens=prefix_tokens - hit_tokens, hit_tokens=hit_tokens,
            fetched_tokens=fetched, transfer_s=transfer.seconds, miss=Miss.ELSEWHERE if fetched else None,
        )  # fmt: skip
        replace(told, line=line, missed={Miss.ELSEWHERE: fetched} if fetched else {}).say()

    @contained(nothing)
    def dropped(self, req: Any) -> None:
        """Nothing came of the transfer, and nothing does of the request."""
        if self._enabled and req is not None:
            waiting.forget(req.rid)


def _untold(line: RequestLine) -> Told:
    """Of a prompt for which nobody asked a pool."""
    return Told(line, {}, lambda line, missed: None)
