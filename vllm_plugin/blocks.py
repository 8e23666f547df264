"""The engine's KV tensors as a `BlockLayout`, and pages moved between them and canonical memory.

vLLM hands one logical tensor `[block, head, token, content]` a layer, whatever the physical order (LBNHC, LBHNC and
the other permutations are strides). On accelerators content is K beside V for each token; MLA has one vector. The CPU
backend keeps, for each block and head, K of all tokens and then V of all tokens, each in an order that depends on the
instruction set: that order is measured (:func:`probe_cpu_order`), never assumed.

Memory on a device is reached through a staging copy of the blocks in host memory, page by page. That is for devices
that do not move pages by themselves (:mod:`vllm_plugin.device`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import BlockLayout, PageFormat, Part, SegmentLayout, factor_block, fit, pack, unpack
from vllm_plugin.unsupported import Unsupported

BlockOrder = tuple[SegmentLayout, SegmentLayout | None]
CacheOp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes (key, value) `[token, head, dim]` into block 0 of a cache `[1, head, token, content]` like the engine does."""


class KVBlocks:
    """The KV blocks of this worker.

    Args:
        tensors: this rank's layers in canonical order, each `[block, head, token, content]`.
        shard: the layers and heads that they are.
        fmt: geometry of the pages of this rank.
        order: measured order inside a block and head, or None for K beside V.

    Raises:
        Unsupported: the tensors do not have the geometry that the configuration announced.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], shard: Shard, fmt: PageFormat, order: BlockOrder | None
    ) -> None:
        first = tensors[0]
        self._fmt = fmt
        self._tensors = [_as_bytes_view(tensor, fmt) for tensor in tensors]
        self._order = order
        for tensor in self._tensors:
            _check_tensor(tensor, self._tensors[0], fmt)
        self.block_nbytes = sum(tensor[0].numel() for tensor in self._tensors)
        self.block_tokens = int(first.shape[2])
        self._on_device = first.device.type != "cpu"
        self.layout = self._layout_of(self._tensors)
        """Where their bytes lie; on a device these are its addresses."""
        self._shard = shard

    def save_page(self, block_ids: Sequence[int], first_token: int, page: npt.NDArray[np.uint8]) -> None:
        """Pack tokens `[first_token, first_token + page_tokens)` of a block table into a canonical page."""
        if not self._on_device:
            pack(self._fmt, self.layout, block_ids, first_token, page)
            return
        first_token, touched = self._touched(block_ids, first_token)
        with own_stream(self._tensors[0].device):
            staged = self._stage(self._tensors, touched)
        pack(self._fmt, self._layout_of(staged), range(len(touched)), first_token, page)

    def copy(self, block_ids: Sequence[int]) -> BlockCopies:
        """Copy whole blocks beside the KV cache; on a device in the order of what the calling thread queues there."""
        index = index_of(block_ids, self._tensors[0].device)
        return BlockCopies(self, block_ids, [selected(tensor, index) for tensor in self._tensors])

    def load_page(
        self, part: Shard, block_ids: Sequence[int], first_token: int, page: npt.NDArray[np.uint8], skip_tokens: int
    ) -> None:
        """Unpack a canonical page of `part` into a block table, except its first `skip_tokens` tokens.

        Of a part that has other layers or heads beside this worker's those are left out; of one that has not all of
        them, the others in the blocks stay as they are.
        """
        fmt, common = fit(self._fmt, self._shard, part)
        if not self._on_device:
            unpack(fmt, self.layout, block_ids, first_token, page, skip_tokens, common)
            return
        tensors = self._tensors[common.blocks.layer_start : common.blocks.layer_stop]
        first_token, touched = self._touched(block_ids, first_token)
        with own_stream(self._tensors[0].device):
            staged = self._stage(tensors, touched)  # blocks that the page covers in part keep their other tokens
            heads = common.blocks.head_start, common.blocks.head_stop
            common = Part(common.page, Shard(0, len(staged), *heads))
            unpack(fmt, self._layout_of(staged), range(len(touched)), first_token, page, skip_tokens, common)
            skipped = (first_token + skip_tokens) // self.block_tokens
            index = torch.tensor(list(touched[skipped:]), device=self._tensors[0].device)
            for tensor, host in zip(tensors, staged, strict=True):
                tensor.index_copy_(0, index, host[skipped:].to(tensor.device))

    def _touched(self, block_ids: Sequence[int], first_token: int) -> tuple[int, Sequence[int]]:
        start = first_token // self.block_tokens
        stop = -(-(first_token + self._fmt.page_tokens) // self.block_tokens)
        return first_token - start * self.block_tokens, block_ids[start:stop]

    def _stage(self, tensors: Sequence[torch.Tensor], block_ids: Sequence[int]) -> list[torch.Tensor]:
        """Host copies of some blocks of some layers, with the strides of the originals inside a block."""
        index = torch.tensor(list(block_ids), device=self._tensors[0].device)
        return [selected(tensor, index).cpu() for tensor in tensors]

    def _layout_of(self, tensors: Sequence[torch.Tensor]) -> BlockLayout:
        first = tensors[0]
        order = self._order or beside_order(self._fmt, int(first.shape[2]), first.stride(2))
        return BlockLayout(
            layer_addresses=tuple(tensor.data_ptr() for tensor in tensors),
            num_blocks=int(first.shape[0]),
            block_tokens=int(first.shape[2]),
            block_stride=first.stride(0),
            head_stride=first.stride(1),
            k=order[0],
            v=order[1],
        )


class BlockCopies:
    """Copies of some blocks, that is what they held when :meth:`KVBlocks.copy` was called."""

    def __init__(self, blocks: KVBlocks, block_ids: Sequence[int], tensors: list[torch.Tensor]) -> None:
        self._blocks, self._tensors = blocks, tensors
        self.nbytes = sum(tensor.numel() for tensor in tensors)
        self._row = {block_id: row for row, block_id in enumerate(block_ids)}

    def found(self, block_ids: Sequence[int], first_token: int) -> tuple[BlockLayout, Sequence[int], int]:
        """Where a page is: the layout of the copies, its block table there, and its first token by that table."""
        first_token, touched = self._blocks._touched(block_ids, first_token)
        return self.layout, [self._row[block_id] for block_id in touched], first_token

    @property
    def layout(self) -> BlockLayout:
        return self._blocks._layout_of(self._tensors)

    def save_page(self, block_ids: Sequence[int], first_token: int, page: npt.NDArray[np.uint8]) -> None:
        """As :meth:`KVBlocks.save_page`, which would find other KV in these blocks by now."""
        blocks = self._blocks
        _, rows, first_token = self.found(block_ids, first_token)
        staged = self._tensors
        if blocks._on_device:
            with own_stream(staged[0].device):
                staged, rows = blocks._stage(staged, rows), range(len(rows))
        pack(blocks._fmt, blocks._layout_of(staged), rows, first_token, page)


def selected(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A copy of some blocks of bytes, with the strides of the originals inside a block where that is in one piece.

    Torch has a device copy rows of such pieces 16 bytes at a time; anything else goes element by element, so elements
    are words of 8 bytes where they can be.
    """
    order = sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)
    as_it_lies = tensor.permute(0, *order)
    if not as_it_lies[0].is_contiguous():
        return _words(tensor).index_select(0, index).view(torch.uint8)
    rows = _words(as_it_lies.view(tensor.shape[0], -1)).index_select(0, index).view(torch.uint8)
    back = [1 + order.index(axis) for axis in range(1, tensor.dim())]
    return rows.view(len(index), *as_it_lies.shape[1:]).permute(0, *back)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    word = torch.int64
    numbers = tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1]
    return tensor if any(number % word.itemsize for number in numbers) else tensor.view(word)


