"""Checksums of pages in device memory: XXH3-64, as the store has it, taken by the device while a page is in the slab.

Of a page, each block of 1,024 bytes is summed up by itself, which a device does for all blocks at once; what is left is
a chain of one short step a block. Source of algorithm and constants: the specification of XXH3 (xxHash, section "XXH3
Algorithm Overview"), for inputs of more than 240 bytes, no seed, the default secret.

Addresses go in as numbers, as in `kernel`. Imports Triton: import this only where that is wanted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import triton
import triton.language as tl

from transfer.transports.cuda.launching import loaded
from vllm_plugin.device.permutation import Int64

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_AVALANCHE = 0x165667919E3779F9
_BLOCK_NBYTES, _STRIPE_NBYTES = 1024, 64

# Where a table of `constants` has what, in words of 8 bytes.
_SCRAMBLE, _LAST, _START, _MERGE, _NUMBERS = (tl.constexpr(word) for word in (16, 24, 32, 40, 48))
"""Keys of a block's end, of the last stripe, the lanes' first values, keys of the end, and three numbers of it."""

_AT_ONCE = 16
"""Blocks that one program sums up: a lane of a block for each of its 128 threads."""
_UNROLLED = 16
"""Steps of the chain whose loads are under way at once."""

Start = Callable[[int, int, int, int, int, int, int], None]


def can_digest(nbytes: int) -> bool:
    """Whether pages of this size are digested here."""
    return nbytes > 240 and nbytes % _STRIPE_NBYTES == 0


def sums_nbytes(nbytes: int) -> int:
    """Of device memory that one page needs meanwhile."""
    return _num_blocks(nbytes) * _STRIPE_NBYTES


def _num_blocks(nbytes: int) -> int:
    return -(-nbytes // _BLOCK_NBYTES)


def constants() -> Int64:
    """What the kernels look up: int64 [51]."""
    secret = (struct.unpack_from("<8Q", _SECRET, at) for at in (0, 64, 128, len(_SECRET) - 71))
    p32, p64 = _PRIME32, _PRIME64
    start = p32[2], p64[0], p64[1], p64[2], p64[3], p32[1], p64[4], p32[0]
    merge = struct.unpack_from("<8Q", _SECRET, 11)
    numbers = p64[0], _AVALANCHE, p32[0]
    words = [*(word for keys in secret for word in keys), *start, *merge, *numbers]
    return np.array(words, dtype=np.uint64).view(np.int64)


def prepare() -> Start:
    """Compile and load for the current device what digests pages of any size, and give a function that starts it.

    It takes the address of the pages' addresses (int64 [n], multiples of 16), n, their size in bytes, how far behind
    the beginning of each page the `sums_nbytes` for its own use are, the address of `constants()`, that of n digests
    (uint64 [n]), and the driver's handle of a stream, and returns at once. All that is memory which the device reaches.
    """
    sum_blocks = loaded(_sum_blocks, 4, {"AT_ONCE": _AT_ONCE})
    chain = loaded(_chain, 5, {"UNROLLED": _UNROLLED}, num_warps=1)

    def start(
        pages: int, num_pages: int, nbytes: int, sums_offset: int, table: int, digests: int, stream: int
    ) -> None:
        programs = -(-_num_blocks(nbytes) // _AT_ONCE)
        sum_blocks((num_pages, programs, 1), stream, pages, nbytes, sums_offset, table)
        chain((num_pages, 1, 1), stream, pages, nbytes, sums_offset, table, digests)

    return start


@triton.jit(do_not_specialize=["pages", "nbytes", "sums_offset", "table"])  # type: ignore[untyped-decorator]
def _sum_blocks(  # type: ignore[no-untyped-def]
    pages: tl.int64,
    nbytes: tl.int64,
    sums_offset: tl.int64,
    table: tl.int64,
    AT_ONCE: tl.constexpr,
):
    """Sum up `AT_ONCE` blocks of one page, each of 16 stripes of 8 lanes."""
    words_stop = tl.multiple_of((nbytes // 8).to(tl.int32), 8)
    blocks = ((nbytes + 1023) // 1024).to(tl.int32)
    address = tl.load(tl.cast(pages, tl.pointer_type(tl.int64)) + tl.program_id(0))
    page = tl.cast(tl.multiple_of(address, 16), tl.pointer_type(tl.uint64))
    sums = tl.cast(address + sums_offset, tl.pointer_type(tl.uint64))
    keys = tl.cast(table, tl.pointer_type(tl.uint64))
    block, lane = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None], tl.arange(0, 8)[None, :]
    products = tl.full((AT_ONCE, 8), 0, tl.uint64)
    words = tl.full((AT_ONCE, 8), 0, tl.uint64)
    for stripe in tl.static_range(16):
        word = (block * 16 + stripe) * 8 + lane
        inside = word < words_stop
        data = tl.load(page + word, mask=inside, other=0)
        mixed = data ^ tl.load(keys + tl.where(word < words_stop - 8, stripe, _LAST) + lane)
        products += tl.where(inside, (mixed & 0xFFFFFFFF) * (mixed >> 32), 0)
        words += data
    even, odd = tl.split(tl.reshape(words, (AT_ONCE, 4, 2)))  # a lane takes its neighbour's words
    total = products + tl.reshape(tl.join(odd, even), (AT_ONCE, 8))
    tl.store(sums + block * 8 + lane, total, mask=block < blocks)


@triton.jit(do_not_specialize=["pages", "nbytes", "sums_offset", "table", "digests"])  # type: ignore[untyped-decorator]
def _chain(  # type: ignore[no-untyped-def]
    pages: tl.int64,
    nbytes: tl.int64,
    sums_offset: tl.int64,
    table: tl.int64,
    digests: tl.int64,
    UNROLLED: tl.constexpr,
):
    """The digest of one page, from the sums of its blocks."""
    lane = tl.arange(0, 8)
    keys = tl.cast(table, tl.pointer_type(tl.uint64))
    scramble, prime = tl.load(keys + _SCRAMBLE + lane), tl.load(keys + _NUMBERS + 2)
    address = tl.load(tl.cast(pages, tl.pointer_type(tl.int64)) + tl.program_id(0))
    sums = tl.cast(address + sums_offset, tl.pointer_type(tl.uint64)) + lane
    acc = tl.load(keys + _START + lane)
    last = ((nbytes + 1023) // 1024).to(tl.int32) - 1
    full = last // UNROLLED * UNROLLED
    for first in range(0, full, UNROLLED):
        for step in tl.static_range(UNROLLED):  # the loads wait for nothing, so they are all under way at once
            acc += tl.load(sums + (first + step) * 8)
            acc = (acc ^ (acc >> 47) ^ scramble) * prime
    for step in tl.static_range(UNROLLED - 1):
        rest = full + step + 0 * lane < last  # of all lanes
        summed = acc + tl.load(sums + (full + step) * 8, mask=rest, other=0)
        acc = tl.where(rest, (summed ^ (summed >> 47) ^ scramble) * prime, acc)
    acc += tl.load(sums + last * 8)
    left, right = tl.split(tl.reshape(acc ^ tl.load(keys + _MERGE + lane), (4, 2)))
    folded = (left * right) ^ tl.umulhi(left, right)
    left, right = tl.split(tl.reshape(folded, (2, 2)))
    left, right = tl.split(left + right)
    digest = nbytes.to(tl.uint64) * tl.load(keys + _NUMBERS) + left + right
    digest = (digest ^ (digest >> 37)) * tl.load(keys + _NUMBERS + 1)
    tl.store(tl.cast(digests, tl.pointer_type(tl.uint64)) + tl.program_id(0), digest ^ (digest >> 32))
