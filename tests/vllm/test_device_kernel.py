"""The kernel between pages and KV blocks: in Triton's interpreter against numpy's permutation; compiled for an H100.

A device runs it in tests/gpu.
"""

from __future__ import annotations

import importlib
import itertools
import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
import triton
from triton_stand_in import Loaded, loaded_by

from mooncake_connector.errors import PageError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import BlockLayout, PageFormat, Part, SegmentLayout, fit, pack, unpack
from vllm_plugin.device.permutation import Permutation, columns, runs
from vllm_plugin.unsupported import Unsupported

Bytes = npt.NDArray[np.uint8]

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Orders in memory that vLLM has for accelerators: L layer, B block, H head, N token, C content."""
GUARD = 256
SLOT = 4096
FLAWED = 0xEE
NORESERVE = 0x4000  # MAP_NORESERVE


def load(interpret: bool) -> Any:
    """The module of the kernel, decorated for the interpreter or for a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", str(int(interpret)))
        patch.delitem(sys.modules, "vllm_plugin.device.kernel", raising=False)
        module = importlib.import_module("vllm_plugin.device.kernel")
        patch.delitem(sys.modules, "vllm_plugin.device.kernel")
    assert isinstance(module._permute, triton.runtime.JITFunction) is not interpret
    return module


@pytest.fixture(scope="module")
def interpreted() -> Any:
    return load(interpret=True)


def aligned(nbytes: int, shift: int = 0) -> Bytes:
    """Bytes whose address is `shift` more than a multiple of a slot's alignment."""
    memory = np.full(nbytes + SLOT + shift, FLAWED, dtype=np.uint8)
    start = -memory.ctypes.data % SLOT + shift
    return memory[start : start + nbytes]


def laid_out(fmt: PageFormat, num_blocks: int, block_tokens: int, order: str, address: int) -> tuple[BlockLayout, int]:
    """Blocks as vLLM lays them out, K beside V for each token, from `address` on; and how many bytes they are."""
    content = (fmt.k_dim + fmt.v_dim) * fmt.itemsize
    sizes = {"L": fmt.num_layers, "B": num_blocks, "H": fmt.num_heads, "N": block_tokens, "C": content}
    strides, nbytes = {}, 1
    for axis in reversed(order):
        strides[axis] = nbytes
        nbytes *= sizes[axis]
    tokens = ((block_tokens, strides["N"]),)
    return BlockLayout(
        layer_addresses=tuple(address + layer * strides["L"] for layer in range(fmt.num_layers)),
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        block_stride=strides["B"],
        head_stride=strides["H"],
        k=SegmentLayout(0, tokens, ((fmt.k_dim, fmt.itemsize),)),
        v=SegmentLayout(fmt.k_dim * fmt.itemsize, tokens, ((fmt.v_dim, fmt.itemsize),)) if fmt.v_dim else None,
    ), nbytes


