"""Pages that lie in several pieces of the arena, to and from one contiguous array.

Large copies let go of the interpreter lock. Small ones keep it: taking it back beside a busy thread can cost
milliseconds, many times the copy.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from store_client.base import Bytes

_KEEP_LOCK_NBYTES = 64 << 10


def gather(pieces: Sequence[Bytes], nbytes: int) -> Bytes:
    """The pieces as one contiguous array: a private copy."""
    whole: Bytes = np.empty(nbytes, dtype=np.uint8)
    for part, piece in _beside(whole, pieces):
        _copy(part, piece)
    return whole


def spread(whole: Bytes, pieces: Sequence[Bytes]) -> None:
    """Copy the array into the pieces, one after the other."""
    for part, piece in _beside(whole, pieces):
        _copy(piece, part)


def _beside(whole: Bytes, pieces: Sequence[Bytes]) -> Iterator[tuple[Bytes, Bytes]]:
    at = 0
    for piece in pieces:
        yield whole[at : at + len(piece)], piece
        at += len(piece)


def _copy(target: Bytes, source: Bytes) -> None:
    if len(target) <= _KEEP_LOCK_NBYTES:
        target.data[:] = source.data
    else:
        np.copyto(target, source)