def index_of(block_ids: Sequence[int], device: torch.device) -> torch.Tensor:
    """For `selected`, without waiting for what is queued on the device."""
    return torch.tensor(list(block_ids), pin_memory=device.type == "cuda").to(device, non_blocking=True)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """What this thread queues goes to a stream of its own, and is over at the end; no other stream is waited for."""
    if device.type == "cpu":
        yield
        return
    stream = torch.Stream(device)
    try:
        with stream:
            yield
    finally:
        stream.synchronize()


def beside_order(fmt: PageFormat, block_tokens: int, token_stride: int) -> BlockOrder:
    """K beside V for each token, or MLA's one vector; `token_stride` in bytes."""
    token = ((block_tokens, token_stride),)
    k = SegmentLayout(0, token, ((fmt.k_dim, fmt.itemsize),))
    if fmt.v_dim == 0:
        return k, None
    return k, SegmentLayout(fmt.k_dim * fmt.itemsize, token, ((fmt.v_dim, fmt.itemsize),))


def _as_bytes_view(tensor: torch.Tensor, fmt: PageFormat) -> torch.Tensor:
    """The tensor with bytes as elements, so that strides are bytes."""
    if tensor.dim() != 4 or tensor.stride(3) != 1:
        raise Unsupported(
            f"a KV tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}; expected dense [B, H, N, C]"
        )
    return tensor.view(torch.uint8)


def _check_tensor(tensor: torch.Tensor, first: torch.Tensor, fmt: PageFormat) -> None:
    content = (fmt.k_dim + fmt.v_dim) * fmt.itemsize
    if tensor.shape[1] != fmt.num_heads or tensor.shape[3] != content:
        raise Unsupported(
            f"a KV tensor with {tensor.shape[1]} heads of {tensor.shape[3]} bytes a token; the configuration says "
            f"{fmt.num_heads} heads of {content} bytes"
        )
    if tensor.stride() != first.stride() or tensor.shape != first.shape or tensor.device != first.device:
        raise Unsupported(
            f"KV tensors differ: {tuple(tensor.shape)} {tensor.stride()} and {tuple(first.shape)} {first.stride()}"
        )


