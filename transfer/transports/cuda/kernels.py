"""The kernel that copies chunks of memory which the device reaches: its own, a peer's, and page-locked host memory.

Gathering into a staging buffer, scattering out of it, and fetching from a peer differ in their tables only. Addresses
go in as numbers, so that no tensor is needed. Imports Triton: import this only where that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl

from transfer.transports.cuda.launching import loaded

_BLOCK_NBYTES = 8192
_WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


def prepare(width: int) -> Callable[[int, int, int], None]:
    """Compile for the current device, and give a function that copies in words of `width` bytes.

    It takes the address of a `copier.Launch.table` in memory that the device reaches and that keeps it until the
    copies are over, the number of chunks in it, and the driver's handle of a stream of that device. It returns at once.
    """
    launch = loaded(_copy, 2, dict(zip(("WORD", "WIDTH", "BLOCK"), constants(width), strict=True)))
    return lambda table, chunks, stream: launch((chunks, 1, 1), stream, table, chunks)


def constants(width: int) -> tuple[tl.dtype, int, int]:
    """WORD, WIDTH and BLOCK of the kernel."""
    word = _WORDS[width]
    return word, width, _BLOCK_NBYTES // (word.primitive_bitwidth // 8)


@triton.jit(do_not_specialize=["table", "chunks"])  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    table: tl.int64, chunks: tl.int64, WORD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.cast(table, tl.pointer_type(tl.int64)) + tl.program_id(0)
    # Words of 16 bytes are pairs that the compiler moves at once, since it is told how they are aligned.
    source = tl.multiple_of(tl.cast(tl.multiple_of(tl.load(row), WIDTH), tl.pointer_type(WORD)), WIDTH)
    destination = tl.cast(tl.multiple_of(tl.load(row + chunks), WIDTH), tl.pointer_type(WORD))
    destination = tl.multiple_of(destination, WIDTH)
    words = tl.multiple_of(tl.load(row + 2 * chunks), WIDTH) // (WORD.primitive_bitwidth // 8)
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(destination + at, tl.load(source + at, mask=at < words), mask=at < words)
