"""KV tensors of every layout and dtype become canonical pages and back; the CPU's packing is measured, not assumed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import _custom_ops as ops

import vllm_plugin.blocks
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import PageFormat
from vllm_plugin.blocks import (
    KVBlocks,
    probe_cpu_order,
    probe_order,
    register_tensors,
    regroup_kernel_blocks,
    selected,
)  # fmt: skip
from vllm_plugin.geometry import Unsupported

NUM_LAYERS = 3
NUM_BLOCKS = 7
DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}


def tensors(
    heads: int, block_tokens: int, content: int, dtype: torch.dtype, order: str, seed: int = 0
) -> list[torch.Tensor]:
    """One allocation of random bytes, seen as each layer's `[block, head, token, content]`."""
    sizes = {"L": NUM_LAYERS, "B": NUM_BLOCKS, "H": heads, "N": block_tokens, "C": content * dtype.itemsize}
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 256, [sizes[axis] for axis in order], dtype=torch.uint8, generator=generator)
    logical = memory.permute([order.index(axis) for axis in "LBHNC"])
    return [logical[layer].view(dtype) for layer in range(NUM_LAYERS)]


def as_bytes(layers: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    """`[layer, block, head, token, byte]`, a copy."""
    return np.stack([layer.view(torch.uint8).numpy() for layer in layers]).copy()


def expected_page(layers: list[torch.Tensor], fmt: PageFormat, table: list[int], first_token: int) -> bytes:
    """The canonical page, element by element."""
    content, block_tokens = as_bytes(layers), layers[0].shape[2]
    k_nbytes = fmt.k_dim * fmt.itemsize
    page = bytearray()
    for part in (slice(0, k_nbytes), slice(k_nbytes, None)):
        for layer in range(NUM_LAYERS):
            for token in range(first_token, first_token + fmt.page_tokens):
                for head in range(fmt.num_heads):
                    page += bytes(content[layer, table[token // block_tokens], head, token % block_tokens, part])
    return bytes(page)


@pytest.fixture(params=["host", "device"])
def where(request: pytest.FixtureRequest) -> str:
    """`device`: the path through a staging copy, which a device's memory needs, here with tensors of the CPU."""
    return str(request.param)


def whole(fmt: PageFormat) -> Shard:
    """The only shard of a model whose pages have this geometry."""
    return Shard(0, fmt.num_layers, 0, fmt.num_heads)


def kv_blocks(layers: list[torch.Tensor], fmt: PageFormat, where: str, shard: Shard | None = None) -> KVBlocks:
    blocks = KVBlocks(layers, shard or whole(fmt), fmt, None)
    if where == "device":
        blocks._on_device = True
    return blocks


def check_round_trip(
    layers: list[torch.Tensor], others: list[torch.Tensor], fmt: PageFormat, where: str, page: bytes | None = None
) -> None:
    """A page leaves one cache and enters another; its tokens are the same there, and nothing else has changed."""
    block_tokens = layers[0].shape[2]
    source, target = [3, 1, 5, 2, 6], [2, 6, 1, 4, 3]
    first_token = (2 * fmt.page_tokens) % (2 * block_tokens)
    table_tokens = first_token + fmt.page_tokens
    assert table_tokens <= len(source) * block_tokens
    memory = np.zeros(fmt.nbytes, dtype=np.uint8)
    kv_blocks(layers, fmt, where).save_page(source, first_token, memory)
    assert bytes(memory) == expected_page(layers, fmt, source, first_token)
    for skip in (0, min(block_tokens, fmt.page_tokens) // 2, fmt.page_tokens - 1):
        before = as_bytes(others)
        kv_blocks(others, fmt, where).load_page(whole(fmt), target, first_token, memory, skip)
        after = as_bytes(others)
        for token in range(first_token + skip, table_tokens):
            place = token // block_tokens, token % block_tokens
            before[:, target[place[0]], :, place[1]] = as_bytes(layers)[:, source[place[0]], :, place[1]]
        assert np.array_equal(after, before)


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLHNC", "BHLNC", "BLNHC"])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize(("block_tokens", "page_tokens"), [(16, 16), (16, 64), (48, 32), (128, 16), (32, 64)])
def test_k_beside_v_in_every_layout(where: str, order: str, itemsize: int, block_tokens: int, page_tokens: int) -> None:
    fmt = PageFormat(NUM_LAYERS, page_tokens, 2, 8, 4, itemsize)
    layers = tensors(2, block_tokens, 12, DTYPES[itemsize], order)
    others = tensors(2, block_tokens, 12, DTYPES[itemsize], "LBNHC" if order == "LBHNC" else "LBHNC", seed=1)
    check_round_trip(layers, others, fmt, where)


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_mla_is_one_head_without_v(where: str, itemsize: int, block_tokens: int) -> None:
    fmt = PageFormat(NUM_LAYERS, 32, 1, 36, 0, itemsize)
    layers = tensors(1, block_tokens, 36, DTYPES[itemsize], "LBHNC")
    check_round_trip(layers, tensors(1, block_tokens, 36, DTYPES[itemsize], "BLHNC", seed=1), fmt, where)


def test_what_is_loaded_is_waited_for_on_the_device_of_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be the current one of the thread that loads."""
    waited: list[torch.device] = []

    @contextmanager
    def own_stream(device: torch.device) -> Iterator[None]:
        yield
        waited.append(device)

    monkeypatch.setattr(vllm_plugin.blocks, "own_stream", own_stream)
    fmt = PageFormat(NUM_LAYERS, 16, 2, 8, 4, 2)
    layers = tensors(2, 16, 12, DTYPES[2], "LBHNC")
    kv_blocks(layers, fmt, "device").load_page(whole(fmt), [1], 0, np.zeros(fmt.nbytes, dtype=np.uint8), 0)
    assert waited == [layers[0].device]


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLHNC"])
@pytest.mark.parametrize("v_dim", [0, 4])
def test_parts_of_other_shards_fill_the_layers_and_heads_that_they_share(where: str, order: str, v_dim: int) -> None:
    """The whole model has five layers and four heads, this worker three and two; each part brings what both have."""
    shard, block_tokens, table, first_token, skip = Shard(1, 4, 1, 3), 16, [3, 1, 5, 2], 24, 4
    parts = [Shard(0, 2, 0, 4), Shard(2, 5, 0, 2), Shard(2, 3, 2, 3), Shard(3, 5, 2, 4)]
    model = PageFormat(5, 32, 4, 8, v_dim, 2)
    fmt = replace(model, num_layers=3, num_heads=2)
    elements = np.random.default_rng(0).integers(0, 256, (5, 32, 4, (8 + v_dim) * 2), dtype=np.uint8)
    layers = tensors(2, block_tokens, 8 + v_dim, torch.bfloat16, order)
    expected = as_bytes(layers)
    blocks = kv_blocks(layers, fmt, where, shard=shard)
    for part in parts:
        held = elements[part.layer_start : part.layer_stop, :, part.head_start : part.head_stop]
        page = np.concatenate([held[..., :16].ravel(), held[..., 16:].ravel()])
        blocks.load_page(part, table, first_token, page, skip)
        for layer in range(max(part.layer_start, 1), min(part.layer_stop, 4)):
            for head in range(max(part.head_start, 1), min(part.head_stop, 3)):
                for token in range(skip, 32):
                    block, place = divmod(first_token + token, block_tokens)
                    expected[layer - 1, table[block], head - 1, place] = elements[layer, token, head]
        assert np.array_equal(as_bytes(layers), expected)


class Moved(TorchDispatchMode):
    """Notes how blocks are copied: in how many dimensions, and of what size the elements are."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_select.default:
            self.found.append((args[0].dim(), args[0].itemsize))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "content, ahead, of_rows, of_others", [(512, 0, 8, 8), (656, 8, 8, 8), (656, 4, 1, 1), (33, 0, 8, 1), (2, 0, 8, 1)]
)
@pytest.mark.parametrize("order, dims", [("LBHNC", 2), ("LBNHC", 2), ("BLNHC", 2), ("BHLNC", 4), ("LHBNC", 4)])
def test_blocks_are_copied_in_rows_where_they_lie_in_one_piece_and_in_words_of_eight(
    order: str, dims: int, content: int, ahead: int, of_rows: int, of_others: int
) -> None:
    (layer, *_) = tensors(3, 16, content, torch.uint8, order)
    larger = torch.zeros(layer.untyped_storage().nbytes() + ahead, dtype=torch.uint8)
    memory = larger.as_strided(layer.shape, layer.stride(), ahead).copy_(layer)
    index = torch.tensor([5, 0, 3])
    with Moved() as moved:
        copy = selected(memory, index)
    assert moved.found == [(dims, of_rows if dims == 2 else of_others)]
    assert torch.equal(copy, layer[index])
    assert dims == 4 or copy.stride()[1:] == layer.stride()[1:]


def test_kernel_blocks_are_put_together_again() -> None:
    """FlashInfer and others split a block of the engine into several of their own."""
    (layer, *_) = tensors(2, 64, 12, torch.bfloat16, "LBNHC")
    split = torch.as_strided(
        layer, (NUM_BLOCKS * 4, 2, 16, 12), (layer.stride(0) // 4, *layer.stride()[1:]), layer.storage_offset()
    )
    assert torch.equal(split[5, :, 3].view(torch.uint8), layer[1, :, 19].view(torch.uint8))
    again = regroup_kernel_blocks(split, NUM_BLOCKS, 64)
    assert torch.equal(again.view(torch.uint8), layer.view(torch.uint8))
    assert again.data_ptr() == layer.data_ptr()


def test_kernel_blocks_whose_tokens_are_not_equally_spaced_are_refused() -> None:
    """Head before token inside a kernel block: token 16 is not one stride after token 15."""
    split = torch.zeros(NUM_BLOCKS * 4, 2, 16, 12, dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match="equally spaced"):
        regroup_kernel_blocks(split, NUM_BLOCKS, 64)
    with pytest.raises(Unsupported):
        regroup_kernel_blocks(split[:-1], NUM_BLOCKS, 64)


def test_layers_that_share_the_kv_of_others_are_left_out_and_the_order_is_the_models() -> None:
    caches = {f"model.layers.{i}.attn": torch.full((2, 1, 16, 4), float(i)) for i in (10, 9, 2, 11)}
    names = ("model.layers.2.attn", "model.layers.9.attn", "model.layers.10.attn")
    assert [float(layer[0, 0, 0, 0]) for layer in register_tensors(caches, names, 2, 16)] == [2.0, 9.0, 10.0]
    with pytest.raises(Unsupported, match=r"model\.layers\.3\.attn"):
        register_tensors(caches, ("model.layers.3.attn",), 2, 16)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(4, 3, 16, 12, dtype=torch.bfloat16),
        torch.zeros(4, 2, 16, 16, dtype=torch.bfloat16),
        torch.zeros(4, 2, 16, 12, dtype=torch.float32),
        torch.zeros(4, 2, 12, 16, dtype=torch.bfloat16).transpose(2, 3),
        torch.zeros(2, 4, 2, 16, 12, dtype=torch.bfloat16),
    ],
    ids=["heads", "content", "dtype", "content is not contiguous", "K and V apart"],
)
def test_tensors_of_another_geometry_are_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(Unsupported, match="KV tensor"):
        KVBlocks([wrong], Shard(0, 1, 0, 2), PageFormat(1, 16, 2, 8, 4, 2), None)


# The CPU's packing


def cpu_write(isa: str, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, dtype: str = "auto") -> None:
    """What vLLM's CPU attention does after each forward pass; `cache` is `[block, head, token, content]`."""
    num_blocks, heads, block_tokens, _ = cache.shape
    view = cache.view(torch.uint8) if dtype != "auto" else cache
    halves = view.view(num_blocks, heads, 2 * block_tokens, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        key, value, *halves, torch.arange(len(key), dtype=torch.int64), isa, kv_cache_dtype=dtype
    )


def numbers(num_tokens: int, heads: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small integers: exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (num_tokens, heads, dim), generator=generator).to(dtype)


def check_packing(
    isa: str, fmt: PageFormat, block_tokens: int, order: Any, cache_dtype: torch.dtype, name: str
) -> None:
    """Pages read from a cache that the engine wrote hold K and V plainly, and make the same cache when unpacked."""
    compute = torch.bfloat16 if name != "auto" else cache_dtype
    num_tokens, dim = 4 * block_tokens, fmt.k_dim
    written = [torch.zeros(4, fmt.num_heads, block_tokens, 2 * dim, dtype=cache_dtype) for _ in range(fmt.num_layers)]
    keys = [numbers(num_tokens, fmt.num_heads, dim, compute, 2 * layer) for layer in range(fmt.num_layers)]
    values = [numbers(num_tokens, fmt.num_heads, dim, compute, 2 * layer + 1) for layer in range(fmt.num_layers)]
    for cache, key, value in zip(written, keys, values, strict=True):
        cpu_write(isa, key, value, cache, name)
    loaded = [torch.zeros_like(cache) for cache in written]
    for first in range(0, num_tokens, fmt.page_tokens):
        page = np.zeros(fmt.nbytes, dtype=np.uint8)
        KVBlocks(written, whole(fmt), fmt, order).save_page(range(4), first, page)
        plain = [part[first : first + fmt.page_tokens].to(cache_dtype) for part in (*keys, *values)]
        assert bytes(page) == b"".join(bytes(part.contiguous().view(torch.uint8).numpy()) for part in plain)
        KVBlocks(loaded, whole(fmt), fmt, order).load_page(whole(fmt), range(4), first, page, 0)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(written, loaded, strict=True))


@pytest.mark.parametrize(
    ("isa", "dtype", "head_size", "block_tokens"),
    [
        ("vec", torch.bfloat16, 64, 128),
        ("vec", torch.bfloat16, 128, 32),
        ("vec", torch.float16, 64, 32),
        ("vec", torch.float32, 96, 64),
        ("vec16", torch.bfloat16, 80, 128),
        ("vec16", torch.bfloat16, 64, 16),
        ("vec16", torch.float16, 80, 48),
        ("vec16", torch.float32, 112, 16),
        ("amx", torch.bfloat16, 64, 128),
        ("amx", torch.bfloat16, 128, 32),
        ("amx", torch.bfloat16, 256, 64),
    ],
)
def test_every_packing_of_the_cpu_backend_is_measured(
    isa: str, dtype: torch.dtype, head_size: int, block_tokens: int
) -> None:
    """Trap 11: "CPU KV pages are opaque". Cure: the packing is a permutation, and it is measured with the engine's own
    operation; the pages then hold K and V in plain order, whatever instruction set wrote them."""
    fmts = [PageFormat(2, page_tokens, 2, head_size, head_size, dtype.itemsize) for page_tokens in (16, 64)]
    try:
        order = probe_order(lambda *args: cpu_write(isa, *args), fmts[0], block_tokens, dtype, dtype)
    except RuntimeError as error:
        if isa != "amx" or "Unsupported CPU attention configuration" not in str(error):
            raise
        pytest.skip(f"NOT TESTED: vLLM's build for this processor has no such packing: {error}")
    for fmt in fmts:
        check_packing(isa, fmt, block_tokens, order, dtype, "auto")


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_the_packing_of_this_machine_is_the_one_that_its_engine_uses(cache_dtype: str) -> None:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    try:
        isa = _get_attn_isa(torch.bfloat16, 128, 64, cache_dtype)
    except NotImplementedError as error:
        pytest.skip(str(error))
    stored = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(cache_dtype, torch.bfloat16)
    fmt = PageFormat(2, 64, 2, 64, 64, stored.itemsize)
    name = str(stored).removeprefix("torch.") if cache_dtype == "auto" else cache_dtype
    order = probe_cpu_order(fmt, 128, name, torch.bfloat16, cache_dtype)
    check_packing(isa, fmt, 128, order, stored, cache_dtype)


FMT = PageFormat(1, 16, 2, 8, 8, 4)
SHUFFLED = random.Random(0).sample(range(16 * 16), 16 * 16)


def probe(spoil: Callable[[torch.Tensor], object]) -> Any:
    """What the probe makes of an engine that writes K beside V and spoils that afterwards."""

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        cache[0, :, :, :8], cache[0, :, :, 8:] = key.transpose(0, 1), value.transpose(0, 1)
        spoil(cache)

    return probe_order(write, FMT, 16, torch.float32, torch.float32)


def test_plain_order_is_understood_by_the_probe() -> None:
    """Control of the refusals below."""
    k, v = probe(lambda cache: None)
    assert (k.offset, v.offset) == (0, 32)
    assert (k.token, k.dim) == (((16, 64),), ((8, 4),))


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda cache: cache[0, :, 3, 5].zero_(), id="an element is lost"),
        pytest.param(lambda cache: cache[0, :, 3, 5].copy_(cache[0, :, 3, 4]), id="an element is there twice"),
        pytest.param(lambda cache: cache[0, :, :, :8].mul_(2), id="values are changed"),
        pytest.param(lambda cache: cache.view(2, -1).copy_(cache.view(2, -1)[:, SHUFFLED]), id="no nested strides"),
        pytest.param(lambda cache: cache[0, 1].copy_(cache[0, 1].flip(0)), id="heads are packed differently"),
    ],
)
def test_an_order_that_is_no_plain_permutation_is_refused(spoil: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(Unsupported):
        probe(spoil)
