"""Traces of requests in Mooncake's format: when each came, how long it was, and which blocks its prompt has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.pipes import opened

_LONGEST_LINE = 64 << 20
BLOCK_TOKENS = 512
"""Of a prompt, which one hash stands for; equal hashes are equal prefixes."""


class Asked(msgspec.Struct, frozen=True):
    """One request: when it came in milliseconds, its tokens, and a hash for each block of the prompt, also the last."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path) -> list[Asked]:
    """A JSON object a line, in the order of their times; raises BenchError for what is no trace."""
    decoder, found = msgspec.json.Decoder(Asked), []
    for number, line in enumerate(_lines(path), 1):
        try:
            asked = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise BenchError(f"{path}, line {number} is no request of Mooncake's traces: {error}") from None
        if asked.input_length < 1 or asked.output_length < 0 or not asked.hash_ids:
            raise BenchError(f"{path}, line {number} has no prompt: expected input_length from 1 and hash_ids")
        found.append(asked)
    if not found:
        raise BenchError(f"{path} has no requests")
    return sorted(found, key=lambda one: one.timestamp)


def _lines(path: Path) -> Iterator[bytes]:
    """One at a time, and a piece of one that is too long for a request: a device may have no end."""
    try:
        with opened(path, "rb") as file:
            while line := file.readline(_LONGEST_LINE):
                yield line
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror or error}") from None
