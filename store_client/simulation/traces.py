"""Traffic as it was seen: when which prompt came, by names of its pages. Never its text, nor its tokens.

A trace is lines of JSON, as in Mooncake's traces (kvcache-ai/Mooncake, FAST25-release): `timestamp` in milliseconds,
`input_length` and `output_length` in tokens, `hash_ids`, the names of the prompt's blocks of 512 tokens, of which the
last may be a part. A recording of a pool begins with a line that says how many tokens its blocks have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mooncake_connector.errors import MooncakeConnectorError

MOONCAKE_BLOCK_TOKENS = 512
KIND = "mooncake-connector-recording"


class TraceError(MooncakeConnectorError):
    """The file is no trace; the message names the line and what was expected."""


@dataclass(frozen=True, slots=True)
class Request:
    at_ns: int
    """Since the first request."""
    tokens: int
    """Of the prompt."""
    pages: tuple[int, ...]
    """Names of its pages, 64 bits each."""


@dataclass(frozen=True, slots=True)
class Trace:
    page_tokens: int
    requests: tuple[Request, ...]

    @property
    def num_pages(self) -> int:
        """Different pages."""
        return len({page for request in self.requests for page in request.pages})


def read_trace(path: Path) -> Trace:
    """Raises TraceError, or OSError."""
    page_tokens = MOONCAKE_BLOCK_TOKENS
    found: list[Request] = []
    for number, entry in _entries(path):
        if number == 1 and entry.get("kind") == KIND:
            said = entry.get("page_tokens")
            if not isinstance(said, int) or said < 1:
                raise TraceError(f"{path}, line 1: page_tokens is {said!r}: expected a number of tokens")
            page_tokens = said
            continue
        found.append(_request(path, number, entry))
    if not found:
        raise TraceError(f"{path} has no requests: expected lines of JSON with timestamp, input_length and hash_ids")
    found.sort(key=lambda request: request.at_ns)
    first = found[0].at_ns
    return Trace(page_tokens, tuple(Request(each.at_ns - first, each.tokens, each.pages) for each in found))


def _entries(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{path}, line {number} is no JSON ({error}): is this a trace?") from None
            if not isinstance(entry, dict):
                raise TraceError(f"{path}, line {number} is no object: is this a trace?")
            yield number, entry


def _request(path: Path, number: int, entry: dict[str, object]) -> Request:
    at_ms, tokens, pages = entry.get("timestamp"), entry.get("input_length"), entry.get("hash_ids")
    if isinstance(at_ms, int | float) and isinstance(tokens, int) and isinstance(pages, list):
        names = [page for page in pages if isinstance(page, int)]
        if len(names) == len(pages):
            return Request(int(at_ms * 1e6), tokens, tuple(map(_spread, names)))
    raise TraceError(
        f"{path}, line {number}: expected timestamp (milliseconds), input_length (tokens) and hash_ids (a list of "
        f"numbers); it has {', '.join(sorted(map(str, entry))) or 'nothing'}"
    )


def _spread(number: int) -> int:
    """A 64-bit hash of it: names count up in some traces, and the store's policies sample by bits."""
    mixed = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ mixed >> 31
