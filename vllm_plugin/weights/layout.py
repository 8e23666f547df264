"""Where the elements of a rank's parameters are in the whole model, as far as vLLM's layers say so.

Known are its plain linear layers, embeddings and norms: of those a model has one digest, whatever its TP size. All
else (quantised weights, experts, states) is taken as it lies on its rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_plugin.weights.digest import Piece, Unreadable

_NORMS = (RMSNorm, GemmaRMSNorm, LayerNorm, nn.LayerNorm)
_COLUMNS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive rows (or columns) of a rank's part of a parameter, and where they begin in the whole."""

    start: int
    stop: int
    whole: int


class Layout:
    """A rank's part of `model`.

    Args:
        tp_rank: of this rank; names what lies on it as it is.
        by_rank: whether something does, so that other TP sizes cannot agree. Known once all pieces were made.
    """

    def __init__(self, model: nn.Module, tp_rank: int, prefix: str = "") -> None:
        self._model, self._tp_rank, self._prefix = model, tp_rank, prefix
        self.by_rank = False

    def pieces(self) -> Iterator[Piece]:
        """All parameters, and the buffers that a checkpoint has.

        Raises:
            Unreadable: one is not in memory as a tensor, and cannot be had.
        """
        seen: set[int] = set()
        for path, module in self._model.named_modules():
            buffers = [one for one in module._buffers if one not in module._non_persistent_buffers_set]
            for name in (*module._parameters, *buffers):
                tensor = getattr(module, name)
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                full = f"{self._prefix}{path}.{name}".replace(".base_layer.", ".")
                yield from self._of(full, module, name, tensor)

    def _of(self, full: str, module: nn.Module, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        method = type(getattr(module, "quant_method", None))
        if method is UnquantizedLinearMethod and isinstance(module, LinearBase) and name in ("weight", "bias"):
            yield from self._linear(full, module, name, tensor)
        elif method is UnquantizedEmbeddingMethod and type(module) in (VocabParallelEmbedding, ParallelLMHead):
            yield from _rows(full, tensor, _vocabulary(module))
        elif type(module) in _NORMS or tensor.numel() == 1:
            yield Piece(full, tensor, alike=True)
        else:
            yield self._as_it_lies(full, tensor)

    def _as_it_lies(self, full: str, tensor: torch.Tensor) -> Piece:
        self.by_rank = True
        return Piece(f"{full} of rank {self._tp_rank}", tensor)

    def _linear(self, full: str, module: LinearBase, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        kind = type(module)
        if name == "bias":
            if kind in (RowParallelLinear, ReplicatedLinear):
                yield Piece(full, tensor, alike=True)
            elif kind in (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear):
                yield from _rows(full, tensor, _outputs(module))
            else:
                yield self._as_it_lies(full, tensor)
            return
        for column, matrix in _columns(full, module, tensor):
            if kind is RowParallelLinear:
                first = module.tp_rank * module.input_size_per_partition
                yield Piece(full, matrix, column=first + column, columns=module.input_size)
            elif kind is ReplicatedLinear:
                yield Piece(full, matrix, column=column, columns=module.input_size, alike=True)
            elif kind in (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear):
                yield from _rows(full, matrix, _outputs(module), column, module.input_size)
            else:
                yield self._as_it_lies(f"{full} from {column}", matrix)


def _rows(
    full: str, tensor: torch.Tensor, runs: list[_Run], column: int = 0, columns: int | None = None
) -> Iterator[Piece]:
    """Runs of rows of a matrix, or of elements of a vector."""
    matrix = tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
    width = matrix.shape[1] if columns is None else columns
    for run in runs:
        if run.stop > run.start:
            yield Piece(full, matrix[run.start : run.stop], run.whole, column, width)


def _outputs(module: ColumnParallelLinear) -> list[_Run]:
    """Where a rank's rows are in the whole: it has a part of each of the projections that are merged.

    KV heads that several ranks have count on the first of them.
    """
    heads: tuple[int, ...]
    own: tuple[int, ...]
    sizes: tuple[int, ...]
    copies: tuple[int, ...]
    if isinstance(module, QKVParallelLinear):
        heads = (module.total_num_heads, module.total_num_kv_heads, module.total_num_kv_heads)
        own = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
        sizes = (module.head_size, module.head_size, module.v_head_size)
        copies = (1, module.num_kv_head_replicas, module.num_kv_head_replicas)
    else:
        heads = tuple(getattr(module, "output_sizes", (module.output_size,)))
        own = tuple(module.output_partition_sizes)
        sizes = copies = (1,) * len(heads)
    runs, start, whole = [], 0, 0
    for total, mine, size, replicas in zip(heads, own, sizes, copies, strict=True):
        rank, copy = divmod(module.tp_rank, replicas)
        if not copy:
            runs.append(_Run(start, start + mine * size, whole + rank * mine * size))
        start, whole = start + mine * size, whole + total * size
    return runs


def _vocabulary(module: VocabParallelEmbedding) -> list[_Run]:
    """Without the rows that fill each rank's part up."""
    indices = module.shard_indices
    added = indices.num_org_elements_padded
    return [
        _Run(0, indices.num_org_elements, indices.org_vocab_start_index),
        _Run(added, added + indices.num_added_elements, indices.added_vocab_start_index),
    ]


def _columns(full: str, module: LinearBase, weight: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """A weight, or some columns of it at a time, with the number of the first.

    vLLM's CPU backend keeps its weights packed, out of sight. What a layer makes of rows of the identity is the weight,
    exactly: each element is multiplied by one, and zeros are added.
    """
    if weight.numel():
        yield 0, weight
        return
    if not hasattr(module, "cpu_linear"):
        raise Unreadable(f"{full} is not in memory as a tensor")
    size = module.input_size_per_partition if isinstance(module, RowParallelLinear) else module.input_size
    for start in range(0, size, _COLUMNS_AT_ONCE):
        stop = min(start + _COLUMNS_AT_ONCE, size)
        rows = torch.zeros(stop - start, size, dtype=weight.dtype, device=weight.device)
        rows[range(stop - start), range(start, stop)] = 1
        yield start, module.quant_method.apply(module, rows, None).t()
