"""A digest of weights in memory: 128 bits, by whole numbers alone, where they lie.

A matrix X counts as the sum of a[i] * b[j] * X[i, j] over its words of 64 bits, modulo 2^64, where a and b are
pseudo-random odd numbers: Dietzfelbinger's multilinear hashing ("Universal hashing and k-wise independent random
variables via integer arithmetic without primes", 1996), one number for rows and one for columns. So it depends on where
an element is, two parts of a matrix add up to the whole of it whichever rank has them, and nothing is rounded. It tells
trained weights from each other. It is no defence against somebody who looks for two with one digest.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

_CHUNK_NBYTES = 16 << 20
"""So much is looked at in one operation: what it needs beside the weights is about as large, or twice."""
_CPU_CHUNK_NBYTES = 1 << 20
"""On the processor it stays in its caches."""
_ALIGNED_NBYTES = 1024
"""Rows whose length is a multiple of it are read 8 bytes at a time, so that those of up to 128 shards are too."""
_FLAT_WORDS = 4096
"""What has no rows that matter is looked at as rows of so many elements."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Unreadable(Exception):
    """The weights cannot be digested; the text says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a parameter that a rank holds.

    Args:
        name: of the parameter, and of whatever sets it apart.
        tensor: `[rows, columns]` of any dtype, which begins at row `row` and column `column` of the whole; any shape
            where `columns` is None, and then it is the whole.
        columns: of the whole parameter.
        alike: every rank is expected to have the same.
    """

    name: str
    tensor: torch.Tensor
    row: int = 0
    column: int = 0
    columns: int | None = None
    alike: bool = False


@dataclass(frozen=True, slots=True)
class Sums:
    """Of all pieces of a rank: those of parts of a parameter, and those that each rank has."""

    parts: tuple[int, int]
    alike: tuple[int, int]


def sums_of(pieces: Iterable[Piece], deadline_s: float) -> Sums:
    """Digest these pieces. `deadline_s` is of `time.monotonic`.

    Raises:
        Unreadable: a tensor has no content here, or time is over.
    """
    digester = _Digester()
    with torch.inference_mode():
        for piece in pieces:
            if time.monotonic() > deadline_s:
                raise Unreadable("reading them takes too long")
            digester.add(piece)
        return digester.sums()


class _Digester:
    def __init__(self) -> None:
        self._totals: dict[tuple[torch.device, bool], list[torch.Tensor]] = {}
        self._numbers: dict[tuple[str, torch.device], torch.Tensor] = {}

    def add(self, piece: Piece) -> None:
        tensor = piece.tensor.detach()
        if tensor.is_meta or not tensor.numel():
            raise Unreadable(f"{piece.name} is not in memory as a tensor")
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.dtype == torch.bool:
            tensor = tensor.view(torch.uint8)
        if tensor.element_size() not in _WORDS or tensor.is_quantized or tensor.layout != torch.strided:
            raise Unreadable(f"{piece.name} is {tensor.dtype}, {tensor.layout}")
        if piece.columns is not None:
            self._add_rows(piece, tensor, piece.row, piece.column, piece.columns)
            return
        flat = tensor.reshape(-1)  # copies what is not contiguous
        rows, rest = divmod(flat.numel(), _FLAT_WORDS)
        if rows:
            self._add_rows(piece, flat[: rows * _FLAT_WORDS].view(rows, _FLAT_WORDS), 0, 0, _FLAT_WORDS)
        if rest:
            self._add_rows(piece, flat[rows * _FLAT_WORDS :].view(1, rest), rows, 0, _FLAT_WORDS)

    def _add_rows(self, piece: Piece, matrix: torch.Tensor, row: int, column: int, columns: int) -> None:
        itemsize = matrix.element_size()
        packed = 1
        if columns * itemsize % _ALIGNED_NBYTES == 0 and piece.columns is not None:
            packed = 8 // itemsize
            if column % packed or matrix.shape[1] % packed:
                raise Unreadable(f"a rank has {matrix.shape[1]} of {columns} columns of {piece.name}")
        width = matrix.shape[1] // packed
        first = column // packed
        b = self._odd("column", first + width, matrix.device)[first:]
        totals = self._totals.setdefault(
            (matrix.device, piece.alike),
            [torch.zeros((), dtype=torch.int64, device=matrix.device) for _ in range(2)],
        )
        factors = _factors(f"{piece.name} {matrix.dtype} {columns}")
        chunk_nbytes = _CPU_CHUNK_NBYTES if matrix.device.type == "cpu" else _CHUNK_NBYTES
        step = max(1, chunk_nbytes // (8 * width))
        for start in range(0, matrix.shape[0], step):
            chunk = matrix[start : start + step].contiguous()
            if packed > 1:
                if chunk.data_ptr() % 8:
                    chunk = chunk.clone()
                words = chunk.view(torch.int64)
            else:
                words = chunk.view(_WORDS[itemsize]).to(torch.int64)
            of_rows = (words * b).sum(1)
            at = row + start
            for number, factor in enumerate(factors):
                a = self._odd(f"row {number}", at + len(of_rows), matrix.device)[at:]
                totals[number].add_((of_rows * a).sum() * factor)

    def _odd(self, seed: str, count: int, device: torch.device) -> torch.Tensor:
        """The first `count` numbers or more of a sequence, `[count]` of int64."""
        known = self._numbers.get((seed, device))
        if known is None or len(known) < count:
            size = max(1 << 12, 1 << (count - 1).bit_length())
            known = self._numbers[seed, device] = odd_numbers(seed, size, device)
        return known[:count]

    def sums(self) -> Sums:
        return Sums(self._sum(alike=False), self._sum(alike=True))

    def _sum(self, *, alike: bool) -> tuple[int, int]:
        found = [totals for (_, of), totals in self._totals.items() if of is alike]
        first, second = (sum(int(totals[number]) for totals in found) % 2**64 for number in range(2))
        return first, second


def odd_numbers(seed: str, count: int, device: torch.device) -> torch.Tensor:
    """`[count]` of int64: splitmix64 (Steele, Lea and Flood, 2014) from a seed on, with the lowest bit set."""
    start, _ = _factors(seed)
    state = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15) + start
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return (state ^ _shifted(state, 31)) | 1


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, without their sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _factors(name: str) -> tuple[int, int]:
    """Two odd numbers of 64 bits, as signed ones."""
    digest = hashlib.sha256(name.encode()).digest()
    first, second = (int.from_bytes(digest[at : at + 8], "little") | 1 for at in (0, 8))
    return _signed(first), _signed(second)
