"""How much a run of `bench transfer` moves, and where the pieces lie."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Scale:
    """How much a run does; the defaults are what docs/benchmarks.md shows."""

    pieces: int = 4096
    piece_nbytes: int = 32 << 10
    small_nbytes: int = 16 << 10
    rounds: int = 7
    small_rounds: int = 2000

    @property
    def data_nbytes(self) -> int:
        """Bytes that one round moves."""
        return self.pieces * self.piece_nbytes

    @property
    def memory_nbytes(self) -> int:
        """Size of the memory that they are scattered over, on each side."""
        return 2 * self.data_nbytes

    @property
    def large(self) -> Scale:
        """As many bytes in pieces of 1 MiB."""
        return replace(self, pieces=self.data_nbytes >> 20, piece_nbytes=1 << 20)

    def scattered(self, address: int, seed: int) -> Int64:
        """Addresses of the pieces in random order, each second place left out."""
        order = np.random.default_rng(seed).permutation(self.pieces)
        return address + 2 * self.piece_nbytes * order.astype(np.int64)


QUICK = Scale(pieces=64, rounds=1, small_rounds=20)