def regroup_kernel_blocks(tensor: torch.Tensor, num_blocks: int, block_tokens: int) -> torch.Tensor:
    """Undo the split of engine blocks into kernel blocks: `[B * r, H, N / r, C]` becomes `[B, H, N, C]`.

    Raises:
        Unsupported: the kernel blocks of an engine block do not follow each other at a token's stride.
    """
    if tensor.shape[0] == num_blocks:
        return tensor
    ratio, rest = divmod(tensor.shape[0], num_blocks)
    kernel_tokens = tensor.shape[2]
    if rest or ratio * kernel_tokens != block_tokens or tensor.stride(0) != kernel_tokens * tensor.stride(2):
        raise Unsupported(
            f"{tensor.shape[0]} kernel blocks of {kernel_tokens} tokens for {num_blocks} blocks of {block_tokens}: "
            "tokens of a block are not equally spaced"
        )
    shape = (num_blocks, tensor.shape[1], block_tokens, tensor.shape[3])
    return tensor.as_strided(shape, (ratio * tensor.stride(0), *tensor.stride()[1:]))


def probe_order(
    write: CacheOp, fmt: PageFormat, block_tokens: int, cache_dtype: torch.dtype, compute_dtype: torch.dtype
) -> BlockOrder:
    """Measure where the engine's own write operation puts each element of K and V inside a block and head.

    Every element is written with the base-4 digits of its index, one digit a pass: 0 to 3 are exact in every dtype,
    fp8 included. K is probed with V zero and the other way round.

    Raises:
        Unsupported: elements are not just permuted, or in an order that is not nested strides.
    """
    segments = []
    for is_value, dim in ((False, fmt.k_dim), (True, fmt.v_dim)):
        count = block_tokens * dim
        found = np.zeros(block_tokens * (fmt.k_dim + fmt.v_dim), dtype=np.int64)
        other = torch.zeros(block_tokens, fmt.num_heads, fmt.v_dim if not is_value else fmt.k_dim, dtype=compute_dtype)
        index = np.arange(1, count + 1)  # 0 marks what was not written
        for digit in range(1 + int(np.log2(count + 1)) // 2):
            digits = (index >> (2 * digit)) & 3
            data = torch.from_numpy(digits.reshape(block_tokens, 1, dim).astype(np.float32)).to(compute_dtype)
            data = data.expand(block_tokens, fmt.num_heads, dim).contiguous()
            cache = torch.zeros(1, fmt.num_heads, block_tokens, fmt.k_dim + fmt.v_dim, dtype=cache_dtype)
            write(*((other, data) if is_value else (data, other)), cache)
            heads = cache.float().numpy().reshape(fmt.num_heads, -1).astype(np.int64)
            if not (heads == heads[0]).all():
                raise Unsupported("the CPU backend packs heads differently from each other")
            found += heads[0] << (2 * digit)
        segments.append(_segment(found, block_tokens, dim, fmt.itemsize))
    return segments[0], segments[1]


def _segment(found: npt.NDArray[np.int64], block_tokens: int, dim: int, itemsize: int) -> SegmentLayout:
    count = block_tokens * dim
    written = np.flatnonzero(found)
    if len(written) != count or not np.array_equal(np.sort(found[written]), np.arange(1, count + 1)):
        raise Unsupported("the CPU backend's packing of KV blocks is not a permutation; its pages cannot be shared")
    positions = np.empty(count, dtype=np.int64)
    positions[found[written] - 1] = written
    factored = factor_block(positions.reshape(block_tokens, dim))
    if factored is None:
        raise Unsupported("the CPU backend's packing of KV blocks is not nested strides; its pages cannot be shared")
    offset, token, dims = factored
    return SegmentLayout(
        offset * itemsize,
        tuple((size, stride * itemsize) for size, stride in token),
        tuple((size, stride * itemsize) for size, stride in dims),
    )


def probe_cpu_order(
    fmt: PageFormat, block_tokens: int, kv_dtype: str, compute_dtype: torch.dtype, cache_dtype: str
) -> BlockOrder:
    """The order that vLLM's CPU attention uses on this machine's instruction set.

    Raises:
        Unsupported: see :func:`probe_order`.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(compute_dtype, block_tokens, fmt.k_dim, cache_dtype)
    slots = torch.arange(block_tokens, dtype=torch.int64)
    stored = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(kv_dtype)

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        view = cache if stored is None else cache.view(torch.uint8)
        halves = view.view(1, fmt.num_heads, 2 * block_tokens, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa, kv_cache_dtype=cache_dtype)

    return probe_order(write, fmt, block_tokens, stored or compute_dtype, compute_dtype)


def register_tensors(
    kv_caches: Mapping[str, torch.Tensor], layer_names: Sequence[str], num_blocks: int, block_tokens: int
) -> list[torch.Tensor]:
    """This rank's KV tensors in canonical layer order; layers that share another's KV are left out.

    Raises:
        Unsupported: a layer of the configuration has no tensor.
    """
    missing = [name for name in layer_names if name not in kv_caches]
    if missing:
        raise Unsupported(f"the engine registered no KV tensor for layer {missing[0]}")
    return [regroup_kernel_blocks(kv_caches[name], num_blocks, block_tokens) for name in layer_names]
