"""Pages of every host layout: canonical in the pool, so that each instance reads what every other wrote."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_pools import HEADS, LAYERS, MHA_LAYOUTS, MLA_LAYOUTS, PAGE_TOKENS, axes, mha, mla, model, slots
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import keys, open_storage, server, stored_pages
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from mooncake_connector.kv.geometry import Shard
from sglang_backend.identity import opaque_pool

INTERFACES = ("v1", "flat")
KINDS = {"mha": (mha, MHA_LAYOUTS), "mla": (mla, MLA_LAYOUTS)}
EVERY_WAY = [(kind, layout, way) for kind, (_, layouts) in KINDS.items() for layout in layouts for way in INTERFACES]


def write(storage: Any, names: list[str], pages: list[int], way: str = "v1") -> list[bool]:
    """Store the pages of the host pool as SGLang's controller does, without a copy or through flat pages."""
    pool = storage.mem_pool_host
    if way == "v1":
        return storage.batch_set_v1(names, slots(pages, pool.page_size))
    return [storage.batch_set(names, [pool.get_data_page(page * pool.page_size) for page in pages])] * len(names)


def read(storage: Any, names: list[str], pages: list[int], way: str = "v1") -> list[bool]:
    """Load pages into the host pool, as `write`."""
    pool = storage.mem_pool_host
    if way == "v1":
        return storage.batch_get_v1(names, slots(pages, pool.page_size))
    found = storage.batch_get(names, [pool.get_dummy_flat_data_page() for _ in names])
    for page, flat in zip(pages, found, strict=True):
        if flat is not None:
            pool.set_from_flat_data_page(page * pool.page_size, flat)
    return [flat is not None for flat in found]


@pytest.mark.parametrize(("kind", "layout", "way"), EVERY_WAY)
def test_every_layout_reads_what_one_wrote(attach, kind: str, layout: str, way: str) -> None:
    make, layouts = KINDS[kind]
    names, written, places = keys(4), [5, 2, 9, 3], [1, 8, 4, 6]
    source = make(layout)
    axes(source)[:] = model(1, latent=kind == "mla")
    assert write(attach(source), names, written, way) == [True] * 4
    for other in layouts:
        for other_way in INTERFACES:
            target = make(other)
            axes(target)[:] = model(2, latent=kind == "mla")
            expected = axes(target).copy()
            expected[places] = axes(source)[written]
            storage = attach(target)
            assert storage.batch_exists(names) == 4
            assert read(storage, names, places, other_way) == [True] * 4
            assert np.array_equal(axes(target), expected), f"{layout} {way} to {other} {other_way}"


@pytest.mark.parametrize(("kind", "layout", "way"), EVERY_WAY)
def test_the_pool_holds_canonical_pages(attach, pool: Path, kind: str, layout: str, way: str) -> None:
    host_pool = KINDS[kind][0](layout)
    axes(host_pool)[:] = model(1, latent=kind == "mla")
    storage = attach(host_pool)
    write(storage, keys(3), [2, 0, 7], way)
    nbytes = axes(host_pool)[0].nbytes
    ((shard, pages),) = stored_pages(pool, keys(3), nbytes)
    assert shard == Shard(0, LAYERS, 0, 1 if kind == "mla" else HEADS)
    assert pages == [axes(host_pool)[page].tobytes() for page in (2, 0, 7)]  # [K/V][layer][token][head][dim]


@pytest.mark.parametrize("way", INTERFACES)
def test_what_is_not_there_is_left_alone(attach, way: str) -> None:
    host_pool = mha("page_first")
    axes(host_pool)[:] = model(1)
    storage = attach(host_pool)
    names = keys(4)
    write(storage, names[:2], [0, 1], way)
    axes(host_pool)[:] = model(2)
    assert storage.batch_exists(names) == 2 and storage.exists(names[1]) and not storage.exists(names[2])
    assert read(storage, names, [3, 4, 5, 6], way) == [True, True, False, False]
    assert np.array_equal(axes(host_pool)[3:5], model(1)[:2])
    assert np.array_equal(axes(host_pool)[5:], model(2)[5:])


geometry = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 5).map(lambda count: (0, count)),
        "heads": st.integers(1, 5),
        "dim": st.sampled_from([2, 6, 64]),
        "page_tokens": st.sampled_from([1, 2, 16]),
        "dtype": st.sampled_from([torch.bfloat16, torch.float16]),
    }
)


@settings(max_examples=60)
@given(geometry, st.lists(st.tuples(st.sampled_from(MHA_LAYOUTS), st.sampled_from(INTERFACES)), min_size=2, max_size=2))
def test_round_trips_of_any_geometry(sizes: dict[str, Any], ways: list[tuple[str, str]]) -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="mooncake-connector-test-"))
    storages = [open_storage(mha(layout, pages=5, **sizes), pool=folder / "pool") for layout, _ in ways]
    try:
        source, target = (axes(storage.mem_pool_host) for storage in storages)
        source[:] = np.random.default_rng(0).integers(0, 1 << 16, source.shape, dtype=np.uint16)
        assert write(storages[0], keys(2), [1, 0], ways[0][1]) == [True, True]
        assert read(storages[1], keys(2), [0, 2], ways[1][1]) == [True, True]
        assert np.array_equal(target[[0, 2]], source[[1, 0]])
    finally:
        for storage in storages:
            storage.close()
        shutil.rmtree(folder)


