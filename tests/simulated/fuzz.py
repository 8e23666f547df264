"""Bytes for parsers: anything, and what is left of proper bytes after a few accidents."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from hypothesis import given, seed, settings
from hypothesis import strategies as st

STRESS_S = float(os.environ.get("MOONCAKE_CONNECTOR_STRESS_S", "0"))
"""Seconds that all fuzz targets together go on; 0 for one short round each."""

_NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
_ACCIDENTS = ("set", "number", "cut", "drop", "repeat", "insert", "splice")


@st.composite
def damaged(draw: st.DrawFn, proper: Sequence[bytes]) -> bytes:
    """One of the proper ones after up to four accidents."""
    data = bytearray(draw(st.sampled_from(proper)))
    for accident in draw(st.lists(st.sampled_from(_ACCIDENTS), max_size=4)):
        at = draw(st.integers(0, len(data)))
        if accident == "set" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif accident == "number":
            nbytes = draw(st.sampled_from([1, 2, 4, 8]))
            number = draw(st.sampled_from(_NUMBERS)) % (1 << 8 * nbytes)
            data[at : at + nbytes] = number.to_bytes(nbytes, draw(st.sampled_from(["little", "big"])))
        elif accident == "cut":
            del data[at:]
        elif accident == "drop":
            del data[at : at + draw(st.integers(1, 16))]
        elif accident == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 64))] * draw(st.integers(1, 8))
        elif accident == "insert":
            data[at:at] = draw(st.binary(max_size=16))
        elif accident == "splice":
            other = draw(st.sampled_from(proper))
            data[at:] = other[draw(st.integers(0, len(other))) :]
    return bytes(data)


def fuzz(survives: Callable[[bytes], object], proper: Sequence[bytes], share_s: float) -> None:
    """Call `survives` with bytes: one round, and more of them for `share_s` seconds."""
    deadline_at = time.monotonic() + share_s
    number = 0
    while True:

        @settings(max_examples=200 if share_s == 0 else 2000)
        @given(st.one_of(st.binary(max_size=256), damaged(proper), damaged(proper)))
        def each(data: bytes) -> None:
            survives(data)

        # A round that is repeated must not repeat its bytes; a short run draws new ones each time by itself.
        (each if number == 0 else seed(number)(each))()
        number += 1
        if time.monotonic() >= deadline_at:
            return


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body
