"""Sizes in bytes as people write and read them: read in binary and decimal units, always shown in binary ones."""

from __future__ import annotations

import re
from decimal import Decimal

_LETTERS = "KMGTP"
_SIZE = re.compile(rf"\s*([0-9]{{1,20}}(?:\.[0-9]{{1,20}})?)\s*(?:([{_LETTERS}])(i)?)?B?\s*", re.IGNORECASE)


def parse_nbytes(value: int | str) -> int:
    """A size in bytes from an integer or from text. Raises ValueError.

    `Ki`, `Mi`, `Gi`, `Ti` and `Pi` are powers of 1024, and `K`, `M`, `G`, `T` and `P` powers of 1000, as in Kubernetes;
    a `B` may follow, and upper and lower case mean the same: "8GiB" is 8 * 1024**3, "8g" and "8GB" are 8 * 1000**3.
    """
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value) if len(value) <= 64 else None
    if match is None:
        raise ValueError("expected an integer with an optional unit: GiB or Gi (1024**3), GB or G (1000**3), ...")
    number, letter, binary = match.groups()
    exponent = _LETTERS.index(letter.upper()) + 1 if letter else 0
    return int(Decimal(number) * (1024 if binary else 1000) ** exponent)


def human_nbytes(nbytes: int) -> str:
    """ "512 B", "1.5 KiB", "12.0 GiB"."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for letter in _LETTERS:
        value /= 1024
        if value < 1023.95 or letter == _LETTERS[-1]:
            break
    return f"{value:.1f} {letter}iB"
