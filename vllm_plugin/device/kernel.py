"""The kernel that permutes a batch of pages in device memory into an engine's KV blocks, or out of them.

Addresses go in as numbers, so that no tensor is needed and Triton's interpreter runs it over memory of this process.
Imports Triton: import this only where that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from transfer.transports.cuda.launching import loaded
from vllm_plugin.device.permutation import Permutation

_TILE_NBYTES = 8192
"""Moved in one step of a program's loop: by 128 threads, four words of 16 bytes each."""
_WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}

Start = Callable[[int, int, int, int], None]


def prepare(permutation: Permutation, *, into_blocks: bool) -> Start:
    """Compile and load for the current device, and give a function that starts one batch.

    It takes the address of the batch's runs (`permutation.columns`, int64 [5, n], C-contiguous), n, the address of
    `permutation.layer_addresses` (int64), and the driver's handle of a stream of that device, and returns at once. The
    device reads both tables when the stream gets there, so until then they stay as they are, in memory that it
    reaches. Nothing else of the permutation's addresses is checked: a wrong one ends the device's work for the process.
    """
    launch = loaded(_permute, 3, constants(permutation, into_blocks=into_blocks))
    num_layers = permutation.num_layers

    def start(runs: int, num_runs: int, layers: int, stream: int) -> None:
        if num_runs:
            launch((num_runs, num_layers, 1), stream, runs, num_runs, layers)

    return start


def constants(permutation: Permutation, *, into_blocks: bool) -> dict[str, Any]:
    """What is compiled into the kernel, in its order. Strides and sizes are in words, of 8 bytes at most."""
    word = _WORDS[permutation.width]
    nbytes = word.primitive_bitwidth // 8
    segments = tuple(
        (
            *(one.nbytes // nbytes, one.page_offset // nbytes, one.page_layer // nbytes, one.page_token // nbytes),
            *(one.page_head // nbytes, one.block_offset // nbytes, one.block_token // nbytes),
        )
        for one in permutation.segments
    )
    return {
        "WORD": word,
        "WIDTH": permutation.width,
        "TILE": _TILE_NBYTES // nbytes,
        "HEADS": permutation.num_heads,
        "BLOCK_STRIDE": permutation.block_stride // nbytes,
        "HEAD_STRIDE": permutation.head_stride // nbytes,
        "SEGMENTS": segments,
        "INTO_BLOCKS": into_blocks,
    }


@triton.jit(do_not_specialize=["runs", "num_runs", "layers"])  # type: ignore[untyped-decorator]
def _permute(  # type: ignore[no-untyped-def]
    runs: tl.int64,
    num_runs: tl.int64,
    layers: tl.int64,
    WORD: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    INTO_BLOCKS: tl.constexpr,
):
    """One run of one layer, K and V."""
    layer = tl.program_id(1).to(tl.int64)
    run = tl.cast(runs, tl.pointer_type(tl.int64)) + tl.program_id(0)
    address = tl.load(tl.cast(layers, tl.pointer_type(tl.int64)) + layer)
    page_token = tl.load(run + num_runs)
    count = tl.load(run + 2 * num_runs).to(tl.int32)
    block = tl.load(run + 3 * num_runs)
    block_token = tl.load(run + 4 * num_runs)
    # Words of 16 bytes are pairs that the compiler moves at once, since it is told how they are aligned.
    page = tl.multiple_of(tl.cast(tl.multiple_of(tl.load(run), WIDTH), tl.pointer_type(WORD)), WIDTH)
    blocks = tl.multiple_of(tl.cast(tl.multiple_of(address, WIDTH), tl.pointer_type(WORD)), WIDTH)
    for which in tl.static_range(len(SEGMENTS)):
        _move(
            page,
            layer,
            page_token,
            blocks + block * BLOCK_STRIDE,
            block_token,
            count,
            TILE,
            HEADS,
            HEAD_STRIDE,
            SEGMENTS,
            which,
            INTO_BLOCKS,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    page,
    layer,
    page_token,
    block,
    block_token,
    count,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WHICH: tl.constexpr,
    INTO_BLOCKS: tl.constexpr,
):
    """K or V of the run; `page` and `block` point to their first bytes."""
    WORDS: tl.constexpr = SEGMENTS[WHICH][0]
    PAGE_TOKEN: tl.constexpr = SEGMENTS[WHICH][3]
    BLOCK_TOKEN: tl.constexpr = SEGMENTS[WHICH][6]
    here = page + SEGMENTS[WHICH][1] + layer * SEGMENTS[WHICH][2] + page_token * PAGE_TOKEN
    there = block + SEGMENTS[WHICH][5] + block_token * BLOCK_TOKEN
    end = count * (HEADS * WORDS)
    for start in range(0, end, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < end
        token = (at // (HEADS * WORDS)).to(tl.int64)
        head = (at // WORDS % HEADS).to(tl.int64)
        in_page = here + (token * PAGE_TOKEN + head * SEGMENTS[WHICH][4] + at % WORDS)
        in_block = there + (token * BLOCK_TOKEN + head * HEAD_STRIDE + at % WORDS)
        if INTO_BLOCKS:
            tl.store(in_block, tl.load(in_page, mask=inside), mask=inside)
        else:
            tl.store(in_page, tl.load(in_block, mask=inside), mask=inside)
