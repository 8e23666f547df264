"""Lists of tokens as programs write them, in JSON: at most 8 digits each, with a comma between them, or a comma and a
space. All tokens are looked at together; whatever is written otherwise is for others to read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from store_client.agent.index.hashes import Tokens32

COMMA = ord(",")
_SPACE, _ZERO = b" 0"
_DIGITS = np.uint64(0x0F0F0F0F0F0F0F0F)
_PAIRS = [
    (np.uint64((10**digits << bits) + 1), np.uint64(bits), np.uint64(mask))
    for digits, bits, mask in ((1, 8, 0x00FF00FF00FF00FF), (2, 16, 0x0000FFFF0000FFFF))
]
_FOURS = np.uint64((10**4 << 32) + 1)


def num_tokens(text: memoryview) -> int | None:
    """None where the text is not written so."""
    if not text:
        return None
    raw = np.frombuffer(text, dtype=np.uint8)
    is_digit, is_comma = raw - _ZERO < 10, raw == COMMA
    commas, digits = int(np.count_nonzero(is_comma)), int(np.count_nonzero(is_digit))
    space, gap = _spaces(text)
    if not digits or digits + space + gap * commas != len(raw):
        return None
    if gap == 2 and np.count_nonzero(is_comma[:-1] & (raw[1:] == _SPACE)) != commas:
        return None
    two = is_digit[1:] & is_digit[:-1]
    if digits - np.count_nonzero(two) != commas + 1:
        return None  # between two commas there is no digit
    four = two[2:] & two[:-2]
    eight = four[4:] & four[:-4]
    return None if (eight[1:] & eight[:-1]).any() else commas + 1


def read_tokens(text: memoryview, cuts: Sequence[int] = ()) -> tuple[Tokens32, list[int]]:
    """Of a text of which `num_tokens` says that it is written so, or of a part of it between two commas; and how many
    there are up to some of its commas, and in all.

    A token's digits are the bytes of a 64-bit word, which are added in pairs, fours and eights.
    """
    raw = np.frombuffer(text, dtype=np.uint8)
    (commas,) = (raw == COMMA).nonzero()
    space, gap = _spaces(text)
    starts = np.empty(len(commas) + 2, dtype=np.int64)  # in bits; the last is where one more would start
    np.add(commas, gap, out=starts[1:-1])
    starts[0], starts[-1] = space, len(raw) + gap
    starts <<= 3
    others = starts[:-1] - starts[1:]
    others += 64 + 8 * gap  # bits in 64 that are not of the token
    # Each token's 8 bytes, from two words of the text. (Reading words at any byte, NumPy copies all of the text's.)
    every, at = np.frombuffer(b"".join((text, bytes(16 - len(text) % 8))), dtype="<u8"), starts[:-1] >> 6
    bits = (starts[:-1] & 63).view(np.uint64)
    words = every.take(at, mode="clip") >> bits  # "clip" as the quickest: all are within bounds
    words |= every[1:].take(at, mode="clip") << (64 - bits)
    words <<= others.view(np.uint64)  # what follows a token goes, and what is before its digits is 0
    words &= _DIGITS
    for multiply, bits, mask in _PAIRS:
        words *= multiply
        words >>= bits
        words &= mask
    words *= _FOURS
    return words.view("<u4")[1::2], [*(np.searchsorted(commas, cuts) + 1).tolist(), len(words)]


def _spaces(text: memoryview) -> tuple[int, int]:
    """How many bytes precede the first token, and how many are from one to the next."""
    comma = bytes(text[:32]).find(b",")
    return int(bytes(text[:1]) == b" "), 2 if comma >= 0 and bytes(text[comma + 1 : comma + 2]) == b" " else 1
