"""The digest of weights: which elements it tells apart, and that TP ranks together say what one rank does."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_plugin.weights import digest
from vllm_plugin.weights.digest import Piece, Sums, Unreadable, sums_of
from vllm_plugin.weights.layout import Layout

HIDDEN, HEAD, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 512, 64, 8, 2, 1024, 1000


def read(pieces: Iterable[Piece]) -> Sums:
    return sums_of(pieces, time.monotonic() + 60)


def of(tensor: torch.Tensor, name: str = "x") -> Sums:
    return read([Piece(name, tensor)])


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
def test_any_element_that_changes_or_moves_shows(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    tensor = torch.randint(0, 2, (70, 130)).to(dtype)
    seen = {of(tensor)}
    for row, column in [(0, 0), (69, 129), (35, 64), (1, 0)]:
        other = tensor.clone()
        other[row, column] = 1 - int(other[row, column].float())
        seen.add(of(other))
    swapped = tensor.clone()
    swapped[[0, 1]] = tensor[[1, 0]]
    seen |= {of(swapped), of(tensor, "y"), of(tensor.roll(1, 1))}
    assert len(seen) == 8
    assert of(tensor.clone()) == of(tensor.t().contiguous().t()) == of(tensor)


def test_the_lowest_bit_of_one_element_in_a_large_tensor_shows() -> None:
    tensor = torch.zeros(3_000_001, dtype=torch.bfloat16)
    other = tensor.clone()
    other.view(torch.int16)[2_999_999] = 1
    assert of(tensor) != of(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [HIDDEN, HIDDEN + 3])
def test_parts_add_up_to_the_whole(dtype: torch.dtype, columns: int) -> None:
    tensor = torch.randn(700, columns, dtype=dtype)
    whole = read([Piece("x", tensor, columns=columns)])
    rows = [Piece("x", tensor[at : at + 100], row=at, columns=columns) for at in range(0, 700, 100)]
    split = [Piece("x", part, column=at, columns=columns) for at, part in halves(tensor, columns // 8 * 4)]
    assert whole == read(rows) == read(rows[::-1]) == read(split)
    assert whole != read([Piece("x", tensor[:100], row=600, columns=columns), *rows[1:]])


def halves(tensor: torch.Tensor, at: int) -> list[tuple[int, torch.Tensor]]:
    return [(0, tensor[:, :at]), (at, tensor[:, at:])]


def test_a_device_with_little_room_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(300, HIDDEN)
    whole = read([Piece("x", tensor, columns=HIDDEN)])
    monkeypatch.setattr(digest, "_CPU_CHUNK_NBYTES", 5000)
    assert read([Piece("x", tensor, columns=HIDDEN)]) == whole


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(3, device="meta"), torch.ones(2).to_sparse()])
def test_what_has_no_content_here_cannot_be_read(tensor: torch.Tensor) -> None:
    with pytest.raises(Unreadable):
        of(tensor)


def test_reading_ends_at_its_deadline() -> None:
    with pytest.raises(Unreadable, match="too long"):
        sums_of([Piece("x", torch.ones(3))], time.monotonic() - 1)


# Layers of vLLM, as a rank has them


def layer(kind: type[nn.Module], method: type, **fields: Any) -> Any:
    """Of vLLM's class, without its construction, which needs process groups."""
    made = object.__new__(kind)
    nn.Module.__init__(made)
    made.quant_method = object.__new__(method)
    for name, value in fields.items():
        setattr(made, name, nn.Parameter(value, requires_grad=False) if isinstance(value, torch.Tensor) else value)
    return made


