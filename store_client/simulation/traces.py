"""Traffic as it was seen: when which prompt came, by names of its pages. Never its text, nor its tokens.

A trace is lines of JSON, as in Mooncake's traces (kvcache-ai/Mooncake, FAST25-release): `timestamp` in milliseconds,
`input_length` and `output_length` in tokens, `hash_ids`, the names of the prompt's blocks of 512 tokens, of which the
last may be a part. A recording of a pool begins with a line that says how many tokens its blocks have.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from mooncake_connector.errors import MooncakeConnectorError
from mooncake_connector.pipes import opened

MOONCAKE_BLOCK_TOKENS = 512
KIND = "mooncake-connector-recording"
_LONGEST_LINE = 64 << 20
_LATEST_MS = 4 * 10**12
"""Unix time until 2096: the time between two requests stays within 63 bits of nanoseconds."""
_MOST_TOKENS, _MOST_PAGE_TOKENS = 1 << 40, 1 << 20
_MS = 10**6


class TraceError(MooncakeConnectorError):
    """The file is no trace; the message names the line and what was expected."""


@dataclass(frozen=True, slots=True)
class Request:
    at_ns: int
    """Since the first request."""
    tokens: int
    """Of the prompt."""
    pages: Sequence[int]
    """Names of its pages, 64 bits each, all different."""


@dataclass(frozen=True, slots=True)
class Trace:
    page_tokens: int
    requests: tuple[Request, ...]
    num_pages: int
    """Different pages."""


def read_trace(path: Path) -> Trace:
    """Raises TraceError, or OSError."""
    page_tokens = MOONCAKE_BLOCK_TOKENS
    found: list[Request] = []
    for number, entry in _entries(path):
        if number == 1 and entry.get("kind") == KIND:
            said = entry.get("page_tokens")
            if not isinstance(said, int) or not 1 <= said <= _MOST_PAGE_TOKENS:
                raise TraceError(f"{path}, line 1: page_tokens is {said!r}: expected a number of tokens")
            page_tokens = said
            continue
        found.append(_request(path, number, entry))
    if not found:
        raise TraceError(f"{path} has no requests: expected lines of JSON with timestamp, input_length and hash_ids")
    requests = tuple(_spread_out(found))
    return Trace(page_tokens, requests, len({page for request in requests for page in request.pages}))


def _spread_out(requests: list[Request]) -> Iterator[Request]:
    """In the order of time, from 0 on. Those of one instant are spread over the smallest time between two instants.

    Some traces round times to seconds: hundreds of prompts that are there at once would use each other's pages, or
    keep them in use, as they did not in fact.
    """
    requests.sort(key=lambda request: request.at_ns)
    instants = sorted({request.at_ns for request in requests})
    step_ns = min((later - sooner for sooner, later in pairwise(instants)), default=_MS)
    for at_ns, together in groupby(requests, key=lambda request: request.at_ns):
        group = list(together)
        for number, request in enumerate(group):
            yield Request(at_ns - instants[0] + number * step_ns // len(group), request.tokens, request.pages)


def _entries(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    with opened(path, encoding="utf-8", errors="replace") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            if not line.strip():
                continue
            whole = line.endswith("\n")
            if not whole and len(line) == _LONGEST_LINE:
                raise TraceError(f"{path}, line {number} has over {_LONGEST_LINE:,} characters: is this a trace?")
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not whole and number > 1:  # what a recorder was writing when it was killed, or the disk was full
                    return
                raise TraceError(f"{path}, line {number} is no JSON ({error}): is this a trace?") from None
            if not isinstance(entry, dict):
                raise TraceError(f"{path}, line {number} is no object: is this a trace?")
            yield number, entry


def _request(path: Path, number: int, entry: dict[str, object]) -> Request:
    at_ms, tokens, names = entry.get("timestamp"), entry.get("input_length"), entry.get("hash_ids")
    if (
        isinstance(at_ms, int | float) and -_LATEST_MS <= at_ms <= _LATEST_MS
        and isinstance(tokens, int) and 0 <= tokens <= _MOST_TOKENS
        and isinstance(names, list) and all(isinstance(name, int) for name in names)
    ):  # fmt: skip
        if len(set(names)) == len(names):
            return Request(int(at_ms * _MS), tokens, array("Q", map(_mix, names)))
        raise TraceError(
            f"{path}, line {number}: hash_ids names a block twice: expected names that stand for a block and all that "
            "is before it, of which a prompt cannot have one twice"
        )
    raise TraceError(
        f"{path}, line {number}: expected timestamp (milliseconds), input_length (tokens) and hash_ids (a list of "
        f"numbers); it has {', '.join(sorted(map(str, entry))) or 'nothing'}"
    )


def _mix(number: int) -> int:
    """A 64-bit hash of it: names count up in some traces, and the store's policies sample by bits."""
    mixed = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ mixed >> 31
