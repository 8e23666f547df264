"""What an engine leaves in the pool of a request that it answered, for `why --request`: no token and no text of it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Annotated

import msgspec

from mooncake_connector.misses import Miss
from mooncake_connector.request_line import RequestLine

_MOST_RUNS = 32
_LONGEST_ID = 256

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
"""In what is read; also a Unix time. Whoever writes into the pool's folder may write any number."""


class RunRecord(msgspec.Struct, frozen=True, array_like=True):
    """Pages `first` to `last` of a prompt, of which the same was known when it was looked up; see `store_client.runs`.

    `known` and `cause` are values of `Known` and `Lost`; the seconds count from that moment.
    """

    first: Count
    last: Count
    known: str
    cause: str | None = None
    ago_s: Seconds = 0.0
    unused_s: Seconds = 0.0


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a prompt, as in the request's line in the log."""

    id: str
    at_s: Seconds
    """Unix time at which it was looked up."""
    pid: Count
    namespace: str
    """Hex digits of its digest; empty where the pool was not asked."""
    page_tokens: Count
    prompt_tokens: Count
    local_tokens: Count
    hit_tokens: Count
    fetched_tokens: Count
    missed: dict[str, Count]
    """Tokens by reason (`Miss`)."""
    miss: str | None
    has_salt: bool
    runs: list[RunRecord]
    """Of the pages beyond the engine's own hit, those behind the last one left out."""

    @classmethod
    def of(
        cls, line: RequestLine, *, at_s: float, namespace: str, page_tokens: int, missed: Mapping[Miss, int],
        has_salt: bool, runs: list[RunRecord],
    ) -> RequestRecord:  # fmt: skip
        return cls(
            id=line.id[:_LONGEST_ID], at_s=at_s, pid=os.getpid(), namespace=namespace, page_tokens=page_tokens,
            prompt_tokens=line.prompt_tokens, local_tokens=line.local_tokens, hit_tokens=line.hit_tokens,
            fetched_tokens=line.fetched_tokens, missed={why.value: tokens for why, tokens in missed.items()},
            miss=None if line.miss is None else line.miss.value, has_salt=has_salt,
            runs=[_rounded(run) for run in runs[:_MOST_RUNS]],
        )  # fmt: skip

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def decode(told: bytes) -> RequestRecord | None:
        """None for what is none, or of another version."""
        try:
            return msgspec.json.decode(told, type=RequestRecord)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    @property
    def computed_tokens(self) -> int:
        return max(0, self.prompt_tokens - self.local_tokens - self.hit_tokens - self.fetched_tokens)

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.at_s)


def _rounded(run: RunRecord) -> RunRecord:
    return msgspec.structs.replace(run, ago_s=round(run.ago_s, 1), unused_s=round(run.unused_s, 1))
