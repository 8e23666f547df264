"""A model's paged KV cache in device memory, as vLLM lays it out, and two requests in it."""

from __future__ import annotations

import numpy as np
import torch

from mooncake_connector.kv.page import PageFormat
from vllm_plugin.device.bench.models import PAGE_TOKENS, Model

_ORDER = "LBNHC"
"""Layer, block, token, head, content (K beside V): vLLM's choice for FlashAttention and, with its one head, for MLA."""


class Cache:
    """`num_tokens` random tokens in one request's blocks, and as much room, of zeros, in another's; both in any order.

    Args:
        num_tokens: a multiple of a page and of a block.
        tensors: of each layer, `[block, head, token, content]` in bfloat16, as vLLM registers them.
        source, target: the two requests' block tables.
    """

    def __init__(self, model: Model, device: torch.device, num_tokens: int) -> None:
        self.fmt: PageFormat = model.fmt
        self.num_pages = num_tokens // PAGE_TOKENS
        num_blocks = num_tokens // model.block_tokens
        sizes = {
            "L": model.num_layers, "B": 2 * num_blocks, "N": model.block_tokens, "H": model.kv_heads,
            "C": model.k_dim + model.v_dim,
        }  # fmt: skip
        memory = torch.zeros([sizes[axis] for axis in _ORDER], dtype=torch.bfloat16, device=device)
        self.tensors = list(memory.permute([_ORDER.index(axis) for axis in "LBHNC"]).unbind(0))
        order = np.random.default_rng(0).permutation(2 * num_blocks).tolist()
        self.source, self.target = order[:num_blocks], order[num_blocks:]
        index = torch.tensor(self.source, device=device)
        for tensor in self.tensors:
            tensor[index] = torch.randn(num_blocks, *tensor.shape[1:], dtype=torch.bfloat16, device=device)

    def forget(self) -> None:
        """Zero the target's blocks."""
        index = torch.tensor(self.target, device=self.tensors[0].device)
        for tensor in self.tensors:
            tensor[index] = 0

    def equal_nbytes(self) -> int:
        """Compare the target's blocks with the source's; how many bytes are the same in whole blocks of a layer."""
        source, target = (torch.tensor(ids, device=self.tensors[0].device) for ids in (self.source, self.target))
        equal = 0
        for tensor in self.tensors:
            found = (tensor[source].view(torch.int16) == tensor[target].view(torch.int16)).flatten(1).all(1)
            equal += int(found.sum()) * tensor[0].numel() * tensor.itemsize
        return equal

    def page(self, number: int) -> bytes:
        """The canonical page of the source, by indexing alone: `[layer][token][head][dim]` of K, then of V."""
        tokens = torch.arange(number * PAGE_TOKENS, (number + 1) * PAGE_TOKENS)
        block_tokens = self.tensors[0].shape[2]
        blocks, places = torch.tensor(self.source)[tokens // block_tokens], tokens % block_tokens
        device = self.tensors[0].device
        layers = [tensor[blocks.to(device), :, places.to(device)].cpu().view(torch.int16) for tensor in self.tensors]
        parts = [torch.stack([layer[..., dims] for layer in layers]) for dims in self._dims()]
        return b"".join(part.contiguous().numpy().tobytes() for part in parts)

    def _dims(self) -> list[slice]:
        k = slice(0, self.fmt.k_dim)
        return [k, slice(self.fmt.k_dim, None)] if self.fmt.v_dim else [k]
