"""The kernel between pages and KV blocks, on a device: what it moves is what torch's own indexing gives."""

from dataclasses import replace

import numpy as np
import pytest
from gpu.device import DEVICE, require, where

from mooncake_connector.kv.page import BlockLayout, PageFormat, SegmentLayout
from vllm_plugin.device.permutation import Permutation, columns, runs

require()
torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

NUM_BLOCKS, NUM_LAYERS, PAGE_TOKENS = 24, 3, 64
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
FORMATS = [
    PageFormat(NUM_LAYERS, PAGE_TOKENS, 8, 128, 128, 2),
    PageFormat(NUM_LAYERS, PAGE_TOKENS, 3, 64, 32, 1),
    PageFormat(NUM_LAYERS, PAGE_TOKENS, 2, 33, 33, 2),
    PageFormat(NUM_LAYERS, PAGE_TOKENS, 1, 576, 0, 2),
]


def blocks(fmt, block_tokens, order):
    """All blocks as `[L, B, H, N, C]` of bytes, in an order of memory, and where they lie."""
    content = (fmt.k_dim + fmt.v_dim) * fmt.itemsize
    sizes = {"L": NUM_LAYERS, "B": NUM_BLOCKS, "H": fmt.num_heads, "N": block_tokens, "C": content}
    memory = torch.randint(0, 256, [sizes[axis] for axis in order], dtype=torch.uint8, device=where())
    logical = memory.permute([order.index(axis) for axis in "LBHNC"])
    layer, block, head, token, _ = logical.stride()
    k_nbytes = fmt.k_dim * fmt.itemsize
    axis = ((block_tokens, token),)
    return logical, BlockLayout(
        layer_addresses=tuple(logical.data_ptr() + index * layer for index in range(NUM_LAYERS)),
        num_blocks=NUM_BLOCKS,
        block_tokens=block_tokens,
        block_stride=block,
        head_stride=head,
        k=SegmentLayout(0, axis, ((fmt.k_dim, fmt.itemsize),)),
        v=SegmentLayout(k_nbytes, axis, ((fmt.v_dim, fmt.itemsize),)) if fmt.v_dim else None,
    )


def tokens_of(logical, table, first, count):
    """`[L, token, H, C]` of tokens of a block table."""
    block_tokens = logical.shape[3]
    at = torch.arange(first, first + count, device=logical.device)
    block_ids = torch.tensor(table, device=logical.device)[at // block_tokens]
    return logical.permute(1, 3, 0, 2, 4)[block_ids, at % block_tokens].permute(1, 0, 2, 3)


def locked(array):
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory()


@pytest.mark.parametrize("block_tokens", [16, 64, 128])
@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_pages_leave_one_cache_and_enter_another(fmt, order, block_tokens):
    from vllm_plugin.device import kernel

    torch.cuda.set_device(DEVICE)
    stream = torch.cuda.Stream(priority=0)
    source, layout = blocks(fmt, block_tokens, order)
    target, other = blocks(fmt, 2 * block_tokens, LAYOUTS[::-1][LAYOUTS.index(order)])
    slot = -(-fmt.nbytes // 4096) * 4096
    slab = torch.zeros(2 * slot, dtype=torch.uint8, device=source.device)
    first, skip = 8, 5
    table = np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()
    expected = target.clone()
    pages = [(table[:12], first), (table[12:], first)]

    def carry_out(where, skipped, into):
        permutation = Permutation.of(fmt, where)
        found = [runs(fmt, where, ids, start, skipped) for ids, start in pages]
        batch = locked(columns(found, [slab.data_ptr(), slab.data_ptr() + slot]))
        layers = locked(np.array(permutation.layer_addresses, dtype=np.int64))
        start = kernel.prepare(permutation, into_blocks=into)
        start(batch.data_ptr(), batch.shape[1], layers.data_ptr(), stream.cuda_stream)
        stream.synchronize()

    torch.cuda.synchronize()
    before = source.clone()
    carry_out(layout, 0, False)
    assert torch.equal(source, before)
    k_nbytes = fmt.k_dim * fmt.itemsize
    for number, (ids, start) in enumerate(pages):
        tokens = tokens_of(source, ids, start, PAGE_TOKENS)
        canonical = torch.cat([tokens[..., :k_nbytes].flatten(), tokens[..., k_nbytes:].flatten()])
        assert torch.equal(slab[number * slot : number * slot + fmt.nbytes], canonical)
        for token in range(skip, PAGE_TOKENS):
            block, place = ids[(start + token) // target.shape[3]], (start + token) % target.shape[3]
            expected[:, block, :, place] = tokens[:, token]
    carry_out(other, skip, True)
    assert torch.equal(target, expected)


def test_an_address_that_is_a_multiple_of_8_alone_is_no_error():
    from vllm_plugin.device import kernel

    torch.cuda.set_device(DEVICE)
    fmt = PageFormat(1, 16, 2, 64, 64, 2)
    memory = torch.zeros(1 << 16, dtype=torch.uint8, device=where())
    page = torch.randint(0, 256, (fmt.nbytes,), dtype=torch.uint8, device=memory.device)
    _, layout = blocks(replace(fmt, num_layers=NUM_LAYERS), 16, "LBNHC")
    layout = replace(layout, layer_addresses=(memory.data_ptr() + 8,), num_blocks=1)
    permutation = Permutation.of(fmt, layout)
    assert permutation.width == 8
    batch = locked(columns([runs(fmt, layout, [0], 0, 0)], [page.data_ptr()]))
    layers = locked(np.array(permutation.layer_addresses, dtype=np.int64))
    start = kernel.prepare(permutation, into_blocks=True)
    torch.cuda.synchronize()
    start(batch.data_ptr(), batch.shape[1], layers.data_ptr(), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    tokens = page.view(2, 16, 2, 128).permute(1, 2, 0, 3).reshape(-1)  # [K or V, token, head] as [token, head, K or V]
    assert torch.equal(memory[8 : 8 + fmt.nbytes], tokens)
    assert not memory[:8].any() and not memory[8 + fmt.nbytes :].any()
