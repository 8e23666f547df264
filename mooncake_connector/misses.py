"""Why prompt tokens were not in the pool: one word for each reason, what it says, and what to do about it.

The engines count missed tokens by these words, and `doctor --url` and `why` say them. A reason is that of the first
page of a prompt that is missing: the pages behind it could not be loaded in any case.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Words:
    """What a reason says to people, as a sentence about pages or tokens without its full stop, and what to do."""

    said: str
    do: str


class Miss(str, enum.Enum):
    """Why tokens of a prompt did not come from the pool. The value is the word in metrics and logs, and stays."""

    SHORT = "short"
    BELOW_MIN_HIT = "below_min_hit"
    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    CLEARED = "cleared"
    DAMAGED = "damaged"
    REFUSED = "refused"
    OTHER_NAMESPACE = "other_namespace"
    GROUPS_DISAGREE = "groups_disagree"
    RANKS_DISAGREE = "ranks_disagree"
    LATE = "late"
    STALLED = "stalled"
    UNAVAILABLE = "unavailable"
    LOAD_FAILED = "load_failed"
    NOT_CACHED = "not_cached"
    ELSEWHERE = "elsewhere"

    @property
    def words(self) -> Words:
        return _WORDS[self]

    @staticmethod
    def of_cause(cause: str) -> Miss:
        """The reason where the store remembers why it lacks a page, for the `cause` in its own words."""
        return _CAUSES.get(cause, Miss.EVICTED)


_CAUSES = {
    "cleared": Miss.CLEARED,
    "removed": Miss.CLEARED,
    "corrupt": Miss.DAMAGED,
    "full": Miss.REFUSED,
    "no_space": Miss.REFUSED,
    "busy": Miss.REFUSED,
    "index": Miss.REFUSED,
    "error": Miss.REFUSED,
}
"""Of causes that are not here the page went for want of room."""

_WORDS = {
    Miss.SHORT: Words(
        "less than a page: only full pages are stored, so what is left behind the last one is computed",
        "nothing for the end of a prompt; where all prompts are this short, set a smaller page_tokens (16 at least)",
    ),
    Miss.BELOW_MIN_HIT: Words(
        "shorter than min_hit_tokens, or SGLang's prefetch_threshold, which are computed instead of loaded",
        "set a smaller min_hit_tokens, or leave it out for one page; in SGLang also a smaller prefetch_threshold",
    ),
    Miss.NEVER_STORED: Words(
        "not in the pool, and the pool does not remember that it ever was",
        "nothing where the prompt is new; else check that the instances share the pool's folder and that saves work "
        "(failures save_*, overtaken pages)",
    ),
    Miss.EVICTED: Words(
        "evicted: the pool was full and others were used later",
        "give the pool a larger capacity, or a tier behind it",
    ),
    Miss.CLEARED: Words(
        "removed on purpose: the pool or the namespace was cleared",
        "nothing: it is stored again when it is computed",
    ),
    Miss.DAMAGED: Words(
        "thrown away as damaged: its bytes did not agree with the checksum",
        "nothing for a few; where it goes on, check this machine's memory and the disk under the pool",
    ),
    Miss.REFUSED: Words(
        "computed, but not stored: the pool had no room that could be freed, or was locked for too long",
        "see the pool's failures by cause (`mooncake-connector store stats`) and the engine's log",
    ),
    Miss.OTHER_NAMESPACE: Words(
        "in the pool, but of another namespace: model, weights, dtype or page_tokens differ",
        "compare the namespaces with `mooncake-connector store ls`, and start the instances alike",
    ),
    Miss.GROUPS_DISAGREE: Words(
        "there for full attention, but windows or states to go on from are missing",
        "give the pool a larger capacity, or set a larger state_budget for models with states",
    ),
    Miss.RANKS_DISAGREE: Words(
        "found by one rank of SGLang and not by another, which did not look, or not in time, had no room, or is on "
        "another host",
        "see the log of the other ranks; where they are on several hosts, ask each host's pool with `why --pool`",
    ),
    Miss.LATE: Words(
        "asked of a tier that did not answer, or did not bring it, in time",
        "look at the agent (`mooncake-connector agent --status`); set a larger lookup_wait_s where the tier is slow",
    ),
    Miss.STALLED: Words(
        "not looked up: the pool is left alone for a while after a lookup or a load hung",
        "see the engine's log for what hung; the pool's folder must be memory or a fast local disk",
    ),
    Miss.UNAVAILABLE: Words(
        "not looked up: the pool is not open, or the model has no name yet",
        "see the engine's log: the folder cannot be used, or a large model is still being hashed after the start",
    ),
    Miss.LOAD_FAILED: Words(
        "found, but its load failed: a page went meanwhile, was damaged, or came too late",
        "see load_* in the failures by cause, and load_deadline_s",
    ),
    Miss.NOT_CACHED: Words(
        "of requests whose tokens do not name their KV, or that are to be computed: prompt embeddings, streamed input, "
        "prompt_logprobs, media that vLLM does not hash, an adapter that is not hashed yet",
        "nothing, unless such requests are not meant",
    ),
    Miss.ELSEWHERE: Words(
        "brought by somebody else: a prefill instance, or another connector",
        "nothing",
    ),
}