class Instance:
    """All ranks of a server of the Qwen3 checkpoint (8 layers, 4 KV heads) or of the MLA one (4 layers)."""

    def __init__(self, attach: Any, name: str, layout: str, tp: int = 1, pp: int = 1) -> None:
        self.num_layers, self.num_heads = (8, 4) if name == "qwen3" else (4, 1)
        self.ranks = []
        with server(name, tp_size=tp, pp_size=pp):
            for stage in range(pp):
                layers = (self.num_layers * stage // pp, self.num_layers * (stage + 1) // pp)
                for rank in range(tp):
                    if name == "qwen3":
                        heads = slice(rank * 4 // tp, max(rank * 4 // tp + 1, (rank + 1) * 4 // tp))
                        count = max(1, 4 // tp)
                        host_pool: Any = mha(layout, layers=layers, heads=count, dim=64, page_tokens=64, pages=8)
                    else:
                        heads = slice(0, 1)
                        host_pool = mla(layout, layers=layers, latent=512, rope=64, page_tokens=64, pages=8)
                    self.ranks.append(attach(host_pool, tp=(rank, tp), pp=(stage, pp)))
                    self.ranks[-1].part = (slice(*layers), heads)

    def parts(self, whole: Any) -> list[tuple[Any, Any]]:
        """Each rank's memory, and what of the whole model belongs there."""
        return [(axes(rank.mem_pool_host), whole[:, :, rank.part[0], :, rank.part[1]]) for rank in self.ranks]

    def fill(self, whole: Any) -> None:
        for memory, part in self.parts(whole):
            memory[:] = part

    def whole(self, seed: int) -> Any:
        kv, dim = (2, 64) if self.num_layers == 8 else (1, 576)
        shape = (8, kv, self.num_layers, 64, self.num_heads, dim)
        return np.random.default_rng(seed).integers(0, 1 << 16, shape, dtype=np.uint16)


SPLITS = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (1, 4), (4, 2)]
"""TP and PP sizes; with TP=8 two ranks hold each head."""


@pytest.mark.parametrize("wrote", SPLITS, ids=lambda split: f"tp{split[0]}pp{split[1]}")
def test_instances_of_any_tp_and_pp_read_each_others_pages(attach, wrote: tuple[int, int]) -> None:
    names = keys(3)
    writer = Instance(attach, "qwen3", "page_first", *wrote)
    whole = writer.whole(1)
    writer.fill(whole)
    for rank in writer.ranks:
        assert write(rank, names, [3, 1, 0]) == [True] * 3
    for number, split in enumerate(SPLITS):
        reader = Instance(attach, "qwen3", MHA_LAYOUTS[number % 4], *split)
        reader.fill(writer.whole(2))
        for rank in reader.ranks:
            assert rank.batch_exists(names) == 3
            assert read(rank, names, [0, 1, 2], INTERFACES[number % 2]) == [True] * 3
        for memory, part in reader.parts(whole):
            assert np.array_equal(memory[:3], part[[3, 1, 0]]), f"{wrote} to {split}"


def test_a_page_is_a_hit_once_every_part_of_it_is_there(attach) -> None:
    names = keys(2)
    writer = Instance(attach, "qwen3", "page_first", tp=2, pp=2)
    writer.fill(writer.whole(1))
    reader = Instance(attach, "qwen3", "page_first")
    for rank in writer.ranks:
        assert reader.ranks[0].batch_exists(names) == 0
        write(rank, names, [0, 1])
        for storage in reader.ranks:
            storage._kv.view._look_again_s = 0.0  # the list of shards is kept for a second
    assert reader.ranks[0].batch_exists(names) == 2


def test_pages_that_others_cover_are_not_stored_again(attach, pool: Path) -> None:
    names = keys(2)
    writer, other = Instance(attach, "qwen3", "page_first", tp=2), Instance(attach, "qwen3", "page_head", tp=1)
    for instance in (writer, other):
        instance.fill(instance.whole(1))
    for rank in (*writer.ranks, *other.ranks):
        assert write(rank, names, [0, 1]) == [True, True]
    assert [shard for shard, _ in stored_pages(pool, names, None)] == [Shard(0, 8, 0, 2), Shard(0, 8, 2, 4)]


@pytest.mark.parametrize(("wrote", "reads"), [((1, 1), (2, 1)), ((2, 2), (1, 1)), ((1, 2), (2, 1)), ((1, 4), (2, 2))])
def test_latent_pages_of_any_tp_and_pp(attach, pool: Path, wrote: tuple[int, int], reads: tuple[int, int]) -> None:
    names = keys(3)
    writer = Instance(attach, "deepseek-mla", "page_first_direct", *wrote)
    whole = writer.whole(1)
    writer.fill(whole)
    for rank in writer.ranks:
        if rank._storage_config.is_storage_writer:
            assert write(rank, names, [3, 1, 0]) == [True] * 3
    assert len(stored_pages(pool, names, None)) == wrote[1], "one writer for each stage"
    reader = Instance(attach, "deepseek-mla", "layer_first", *reads)
    for rank in reader.ranks:
        assert rank.batch_exists(names) == 3 and read(rank, names, [0, 1, 2]) == [True] * 3
    for memory, part in reader.parts(whole):
        assert np.array_equal(memory[:3], part[[3, 1, 0]])


class TestOpaquePools:
    """Pools of which no canonical page is made: K and V of different widths, layers of a draft behind the model's."""

    def test_their_pages_come_back_as_they_were(self, attach) -> None:
        source, target = mha("page_first", v_dim=4), mha("page_first", v_dim=4)
        for buffer in source.kv_buffer:
            buffer.view(torch.uint16).numpy()[:] = np.random.default_rng(3).integers(0, 1 << 16, buffer.shape)
        assert write(attach(source), keys(2), [1, 4]) == [True, True]
        storage = attach(target)
        assert storage.batch_exists(keys(2)) == 2 and read(storage, keys(2), [0, 2]) == [True, True]
        for there, here in zip(source.kv_buffer, target.kv_buffer, strict=True):
            first, last = slots([1, 4]), slots([0, 2])
            assert torch.equal(there.view(torch.int16)[first], here.view(torch.int16)[last])

    def test_they_are_for_instances_of_the_same_kind_alone(self, attach) -> None:
        write(attach(mha("page_first", v_dim=4)), keys(1), [0])
        assert attach(mha("page_first", v_dim=4)).batch_exists(keys(1)) == 1
        assert attach(mha("page_first_direct", v_dim=4)).batch_exists(keys(1)) == 0
        assert attach(mha("page_first", v_dim=4), tp=(0, 2)).batch_exists(keys(1)) == 0

    @pytest.mark.parametrize("layout", MHA_LAYOUTS)
    def test_pages_with_the_heads_first_are_not_taken_for_canonical_ones(self, attach, monkeypatch, layout) -> None:
        """SGLang copies the device's bytes as they are, also where they are no rows of tokens."""
        tokens_first = attach(mha(layout))
        write(tokens_first, keys(1, "tokens"), [0])
        draft = opaque_pool("draft", tokens_first._storage_config, tokens_first.mem_pool_host, replicated=False)
        monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
        source, target = mha(layout), mha(layout)
        axes(source)[:] = model(1)
        heads_first = attach(source)
        assert heads_first.batch_exists(keys(1, "tokens")) == 0
        assert write(heads_first, keys(1), [4]) == [True] and tokens_first.batch_exists(keys(1)) == 0
        assert read(attach(target), keys(1), [2]) == [True]
        assert np.array_equal(axes(target)[2], axes(source)[4])
        assert opaque_pool("draft", heads_first._storage_config, source, replicated=False) != draft

    def test_through_flat_pages_they_are_refused_with_a_word(self, attach, caplog) -> None:
        storage = attach(mha("page_first", v_dim=4))
        flat = torch.zeros(16, dtype=torch.bfloat16)
        assert storage.batch_set(keys(1), [flat]) is False and storage.batch_get(keys(1), [flat]) == [None]
        assert "interface_v1" in caplog.text

    def test_layers_of_a_draft_are_not_taken_for_the_models(self, attach) -> None:
        """A stage of a pipeline with a draft's layer behind its own has as many layers as a larger stage."""
        with server("deepseek-mla", pp_size=2):
            host_pool = mla("page_first", layers=(0, 3), latent=512, rope=64, page_tokens=64, pages=2)
            host_pool.target_layer_num = 2
            storage = attach(host_pool, pp=(0, 2))
        write(storage, keys(1), [0])
        reader = Instance(attach, "deepseek-mla", "page_first", pp=4)
        assert [rank.batch_exists(keys(1)) for rank in reader.ranks] == [0] * 4


def test_a_context_parallel_rank_keeps_its_share_to_its_like(attach) -> None:
    """Decode context parallelism: a page's tokens are dealt out to the ranks of a group."""
    host_pool = mla("page_first", page_tokens=2 * PAGE_TOKENS, dcp_size=2, dcp_rank=1)
    assert isinstance(host_pool, MLATokenToKVPoolHost) and host_pool.page_size == PAGE_TOKENS
    storage = attach(host_pool, dcp=(1, 2), tp=(1, 2))
    axes(host_pool)[:] = np.arange(axes(host_pool).size, dtype=np.uint16).reshape(axes(host_pool).shape)
    before = axes(host_pool).copy()
    assert storage.batch_set_v1(keys(2), slots([3, 1], 2 * PAGE_TOKENS)) == [True, True]
    assert storage.batch_get_v1(keys(2), slots([0, 2], 2 * PAGE_TOKENS)) == [True, True]
    assert np.array_equal(axes(host_pool)[[0, 2]], before[[3, 1]])
