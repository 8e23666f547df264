"""A stack of a model's matmuls and attention, which stands for its prefill and its decode steps.

All layers share one layer's weights: they are larger than a device's cache, so each layer reads them anew.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_plugin.device.bench.models import Matmul, Model


class Stack:
    """Computes nothing that means anything, in the time that the model's layers take.

    Args:
        max_tokens: of a prefill.
    """

    def __init__(self, model: Model, device: torch.device, max_tokens: int) -> None:
        self._model, self._device = model, device
        self._weights = [self._random(m.copies, m.inputs, m.outputs) for m in model.matmuls]
        queries = max_tokens * model.heads * model.head_dim
        self._inputs = self._random(max(queries, *(_size(m, m.inputs, max_tokens) for m in model.matmuls)))
        self._outputs = self._random(max(queries, *(_size(m, m.outputs, max_tokens) for m in model.matmuls)))

    def prefill(self, num_tokens: int) -> None:
        """The whole prompt at once."""
        model = self._model
        q = self._view(self._inputs, (1, model.heads, num_tokens, model.head_dim))
        kv = self._view(self._outputs, (1, model.attention_kv_heads, num_tokens, model.head_dim))
        for _ in range(model.num_layers):
            scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)
            self._matmuls(num_tokens)

    def decode(self, num_requests: int) -> Callable[[], None]:
        """One step's matmuls, of as many tokens; on a GPU as a graph, on the current stream."""

        def step() -> None:
            for _ in range(self._model.num_layers):
                self._matmuls(num_requests)

        if self._device.type != "cuda":
            return step
        step()  # libraries take their memory outside of the graph
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def _matmuls(self, num_tokens: int) -> None:
        for matmul, weights in zip(self._model.matmuls, self._weights, strict=True):
            rows = matmul.rows(num_tokens)
            left = self._view(self._inputs, (matmul.copies, rows, matmul.inputs))
            out = self._view(self._outputs, (matmul.copies, rows, matmul.outputs))
            if matmul.copies == 1:
                torch.mm(left[0], weights[0], out=out[0])
            else:
                torch.bmm(left, weights, out=out)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device)

    @staticmethod
    def _view(memory: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return memory[: torch.Size(shape).numel()].view(shape)


def _size(matmul: Matmul, columns: int, num_tokens: int) -> int:
    return matmul.copies * matmul.rows(num_tokens) * columns
