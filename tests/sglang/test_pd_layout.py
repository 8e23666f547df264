"""What a rank hands over, against SGLang's own pools: the bytes that it means, all of them, and where they go."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import server
from pd_instances import DIM, PAGE, PAGES, kv_args, metadata, mha_pool
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVCache, MambaPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_backend.pd.layout import Place, RankMemory
from transfer.plan.layout import LayoutError
from transfer.plan.pairing import pair_sections, routes
from transfer.transports.memory import Memory

LAYERS, HEADS = 4, 4


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with server("qwen3"):
        yield


def place(rank: int = 0, tp: int = 1, heads: int = HEADS, *, is_mla: bool = False) -> Place:
    return Place(rank, tp, LAYERS, 1 if is_mla else heads, is_mla)


def heads_of(heads: int, tp: int) -> int:
    """KV heads of a rank, by SGLang's rule (`get_num_kv_heads`)."""
    return max(1, heads // tp)


def mla_pool(layers: int = LAYERS) -> MLATokenToKVPool:
    return MLATokenToKVPool(PAGES * PAGE, PAGE, torch.bfloat16, 16, 4, layers, "cpu", False)


def swa_pool(heads: int = HEADS) -> SWAKVPool:
    return SWAKVPool(PAGES * PAGE, PAGES * PAGE, PAGE, torch.bfloat16, heads, DIM, [1, 3], [0, 2], "cpu")


def hybrid_pool(heads: int = HEADS, tp: int = 1) -> HybridLinearKVPool:
    shape = Mamba2StateShape.create(
        tp_world_size=tp, intermediate_size=32, n_groups=4, num_heads=8, head_dim=4, state_size=8, conv_kernel=4
    )
    params = Mamba2CacheParams(shape=shape, layers=[1, 3])
    mamba = MambaPool(size=6, spec_state_size=6, cache_params=params, mamba_layer_ids=[1, 3], device="cpu")
    return HybridLinearKVPool(PAGES * PAGE, torch.bfloat16, PAGE, heads, DIM, [0, 2], "cpu", mamba)


def tensors(pool: KVCache) -> list[torch.Tensor]:
    """What SGLang reads and writes KV in, as `[slot, ...]`; K of all layers, then V."""
    pool = getattr(pool, "full_kv_pool", pool)
    return pool.kv_buffer if isinstance(pool, MLATokenToKVPool) else [*pool.k_buffer, *pool.v_buffer]


def randomise(*of: torch.Tensor) -> None:
    for each in of:
        flat = each.view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))


def state_tensors(pool: KVCache) -> list[torch.Tensor]:
    """Of each component, in SGLang's order, `[item, ...]`."""
    if isinstance(pool, SWAKVPool):
        swa = pool.swa_kv_pool
        return [each.view(-1, swa.page_size, *each.shape[1:]) for each in (*swa.k_buffer, *swa.v_buffer)]
    return [entry[1] for entry in pool.mamba_pool._iter_transfer_state_entries()]