@dataclass
class Case:
    """An engine's memory, a guard on both sides included, and the block tables of some requests in it."""

    fmt: PageFormat
    layout: BlockLayout
    memory: Bytes
    tables: list[list[int]]
    first_tokens: list[int]
    skips: list[int]
    order: str


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_tokens = draw(st.sampled_from([1, 3, 16, 32, 64, 128]))
    fmt = PageFormat(
        num_layers=draw(st.integers(1, 3)),
        page_tokens=draw(st.sampled_from([4, 16] if block_tokens < 16 else [16, 64])),
        num_heads=draw(st.integers(1, 3)),
        k_dim=draw(st.sampled_from([1, 4, 6, 16, 36, 128])),
        v_dim=draw(st.sampled_from([0, 4, 6, 16, 128])),
        itemsize=draw(st.sampled_from([1, 2, 4])),
    )
    order = draw(st.sampled_from(LAYOUTS))
    first_tokens = [draw(st.integers(0, 2 * block_tokens)) for _ in range(draw(st.integers(1, 2)))]
    needed = [-(-(first + fmt.page_tokens) // block_tokens) for first in first_tokens]
    num_blocks = sum(needed) + 1
    shift = draw(st.sampled_from([0, 0, 1, 2, 4, 8])) * fmt.itemsize
    _, nbytes = laid_out(fmt, num_blocks, block_tokens, order, 0)
    memory = aligned(nbytes + 2 * GUARD, shift)
    layout, _ = laid_out(fmt, num_blocks, block_tokens, order, memory.ctypes.data + GUARD)
    memory[:] = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, len(memory), dtype=np.uint8)
    blocks = iter(np.random.default_rng(len(memory)).permutation(num_blocks).tolist())
    tables = [list(itertools.islice(blocks, count)) for count in needed]
    skips = [draw(st.integers(0, fmt.page_tokens)) for _ in first_tokens]
    return Case(fmt, layout, memory, tables, first_tokens, skips, order)


@st.composite
def parts(draw: st.DrawFn, case: Case) -> tuple[PageFormat, Part | None]:
    """Pages of another shard that has something in common with these blocks, or their own."""
    if draw(st.booleans()):
        return case.fmt, None
    own = Shard(1, 1 + case.fmt.num_layers, 1, 1 + case.fmt.num_heads)
    layer, head = draw(st.sampled_from(own.layers)), draw(st.sampled_from(own.heads))
    first = draw(st.integers(0, layer)), draw(st.integers(0, head))
    last = draw(st.integers(layer, own.layer_stop)), draw(st.integers(head, own.head_stop))
    return fit(case.fmt, own, Shard(first[0], last[0] + 1, first[1], last[1] + 1))


def slots(fmt: PageFormat, count: int) -> list[Bytes]:
    """Pages that begin at multiples of a slot's alignment, with bytes of nobody's behind each."""
    step = -(-(fmt.nbytes + GUARD) // SLOT) * SLOT
    return list(aligned(count * step).reshape(count, step))


def carry_out(
    kernel: Any, permutation: Permutation, fmt: PageFormat, case: Case, pages: list[Bytes], skips: list[int], into: bool
) -> None:
    """One batch of all the pages."""
    rows = zip(case.tables, case.first_tokens, skips, strict=True)
    found = [runs(fmt, case.layout, table, first, skip) for table, first, skip in rows]
    table = columns(found, [page.ctypes.data for page in pages])
    assert table.flags.c_contiguous
    layers = np.array(permutation.layer_addresses, dtype=np.int64)
    kernel.prepare(permutation, into_blocks=into)(table.ctypes.data, table.shape[1], layers.ctypes.data, 0)


EXAMPLES = settings(max_examples=40)


@given(st.data())
@EXAMPLES
def test_a_batch_enters_the_blocks_as_numpy_puts_it_there_and_nothing_else_changes(interpreted: Any, data: Any) -> None:
    case = data.draw(cases())
    fmt, part = data.draw(parts(case))
    pages = slots(fmt, len(case.tables))
    for seed, page in enumerate(pages):
        page[:] = np.random.default_rng(seed).integers(0, 256, len(page), dtype=np.uint8)
    before = case.memory.copy()
    for table, first, skip, page in zip(case.tables, case.first_tokens, case.skips, pages, strict=True):
        unpack(fmt, case.layout, table, first, page[: fmt.nbytes], skip, part)
    expected = case.memory.copy()
    assert all(case.skips) or not np.array_equal(expected, before)
    case.memory[:] = before
    carry_out(interpreted, Permutation.of(fmt, case.layout, part), fmt, case, pages, case.skips, True)
    assert np.array_equal(case.memory, expected)


@given(st.data())
@EXAMPLES
def test_a_batch_leaves_the_blocks_as_numpy_packs_it_and_nothing_else_changes(interpreted: Any, data: Any) -> None:
    case = data.draw(cases())
    before = case.memory.copy()
    pages, expected = slots(case.fmt, len(case.tables)), slots(case.fmt, len(case.tables))
    for table, first, page in zip(case.tables, case.first_tokens, expected, strict=True):
        pack(case.fmt, case.layout, table, first, page[: case.fmt.nbytes])
    permutation = Permutation.of(case.fmt, case.layout)
    carry_out(interpreted, permutation, case.fmt, case, pages, [0] * len(pages), False)
    assert np.array_equal(pages, expected)
    assert np.array_equal(case.memory, before)


@pytest.mark.parametrize("stored", [Shard(0, 3, 2, 4), Shard(2, 6, 0, 3), Shard(2, 3, 2, 3)], ids=str)
@pytest.mark.parametrize("order", LAYOUTS)
def test_what_pages_of_other_shards_have_in_common_with_the_blocks(interpreted: Any, order: str, stored: Shard) -> None:
    own = PageFormat(num_layers=3, page_tokens=16, num_heads=3, k_dim=8, v_dim=4, itemsize=2)
    fmt, part = fit(own, Shard(1, 4, 1, 4), stored)
    memory = aligned(laid_out(own, 4, 16, order, 0)[1])
    layout, _ = laid_out(own, 4, 16, order, memory.ctypes.data)
    (page,) = slots(fmt, 1)
    page[:] = np.random.default_rng(1).integers(0, 256, len(page), dtype=np.uint8)
    unpack(fmt, layout, [2, 0], 8, page[: fmt.nbytes], 3, part)
    expected = memory.copy()
    memory[:] = FLAWED
    case = Case(fmt, layout, memory, [[2, 0]], [8], [3], order)
    carry_out(interpreted, Permutation.of(fmt, layout, part), fmt, case, [page], [3], True)
    assert np.array_equal(memory, expected)


def test_strides_beyond_32_bits(interpreted: Any) -> None:
    """Blocks that lie 2.5 GiB apart, and heads 1.5: of that memory only what is touched is there."""
    fmt = PageFormat(num_layers=1, page_tokens=4, num_heads=3, k_dim=9, v_dim=9, itemsize=1)
    with mmap.mmap(-1, 6 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE) as memory:
        mapped = np.frombuffer(memory, dtype=np.uint8)
        layout, _ = laid_out(fmt, 2, 4, "LHBNC", mapped.ctypes.data)
        layout = replace(layout, block_stride=5 << 29, head_stride=3 << 29)
        permutation = Permutation.of(fmt, layout)
        assert permutation.width == 1, "so that strides are as many words"
        page, again = slots(fmt, 2)
        page[: fmt.nbytes] = np.arange(fmt.nbytes, dtype=np.uint8)
        case = Case(fmt, layout, mapped, [[1]], [0], [0], "")
        carry_out(interpreted, permutation, fmt, case, [page], [0], True)
        pack(fmt, layout, [1], 0, again[: fmt.nbytes])
        assert np.array_equal(page[: fmt.nbytes], again[: fmt.nbytes])
        again[: fmt.nbytes] = 0
        carry_out(interpreted, permutation, fmt, case, [again], [0], False)
        assert np.array_equal(page[: fmt.nbytes], again[: fmt.nbytes])
        del mapped, case


def test_a_batch_without_runs_starts_nothing(interpreted: Any) -> None:
    fmt = PageFormat(1, 16, 1, 8, 8, 2)
    permutation = Permutation.of(fmt, laid_out(fmt, 2, 16, "LBNHC", 0)[0])
    interpreted.prepare(permutation, into_blocks=True)(1, 0, 1, 0)  # addresses of nothing


# What the permutation says


@pytest.mark.parametrize(
    "dims, itemsize, shift, width",
    [
        ((128, 128), 2, 0, 16),
        ((128, 128), 1, 16, 16),
        ((576, 0), 2, 0, 16),
        ((576, 0), 1, 0, 16),
        ((128, 128), 2, 8, 8),
        ((128, 128), 2, 4, 4),
        ((132, 128), 2, 0, 8),
        ((33, 33), 4, 0, 4),
        ((33, 33), 2, 0, 2),
        ((33, 33), 1, 0, 1),
        ((128, 128), 2, 1, 1),
    ],
)
def test_words_are_as_wide_as_all_addresses_and_sizes_allow(
    dims: tuple[int, int], itemsize: int, shift: int, width: int
) -> None:
    fmt = PageFormat(2, 64, 8 if dims[1] else 1, *dims, itemsize)
    layout, _ = laid_out(fmt, 4, 16, "LBNHC", (1 << 30) + shift)
    permutation = Permutation.of(fmt, layout)
    assert permutation.width == width
    assert hash(permutation) == hash(Permutation.of(fmt, layout))


def test_the_layers_that_move_are_those_of_the_part() -> None:
    fmt = PageFormat(4, 64, 2, 8, 8, 2)
    layout, _ = laid_out(fmt, 4, 16, "LBNHC", 1 << 30)
    theirs, part = fit(fmt, Shard(4, 8, 0, 2), Shard(6, 10, 1, 2))
    permutation = Permutation.of(theirs, layout, part)
    assert permutation.layer_addresses == layout.layer_addresses[2:]
    assert (permutation.num_layers, permutation.num_heads) == (2, 1)


NESTED = ((4, 64), (4, 8))
SPREAD = ((16, 64),)


@pytest.mark.parametrize(
    "token, dim",
    [(NESTED, ((8, 2),)), (((16, 16),), ((4, 2), (2, 8))), (((16, 16),), ((8, 4),)), (SPREAD, ((2, 2), (4, 8)))],
)
def test_blocks_that_only_nested_strides_describe_are_unsupported(token: Any, dim: Any) -> None:
    fmt = PageFormat(1, 16, 1, 8, 0, 2)
    layout = BlockLayout((4096,), 2, 16, 4096, 0, SegmentLayout(0, token, dim), None)
    with pytest.raises(Unsupported, match=r"not equally spaced|apart"):
        Permutation.of(fmt, layout)


def test_nested_strides_that_are_even_are_as_good_as_one() -> None:
    fmt = PageFormat(1, 16, 1, 8, 0, 2)
    plain = BlockLayout((4096,), 2, 16, 4096, 0, SegmentLayout(0, SPREAD, ((8, 2),)), None)
    nested = replace(plain, k=SegmentLayout(0, ((1, 7), (4, 256), (4, 64)), ((2, 8), (1, 3), (4, 2))))
    assert Permutation.of(fmt, nested) == Permutation.of(fmt, plain)


@pytest.mark.parametrize(
    "part", [None, Part(Shard(0, 3, 0, 1), Shard(0, 3, 0, 1)), Part(Shard(0, 2, 0, 1), Shard(2, 4, 0, 1))]
)
def test_a_page_that_does_not_fit_is_refused_in_the_words_of_the_page(part: Part | None) -> None:
    fmt = PageFormat(2, 16, 1, 8, 0, 2)
    memory = aligned(1 << 16)
    layout, _ = laid_out(replace(fmt, num_layers=3), 2, 16, "LBNHC", memory.ctypes.data)
    with pytest.raises(PageError) as expected:
        unpack(fmt, layout, [0], 0, np.empty(fmt.nbytes, dtype=np.uint8), 0, part)
    with pytest.raises(PageError) as found:
        Permutation.of(fmt, layout, part)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("table", [[], [0], [0, 5], [0, -1], [0, 1, 2, 9], [7]])
@pytest.mark.parametrize("skip", [0, 20])
def test_a_block_table_that_does_not_do_is_refused_in_the_words_of_the_page(table: list[int], skip: int) -> None:
    fmt = PageFormat(1, 64, 1, 8, 0, 2)
    memory = aligned(1 << 16)
    layout, _ = laid_out(fmt, 5, 16, "LBNHC", memory.ctypes.data)
    with pytest.raises(PageError) as expected:
        unpack(fmt, layout, table, 8, np.empty(fmt.nbytes, dtype=np.uint8), skip)
    with pytest.raises(PageError) as found:
        runs(fmt, layout, table, 8, skip)
    assert str(found.value) == str(expected.value)


def test_runs_end_where_blocks_do() -> None:
    fmt = PageFormat(1, 64, 1, 8, 0, 2)
    layout, _ = laid_out(fmt, 9, 32, "LBNHC", 0)
    found = columns([runs(fmt, layout, [8, 7, 6, 5], 40, 3)], [4096])
    assert found.T.tolist() == [[4096, 3, 21, 7, 11], [4096, 24, 32, 6, 0], [4096, 56, 8, 5, 0]]
    assert not runs(fmt, layout, [8, 7, 6, 5], 40, 64).blocks


# What the compiler makes of it

GEOMETRIES = {
    "Llama-3-8B": (PageFormat(32, 64, 8, 128, 128, 2), 16, "LBNHC"),
    "heads outside, all layers of a block together": (PageFormat(48, 64, 4, 128, 128, 1), 32, "BLHNC"),
    "DeepSeek-V3": (PageFormat(61, 64, 1, 576, 0, 2), 64, "LBHNC"),
}


@pytest.fixture(scope="module")
def compiler() -> Any:
    """Compiles the kernel for an H100; no device is needed for that."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = load(interpret=False)

    def compile(permutation: Permutation, into_blocks: bool) -> dict[str, Any]:
        constants = kernel.constants(permutation, into_blocks=into_blocks)
        signature = {**dict.fromkeys(("runs", "num_runs", "layers"), "i64"), **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(kernel._permute, signature=signature, constexprs=constants)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm

    return compile


@pytest.mark.parametrize("into_blocks", [True, False])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_16_bytes_are_moved_at_a_time(compiler: Any, name: str, into_blocks: bool) -> None:
    fmt, block_tokens, order = GEOMETRIES[name]
    permutation = Permutation.of(fmt, laid_out(fmt, 100, block_tokens, order, 1 << 40)[0])
    asm = compiler(permutation, into_blocks)
    wide = [asm["ptx"].count(f"{what}.global.v2.b64") for what in ("ld", "st")]
    assert wide == [4 * len(permutation.segments)] * 2, "128 threads, 64 bytes each, for K and for V"
    assert ".local" not in asm["ptx"] and asm["cubin"]


def test_what_begins_at_a_multiple_of_8_is_moved_so(compiler: Any) -> None:
    fmt, block_tokens, order = GEOMETRIES["Llama-3-8B"]
    permutation = Permutation.of(fmt, laid_out(fmt, 100, block_tokens, order, (1 << 40) + 8)[0])
    ptx = compiler(permutation, True)["ptx"]
    assert ".v2." not in ptx and ptx.count("st.global.b64") == 8 * 2, "16 bytes at once would be an error"


def test_addresses_and_counts_are_not_compiled_into_the_kernel() -> None:
    """Neither one run nor an address that is a multiple of 16 may make another kernel, or a constant."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    kernel = load(interpret=False)
    permute = kernel._permute
    fmt, block_tokens, order = GEOMETRIES["DeepSeek-V3"]
    constants = kernel.constants(Permutation.of(fmt, laid_out(fmt, 9, block_tokens, order, 0)[0]), into_blocks=True)
    binder = create_function_from_signature(permute.signature, permute.params, CUDABackend(GPUTarget("cuda", 90, 32)))
    numbers = itertools.product((0, 16, 1, 1 << 47), (0, 1, 16), (0, 16, 1))
    seen = {str(binder(*three, **constants)[1][:3]) for three in numbers}
    assert len(seen) == 1 and str(seen).count("i64") == 3


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loaded]:
    with loaded_by(monkeypatch) as stand_in:
        yield stand_in


def test_it_is_loaded_once_and_launched_on_the_stream_that_is_given(loaded: Loaded) -> None:
    fmt, block_tokens, order = GEOMETRIES["Llama-3-8B"]
    permutation = Permutation.of(fmt, laid_out(fmt, 100, block_tokens, order, 1 << 40)[0])
    start = load(interpret=False).prepare(permutation, into_blocks=True)
    assert len(loaded.loaded) == 1 and not loaded.launched
    start(0x1000, 5, 0x2000, 9)
    start(0x1000, 0, 0x2000, 9)
    start(0x3000, 7, 0x2000, 9)
    assert len(loaded.loaded) == 1
    assert [one[:5] for one in loaded.launched] == [(5, 32, 1, 9, 77), (7, 32, 1, 9, 77)]
    assert [one[-1][:3] for one in loaded.launched] == [(0x1000, 5, 0x2000), (0x3000, 7, 0x2000)]
    signature = loaded.launched[0][-2]
    assert list(signature) == ["i64"] * 3, "all else is compiled in"
