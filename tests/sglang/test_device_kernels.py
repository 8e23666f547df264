"""The copy kernel in Triton's interpreter, over memory of this process, and what the compiler makes of it for a device.

Here since this environment has Triton; a device runs it in tests/gpu.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated.cuda_driver import DeviceBuffer, Library

from transfer.transports.cuda.copier import Copier, launches
from transfer.transports.cuda.driver import Driver

triton = pytest.importorskip("triton")
SPACE = 1 << 14


def load(interpret: bool) -> Any:
    """The module of kernels, decorated for the interpreter or for a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", str(int(interpret)))
        patch.delitem(sys.modules, "transfer.transports.cuda.kernels", raising=False)
        module = importlib.import_module("transfer.transports.cuda.kernels")
        patch.delitem(sys.modules, "transfer.transports.cuda.kernels")
    assert isinstance(module._copy, triton.runtime.JITFunction) is not interpret
    return module


@pytest.fixture(scope="module")
def interpreted() -> Any:
    return load(interpret=True)


def carry_out(kernels: Any, parts: Any) -> None:
    for part in parts:
        table = np.ascontiguousarray(part.table)
        kernels.prepare(part.width)(table.ctypes.data, table.shape[1], 0)


@given(st.data())
@settings(max_examples=30)
def test_the_kernel_copies_what_the_plan_says_and_nothing_else(interpreted: Any, data: Any) -> None:
    sizes = data.draw(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 9000)), min_size=1, max_size=5))
    gap = st.sampled_from([0, 1, 2, 4, 8, 16, 20])
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    sides = []
    for _ in range(2):
        order = data.draw(st.permutations(range(len(sizes))))
        starts, place = np.zeros(len(sizes), dtype=np.int64), data.draw(gap)
        for i in order:
            starts[i], place = place, place + sizes[i] + data.draw(gap)
        sides.append(starts)
    source, target = rng.integers(0, 256, 1 << 16, dtype=np.uint8), np.zeros(1 << 16, dtype=np.uint8)
    expected = target.copy()
    for a, b, n in zip(*sides, sizes, strict=True):
        expected[b : b + n] = source[a : a + n]
    places = source.ctypes.data + sides[0], target.ctypes.data + sides[1]
    carry_out(interpreted, launches(*places, np.array(sizes, dtype=np.int64)))
    assert np.array_equal(target, expected)


def test_every_width_and_every_length_up_to_two_blocks(interpreted: Any) -> None:
    for distance in (16, 8, 4, 2, 1):
        source = np.random.default_rng(distance).integers(0, 256, 20_000, dtype=np.uint8)
        target = np.zeros(20_000, dtype=np.uint8)
        start = -source.ctypes.data % 16
        there = (start + source.ctypes.data - target.ctypes.data) % 16 + distance
        for nbytes in (1, 15, 16, 17, 8191, 8192, 8193, 16_384, 16_399):
            target[:] = 0
            one = (np.array([value]) for value in (source.ctypes.data + start, target.ctypes.data + there, nbytes))
            parts = launches(*one)
            assert nbytes < 32 or max(part.width for part in parts) == distance
            carry_out(interpreted, parts)
            assert np.array_equal(target[there : there + nbytes], source[start : start + nbytes])
            assert not target[:there].any() and not target[there + nbytes :].any()


def test_gathered_to_memory_of_the_host_and_scattered_from_there(interpreted: Any) -> None:
    """Blocks of an engine, wrapped as tensors on the CPU: what arrives is what torch's own indexing gives."""
    torch = pytest.importorskip("torch")
    blocks = torch.randint(0, 256, (64, 1000), dtype=torch.uint8)
    there = torch.zeros_like(blocks)
    chosen, wanted = torch.randperm(64)[:20], torch.randperm(64)[:20]
    staging, sizes = np.zeros(20 * 1000, dtype=np.uint8), np.full(20, 1000)
    places = staging.ctypes.data + np.arange(20) * 1000
    local, remote = (base.data_ptr() + index.numpy() * 1000 for base, index in ((blocks, chosen), (there, wanted)))
    carry_out(interpreted, launches(local, places, sizes))
    carry_out(interpreted, launches(places, remote, sizes))
    assert staging.tobytes() == torch.index_select(blocks, 0, chosen).numpy().tobytes()
    expected = torch.zeros_like(blocks)
    expected[wanted] = blocks[chosen]
    assert torch.equal(there, expected)


def test_a_copier_takes_the_kernel_where_torch_is(interpreted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "transfer.transports.cuda.kernels", interpreted)
    library = Library()
    copier = Copier(Driver(library), 0)
    source, target = DeviceBuffer(64 << 10, seed=1), DeviceBuffer(64 << 10)
    starts = np.arange(32) * 2000
    copier.run(copier.plan(source.address + starts, target.address + starts[::-1], np.full(32, 1999)))
    copier.close()
    assert library.calls["cuMemcpyAsync"] == 0
    expected = np.zeros(64 << 10, dtype=np.uint8)
    for a, b in zip(starts, starts[::-1], strict=True):
        expected[b : b + 1999] = source.bytes[a : a + 1999]
    assert np.array_equal(target.bytes, expected)


@pytest.fixture(scope="module")
def compiled() -> dict[int, Any]:
    """The kernel for an H100, by width; no device is needed for that."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernels = load(interpret=False)
    names = ("WORD", "WIDTH", "BLOCK")
    signature = {"table": "i64", "chunks": "i64", **dict.fromkeys(names, "constexpr")}
    found = {}
    for width in (16, 8, 1):
        constants = dict(zip(names, kernels.constants(width), strict=True))
        source = ASTSource(kernels._copy, signature=signature, constexprs=constants)
        found[width] = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return found


def test_the_widest_words_are_moved_16_bytes_at_a_time(compiled: dict[int, Any]) -> None:
    def vectors(width: int) -> list[int]:
        return [compiled[width].asm["ptx"].count(f"{what}.global.v2.b64") for what in ("ld", "st")]

    assert vectors(16) == [4, 4], "128 threads, 64 bytes each"
    assert vectors(8) == vectors(1) == [0, 0], "an address that is no multiple of 16 would be an error"


def test_addresses_are_not_compiled_into_the_kernel() -> None:
    """Neither a count of 1 nor an address that is a multiple of 16 may make another kernel, or a constant."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    copy = load(interpret=False)._copy
    binder = create_function_from_signature(copy.signature, copy.params, CUDABackend(GPUTarget("cuda", 90, 32)))
    numbers = itertools.product((0, 16, 1, 1 << 47), (0, 1, 16))
    seen = {str(binder(table, chunks, 1, 1, 1)[1]) for table, chunks in numbers}
    assert len(seen) == 1 and "i64" in str(seen)