class Rank:
    """One of `size` ranks of a model whose weights are drawn from `seed`."""

    def __init__(self, rank: int, size: int, seed: int = 0, packed: bool = False) -> None:
        torch.manual_seed(seed)
        self._rank, self._size = rank, size
        rows = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
        self._qkv = {name: torch.randn(count, HIDDEN) for name, count in rows.items()}
        self._bias = {name: torch.randn(count) for name, count in rows.items()}
        self._up = [torch.randn(INTERMEDIATE, HIDDEN) for _ in range(2)]
        self._down, self._norm = torch.randn(HIDDEN, INTERMEDIATE), torch.randn(HIDDEN)
        self._vocabulary = torch.randn(VOCAB, HIDDEN)
        self.model = nn.Module()
        self.model.qkv, self.model.up, self.model.down = self._attention(), self._gate_up(), self._row()
        self.model.embed, self.model.norm = self._embedding(), object.__new__(RMSNorm)
        nn.Module.__init__(self.model.norm)
        self.model.norm.weight = nn.Parameter(self._norm)
        if packed:
            for one in (self.model.qkv, self.model.up, self.model.down):
                pack(one)

    def _part(self, whole: torch.Tensor, ranks: int, dim: int = 0) -> torch.Tensor:
        """Of `ranks` parts the one that is this rank's; where there are more ranks than parts, several have one."""
        return whole.chunk(ranks, dim)[self._rank * ranks // self._size]

    def _attention(self) -> Any:
        kv_ranks = min(self._size, KV_HEADS)
        ranks = {"q": self._size, "k": kv_ranks, "v": kv_ranks}
        weight, bias = (
            torch.cat([self._part(whole[name], count) for name, count in ranks.items()])
            for whole in (self._qkv, self._bias)
        )
        return layer(
            QKVParallelLinear, UnquantizedLinearMethod, weight=weight, bias=bias, input_size=HIDDEN,
            tp_rank=self._rank, total_num_heads=HEADS, total_num_kv_heads=KV_HEADS, num_heads=HEADS // self._size,
            num_kv_heads=KV_HEADS // kv_ranks, num_kv_head_replicas=self._size // kv_ranks,
            head_size=HEAD, v_head_size=HEAD,
        )  # fmt: skip

    def _gate_up(self) -> Any:
        return layer(
            MergedColumnParallelLinear, UnquantizedLinearMethod, input_size=HIDDEN, tp_rank=self._rank,
            weight=torch.cat([self._part(whole, self._size) for whole in self._up]),
            output_size=2 * INTERMEDIATE, output_sizes=[INTERMEDIATE] * 2,
            output_partition_sizes=[INTERMEDIATE // self._size] * 2,
        )  # fmt: skip

    def _row(self) -> Any:
        return layer(
            RowParallelLinear, UnquantizedLinearMethod, weight=self._part(self._down, self._size, 1).contiguous(),
            input_size=INTERMEDIATE, input_size_per_partition=INTERMEDIATE // self._size, tp_rank=self._rank,
        )  # fmt: skip

    def _embedding(self) -> Any:
        """Filled up with rows that differ from rank to rank."""
        padded = 1024 // self._size
        first = padded * self._rank
        stop = min(first + padded, VOCAB)
        weight = torch.full((padded, HIDDEN), float(self._rank + self._size))
        weight[: stop - first] = self._vocabulary[first:stop]
        indices = SimpleNamespace(
            num_org_elements=stop - first, org_vocab_start_index=first, num_org_elements_padded=padded,
            num_added_elements=0, added_vocab_start_index=VOCAB,
        )  # fmt: skip
        return layer(VocabParallelEmbedding, UnquantizedEmbeddingMethod, weight=weight, shard_indices=indices)

    def read(self) -> tuple[Sums, bool]:
        layout = Layout(self.model, self._rank)
        return read(layout.pieces()), layout.by_rank


def pack(one: Any) -> None:
    """As vLLM's CPU backend does: the weight is out of sight."""
    weight = one.weight.detach()
    one.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    one.cpu_linear = lambda x, unused, bias: torch.nn.functional.linear(x, weight, bias)
    one.quant_method._gemm_impl = lambda module, x, unused, bias=None: module.cpu_linear(x, unused, bias)


def together(size: int, **settings: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    said = [Rank(rank, size, **settings).read() for rank in range(size)]
    assert not any(by_rank for _, by_rank in said)
    (alike,) = {sums.alike for sums, _ in said}
    first, second = (sum(sums.parts[number] for sums, _ in said) % 2**64 for number in range(2))
    return (first, second), alike


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_together_say_what_one_does(size: int, packed: bool) -> None:
    """With 4 and 8 ranks, 2 and 4 of them have the same KV head. Which rows fill embeddings up is of no account."""
    assert together(size, packed=packed) == together(1)
    assert together(size, seed=1) != together(1)


def parameters() -> Iterator[str]:
    yield from ("qkv.weight", "qkv.bias", "up.weight", "down.weight", "embed.weight", "norm.weight")


@pytest.mark.parametrize("name", parameters())
def test_every_parameter_counts(name: str) -> None:
    rank = Rank(0, 1)
    before = rank.read()
    with torch.no_grad():
        rank.model.get_parameter(name).view(-1)[5] += 1
    assert rank.read() != before


def test_an_adapters_wrapper_changes_no_name() -> None:
    rank = Rank(0, 1)
    before = rank.read()
    rank.model.down, inner = nn.Module(), rank.model.down
    rank.model.down.base_layer = inner
    assert rank.read() == before


def test_what_is_not_known_is_read_as_it_lies_on_its_rank() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)

    first, second = Layout(Other(), 0), Layout(Other(), 1)
    assert read(first.pieces()) != read(second.pieces())
    assert first.by_rank and second.by_rank


def test_a_layer_whose_weight_is_out_of_reach_says_so() -> None:
    rank = Rank(0, 1)
    rank.model.down.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    with pytest.raises(Unreadable, match=r"down\.weight"):
        rank.read()
    assert isinstance(rank.model.down, LinearBase)
