"""Checksums that a device takes, over Triton's interpreter: those of xxhash, of any page."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from long_form import LONG

pytest.importorskip("triton")

import triton
from device_stand_in import interpreted_kernel
from triton_stand_in import loaded_by


@pytest.fixture(scope="module")
def digests() -> Any:
    return interpreted_kernel().digests


def digests_of(digests: Any, memory: np.ndarray, nbytes: int, order: list[int]) -> list[int]:
    """Of pages one behind the other in `memory`, each followed by what its digest needs."""
    step = nbytes + digests.sums_nbytes(nbytes)
    pages = np.array([memory.ctypes.data + number * step for number in order], dtype=np.int64)
    table, found = digests.constants(), np.zeros(len(order), dtype=np.uint64)
    start = digests.prepare()
    start(pages.ctypes.data, len(order), nbytes, nbytes, table.ctypes.data, found.ctypes.data, 0)
    return found.tolist()


@pytest.mark.long
@settings(deadline=None, max_examples=40 if LONG else 10)
@given(stripes=st.integers(4, 700 if LONG else 300), seed=st.integers(0, 1 << 30), order=st.permutations(range(3)))
@example(stripes=4, seed=1, order=[0, 1, 2])  # less than a block
@example(stripes=256, seed=1, order=[2, 0, 1])  # as many blocks as one program sums up
@example(stripes=257, seed=1, order=[1, 2, 0])
@example(stripes=273, seed=1, order=[0, 2, 1])  # the chain has one step more than it unrolls
def test_they_are_what_xxhash_gives(digests: Any, stripes: int, seed: int, order: list[int]) -> None:
    nbytes = 64 * stripes
    step = nbytes + digests.sums_nbytes(nbytes)
    memory = np.random.default_rng(seed).integers(0, 256, 3 * step, dtype=np.uint8)
    expected = [xxhash.xxh3_64_intdigest(memory[n * step : n * step + nbytes].data) for n in order]
    assert digests_of(digests, memory, nbytes, list(order)) == expected
    assert memory[:nbytes].any()


@pytest.mark.parametrize("at", [0, 1023, 1024, 40_000, 64 * 1000 - 1])
def test_one_bit_anywhere_changes_them(digests: Any, at: int) -> None:
    nbytes = 64 * 1000
    memory = np.zeros(nbytes + digests.sums_nbytes(nbytes), dtype=np.uint8)
    before = digests_of(digests, memory, nbytes, [0])
    memory[at] ^= 1
    assert digests_of(digests, memory, nbytes, [0]) != before


def test_pages_of_other_sizes_are_left_to_processors(digests: Any) -> None:
    assert [nbytes for nbytes in (64, 192, 240, 256, 300, 1000, 1024) if digests.can_digest(nbytes)] == [256, 1024]


def test_a_device_loads_them_once_for_pages_of_any_size_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm_plugin.device.digests", raising=False)  # other tests have it interpreted
    digests = importlib.import_module("vllm_plugin.device.digests")
    with loaded_by(monkeypatch) as stand_in:
        start = digests.prepare()
        assert len(stand_in.loaded) == 2 and not stand_in.launched
        start(0x1000, 5, 8 << 20, 8 << 20, 0x2000, 0x3000, 9)
        start(0x1008, 1, 256, 512, 0x2008, 0x3008, 9)
    assert len(stand_in.loaded) == 2
    grids = [one[:5] for one in stand_in.launched]
    assert grids == [(5, 512, 1, 9, 77), (5, 1, 1, 9, 77), (1, 1, 1, 9, 77), (1, 1, 1, 9, 77)]
    assert [list(one[-2]) for one in stand_in.launched] == [["i64"] * 4, ["i64"] * 5] * 2


def test_they_compile_for_a_device_with_sizes_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And hold everything in registers."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.delitem(sys.modules, "vllm_plugin.device.digests", raising=False)  # other tests have it interpreted
    digests = importlib.import_module("vllm_plugin.device.digests")
    numbers = ["pages", "nbytes", "sums_offset", "table"]
    for kernel, names, constants, options in (
        (digests._sum_blocks, numbers, {"AT_ONCE": 16}, {}),
        (digests._chain, [*numbers, "digests"], {"UNROLLED": 16}, {"num_warps": 1}),
    ):
        signature = {**dict.fromkeys(names, "i64"), **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(kernel, signature=signature, constexprs=constants)
        asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
        assert ".local" not in asm["ptx"] and asm["cubin"]
