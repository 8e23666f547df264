"""The line of a request: its form stays, since people and scripts read it."""

from __future__ import annotations

import json
import re

import pytest

from mooncake_connector.misses import Miss
from mooncake_connector.request_line import RequestLine

PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


def test_the_line_in_full() -> None:
    line = RequestLine(
        id="cmpl-1", prompt_tokens=1000, local_tokens=128, hit_tokens=512, fetched_tokens=256, lookup_s=0.00012,
        load_s=0.0034, transfer_s=0.25, transport="cma", tier="disk", miss=Miss.EVICTED,
    )  # fmt: skip
    assert str(line) == (
        "request id=cmpl-1 prompt_tokens=1000 local_tokens=128 hit_tokens=512 fetched_tokens=256 computed_tokens=104 "
        "lookup_ms=0.120 load_ms=3.400 transfer_ms=250.000 transport=cma tier=disk miss=evicted"
    )


def test_what_there_is_not_is_a_dash_and_never_left_out() -> None:
    line = str(RequestLine(id="a", prompt_tokens=1, local_tokens=0, hit_tokens=0))
    assert line.endswith("transport=- tier=- miss=-")
    assert len(PAIR.findall(line)) == 12


@pytest.mark.parametrize("name", ["two words", "a=b", 'q"uote', "", "line\nbreak", "x" * 1000])
def test_no_id_adds_a_key_or_a_line(name: str) -> None:
    line = str(RequestLine(id=name, prompt_tokens=1, local_tokens=0, hit_tokens=0))
    assert "\n" not in line and len(line) < 500
    pairs = PAIR.findall(line)
    assert len(pairs) == 12 and [key for key, _ in pairs].count("prompt_tokens") == 1
    assert json.loads(pairs[0][1]) == name[:128]