MAKERS = {
    "mha": lambda: mha_pool(layers=LAYERS),
    "mha with another V": lambda: MHATokenToKVPool(
        PAGES * PAGE, PAGE, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False, DIM // 2
    ),
    "mla": mla_pool,
    "swa": swa_pool,
    "hybrid": hybrid_pool,
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("drafted", [False, True])
class TestMemory:
    def make(self, kind: str, drafted: bool) -> tuple[RankMemory, Any]:
        pool, self.aux = MAKERS[kind](), metadata()
        self.kept = pool, mha_pool(layers=1) if drafted else None
        args = kv_args(*(pool, self.aux), draft=self.kept[1])
        return RankMemory(args, place(is_mla=kind == "mla")), args

    def test_regions_hold_every_buffer_and_none_overlaps(self, kind, drafted):
        memory, args = self.make(kind, drafted)
        regions = sorted(memory.regions)
        assert all(start + size <= after for (start, size), (after, _) in pairwise(regions))
        of_state = zip(chain(*args.state_data_ptrs), chain(*args.state_data_lens), strict=True)
        buffers = [*zip(args.kv_data_ptrs, args.kv_data_lens, strict=True), *of_state]
        buffers += zip(args.aux_data_ptrs, args.aux_data_lens, strict=True)
        for at, nbytes in buffers:
            assert any(start <= at and at + nbytes <= start + size for start, size in regions)
        described = [address for section in memory.layout.sections for address in section.blocks.layer_addresses]
        assert sorted(described) == sorted(at for at, _ in buffers)
        registered = Memory()
        for region in regions:
            registered.register(*region)
        for section in memory.layout.sections:  # all of it may be granted; SGLang gives nobody page 0
            registered.grant(*section.ranges(range(1, section.blocks.num_blocks)))

    def test_a_page_is_the_slots_that_sglang_means(self, kind, drafted):
        memory, args = self.make(kind, drafted)
        own = [section for section in memory.layout.sections if section.name in ("k", "v")]
        found = tensors(self.kept[0])
        randomise(*found)
        addresses = [address for section in own for address in section.blocks.layer_addresses]
        assert len(addresses) == len(found) == len(args.kv_data_ptrs) - args.num_draft_entries
        for address, tensor in zip(addresses, found, strict=True):
            (section,) = [section for section in own if address in section.blocks.layer_addresses]
            for page in (0, 5, PAGES - 1):
                expected = tensor[page * PAGE : (page + 1) * PAGE].contiguous().view(torch.uint8).numpy().tobytes()
                at = address + page * section.blocks.block_stride
                assert ctypes.string_at(at, len(expected)) == expected

    def test_aux_rows_are_those_of_sglangs_buffers(self, kind, drafted):
        memory, args = self.make(kind, drafted)
        sections = [section for section in memory.layout.sections if section.name.startswith("aux")]
        rows = {address for section in sections for address in section.blocks.layer_addresses}
        assert rows == set(args.aux_data_ptrs) and all(section.is_whole for section in sections)
        assert all(section.blocks.num_blocks == 8 for section in sections)


class Rank:
    """A rank of a random instance, with memory that is its own; `stage` is (number, how many, first layer)."""

    def __init__(
        self, pool: KVCache, rank: int, tp: int, heads: int, *, is_mla: bool, stage: tuple[int, int, int] = (0, 1, 0)
    ) -> None:
        self.pool, self.aux = pool, metadata()
        number, num_stages, self.first_layer = stage
        at = replace(
            place(rank, tp, heads, is_mla=is_mla), stage=number, num_stages=num_stages, first_layer=self.first_layer
        )
        self.memory = RankMemory(kv_args(pool, self.aux, rank), at)


def hand_over(
    sources: Sequence[Rank], destinations: Sequence[Rank], source: Sequence[Any], destination: Sequence[Any]
) -> None:
    """Copy by the plans what `source` has into what `destination` has: arguments of `RankMemory.tables`."""
    layouts = [[rank.memory.layout for rank in side] for side in (sources, destinations)]
    for route in routes(*layouts):
        giving, taking = sources[route.source].memory, destinations[route.destination].memory
        have, want = giving.tables(*source), taking.tables(*destination)
        for number, (own, pairing) in pair_sections(giving.layout, taking.layout, route.parts).items():
            tokens = want[number].tokens
            copies = pairing.copies(
                pairing.layers, tokens.start, tokens.stop, have[own].block_ids, want[number].block_ids
            )
            for at, to, nbytes in zip(
                copies.source.tolist(), copies.destination.tolist(), copies.nbytes.tolist(), strict=True
            ):
                ctypes.memmove(to, at, nbytes)


pages = st.permutations(range(1, PAGES)).map(lambda order: order[:4])
stages = st.sampled_from([[4], [2, 2], [1, 3], [3, 1], [2, 1, 1], [1, 1, 1, 1]])
"""How many layers each stage of a pipeline has."""
tps = st.sampled_from([1, 2, 4, 8])
kinds = st.sampled_from(["mha", "mla", "swa"])


@settings(max_examples=40)
@given(st.sampled_from([1, 2, 4]), tps, tps, stages, pages, pages, st.integers(0, 3), kinds)
def test_copied_by_the_plans_every_byte_is_where_decode_expects_it(
    heads, source_tp, destination_tp, source_stages, source_pages, destination_pages, prefix, kind
):
    if kind == "swa":  # its state goes to as many ranks, and as a whole
        destination_tp, source_stages, prefix = source_tp, [LAYERS], 0
    is_mla = kind == "mla"

    def instance(tp: int, stages: list[int]) -> list[Rank]:
        first, mine, ranks = 0, heads_of(heads, tp), []
        for number, count in enumerate(stages):
            for rank in range(tp):
                pool = mla_pool(count) if is_mla else swa_pool(mine) if kind == "swa" else mha_pool(mine, count)
                ranks.append(Rank(pool, rank, tp, heads, is_mla=is_mla, stage=(number, len(stages), first)))
            first += count
        return ranks

    # The whole model's KV, of which ranks have heads: replicas have the same.
    full = [torch.randn(4, PAGE, 1 if is_mla else heads, 1) for _ in range(2 * LAYERS)]

    def part(number: int, tp: int, layer: int) -> torch.Tensor:
        first = 0 if is_mla else number * heads // tp
        return full[layer][:, :, first : first + (1 if is_mla else heads_of(heads, tp))]

    sources, destinations = instance(source_tp, source_stages), instance(destination_tp, [LAYERS])
    num_parts = 1 if is_mla else 2  # K of all layers, then V
    all_layers = len(tensors(destinations[0].pool)) // num_parts
    for number, each in enumerate(sources):
        found = tensors(each.pool)
        for at, tensor in enumerate(found):
            of_part, own = divmod(at, len(found) // num_parts)
            layer = of_part * all_layers + each.first_layer + own
            by_page = tensor.view(-1, PAGE, *tensor.shape[1:])
            wanted = part(number % source_tp, source_tp, layer).to(tensor.dtype)
            by_page[source_pages] = wanted.expand(4, *by_page.shape[1:])
        is_last_stage = number >= len(sources) - source_tp
        each.aux.output_ids[3] = 77 if is_last_stage else 66
        if kind == "swa":
            randomise(*state_tensors(each.pool))
    state = ([[5, 9]], [[4, 2]]) if kind == "swa" else (None, None)
    hand_over(
        sources,
        destinations,
        (source_pages, 3, state[0]),
        (destination_pages[prefix:], 6, state[1], prefix * PAGE),
    )
    for number, each in enumerate(destinations):
        for layer, tensor in enumerate(tensors(each.pool)):
            by_page = tensor.view(-1, PAGE, *tensor.shape[1:])
            expected = torch.zeros_like(by_page)
            wanted = part(number, destination_tp, layer)[prefix:].to(tensor.dtype)
            expected[destination_pages[prefix:]] = wanted.expand(4 - prefix, *by_page.shape[1:])
            assert torch.equal(by_page, expected)
        assert each.aux.output_ids[6].tolist() == [77] * 16 and not each.aux.output_ids[[0, 3, 5, 7]].any()
        if kind == "swa":
            for mine, theirs in zip(state_tensors(each.pool), state_tensors(sources[number].pool), strict=True):
                assert torch.equal(mine[[4, 2]].view(torch.uint8), theirs[[5, 9]].view(torch.uint8))


@pytest.mark.parametrize("tp", [1, 2])
def test_state_of_a_hybrid_model_goes_row_by_row(tp):
    sources, destinations = (
        [Rank(hybrid_pool(HEADS // tp, tp), number, tp, HEADS, is_mla=False) for number in range(tp)] for _ in range(2)
    )
    for each in sources:
        randomise(*state_tensors(each.pool), *tensors(each.pool))
    before = [[tensor.clone() for tensor in state_tensors(each.pool)] for each in destinations]
    hand_over(sources, destinations, ([1, 2], 0, [np.array([4])]), ([2], 1, [np.array([5])], PAGE))
    for number, each in enumerate(destinations):
        theirs = state_tensors(sources[number].pool)
        for mine, whole, was in zip(state_tensors(each.pool), theirs, before[number], strict=True):
            assert torch.equal(mine[5].view(torch.uint8), whole[4].view(torch.uint8))
            assert torch.equal(mine[:5].view(torch.uint8), was[:5].view(torch.uint8))


class TestRefusals:
    def refused(self, *sides: Rank) -> str:
        with pytest.raises(LayoutError) as raised:
            (route,) = routes([sides[0].memory.layout], [sides[1].memory.layout])
            pair_sections(sides[0].memory.layout, sides[1].memory.layout, route.parts)
        return str(raised.value)

    def test_another_head_size_is_named_with_both_values(self):
        narrow = MHATokenToKVPool(PAGES * PAGE, PAGE, torch.bfloat16, HEADS, DIM * 2, LAYERS, "cpu", False)
        said = self.refused(*(Rank(pool, 0, 1, HEADS, is_mla=False) for pool in (mha_pool(layers=LAYERS), narrow)))
        assert f"{DIM * 2 // 16} + 0 elements of 16 bytes" in said and f"{DIM * 4 // 16} + 0 elements of 16" in said

    def test_a_model_with_state_and_one_without_name_what_is_missing(self):
        said = self.refused(*(Rank(pool, 0, 1, HEADS, is_mla=False) for pool in (mha_pool(layers=2), swa_pool())))
        assert "swa 0 of" in said

    def test_a_prefix_inside_of_a_page(self):
        with pytest.raises(LayoutError, match=f"a prefix of 6 tokens, which pages of {PAGE} do not end at"):
            Rank(mha_pool(), 0, 1, HEADS, is_mla=False).memory.tables([1], 0, None, 6)

    def test_a_prefix_and_state_that_covers_tokens(self):
        with pytest.raises(LayoutError, match="state covers tokens"):
            Rank(swa_pool(), 0, 1, HEADS, is_mla=False).memory.tables([1], 0, [[1]], PAGE)

    def test_layers_of_different_sizes_in_a_pipeline(self):
        pool, wider = mha_pool(layers=1), mha_pool(heads=2 * HEADS, layers=1)
        args, more = kv_args(pool, metadata()), kv_args(wider, metadata())
        for name in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens"):
            k, v = getattr(args, name)
            setattr(args, name, [k, getattr(more, name)[0], v, getattr(more, name)[1]])
        with pytest.raises(LayoutError, match="layers of different sizes in a pipeline"):
            RankMemory(args, replace(place(), num_stages=2))

    def test_heads_that_a_page_does_not_have(self):
        with pytest.raises(LayoutError, match=r"pages of .* bytes for 4 tokens of 3 KV heads"):
            RankMemory(kv_args(mha_pool(4), metadata()), place(heads=3))
