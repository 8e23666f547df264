"""How much `bench transfer` does, and where the pieces of its transfers lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TransferScale:
    """The defaults are what docs/benchmarks.md shows."""

    pieces: int = 4096
    piece_nbytes: int = 32 << 10
    small_nbytes: int = 16 << 10
    rounds: int = 7
    small_rounds: int = 2000
    steps: int = 200
    step_rounds: int = 5
    link_nbytes: int = 256 << 20
    link_rounds: int = 3
    lost_after_s: float = 5.0
    layers: int = 32

    @property
    def data_nbytes(self) -> int:
        """Bytes that one round moves."""
        return self.pieces * self.piece_nbytes

    @property
    def memory_nbytes(self) -> int:
        """Size of the memory that they are scattered over, on each side."""
        return 2 * self.data_nbytes

    def scattered(self, address: int, seed: int) -> Int64:
        """Addresses of the pieces in random order, each second place left out."""
        order = np.random.default_rng(seed).permutation(self.pieces)
        return address + 2 * self.piece_nbytes * order.astype(np.int64)


QUICK = TransferScale(
    pieces=64,
    rounds=1,
    small_rounds=20,
    steps=4,
    step_rounds=1,
    link_nbytes=48 << 20,
    link_rounds=1,
    lost_after_s=1.0,
    layers=4,
)
"""Says only that it works."""
