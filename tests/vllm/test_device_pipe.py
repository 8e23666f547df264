"""Pipes, and the pages that go through them, over a stand-in for the driver whose streams work when waited for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from device_stand_in import StandIn, interpreted_kernel, kernels_by_numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import PageFormat
from store_client.embedded.hashing import digest
from store_client.jobs import CopyFailed
from vllm_plugin.blocks import KVBlocks
from vllm_plugin.device import opening
from vllm_plugin.device.opening import Device
from vllm_plugin.device.pages import DevicePages
from vllm_plugin.device.pipe import ALIGNMENT, FEWEST_LANES, MOST_LANES, aligned, lanes_for

OWN = Shard(1, 4, 1, 3)
FMT = PageFormat(num_layers=3, page_tokens=16, num_heads=2, k_dim=8, v_dim=4, itemsize=2)
BLOCK_TOKENS, NUM_BLOCKS, NUM_PAGES = 8, 40, 8


@pytest.fixture(scope="module")
def interpreted() -> Any:
    return interpreted_kernel()


@pytest.fixture(scope="module")
def kernel() -> Any:
    """Numpy in its place, for what comes before and after it."""
    return kernels_by_numpy()


@dataclass
class Moved:
    """The same blocks twice: moved by a device, and page by page by numpy."""

    stand_in: StandIn
    device: Device
    pages: DevicePages
    memory: torch.Tensor
    blocks: KVBlocks
    expected: torch.Tensor
    plain: KVBlocks

    def agrees(self) -> bool:
        return torch.equal(self.memory, self.expected)


def blocks_of(seed: int) -> tuple[torch.Tensor, KVBlocks]:
    generator = torch.Generator().manual_seed(seed)
    content = FMT.k_dim + FMT.v_dim
    shape = FMT.num_layers, NUM_BLOCKS, BLOCK_TOKENS, FMT.num_heads, content
    memory = torch.randint(-99, 99, shape, dtype=torch.int16, generator=generator)
    return memory, KVBlocks(list(memory.permute(0, 1, 3, 2, 4)), OWN, FMT, None)


def moved(
    kernel: Any, slab_nbytes: int = 1 << 20, undigested: Collection[int] = (), whole_nbytes: int = 0
) -> Moved:
    stand_in = StandIn(kernel)
    stand_in.undigested.update(undigested)
    locks = stand_in.locks_for(None)
    patch = pytest.MonkeyPatch()
    stand_in.install(patch)
    try:
        device = Device(torch.device("cpu"), locks, slab_nbytes, FMT.nbytes, whole_nbytes)
        memory, blocks = blocks_of(1)
        pages = device.pages(blocks, OWN, FMT)
    finally:
        patch.undo()
    assert pages is not None
    device.prepare = lambda *form: _with(stand_in, Device.prepare, device, *form)  # type: ignore[method-assign]
    pages._prepare = device.prepare
    return Moved(stand_in, device, pages, memory, blocks, *blocks_of(1))


def _with(stand_in: StandIn, prepare: Any, *arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        stand_in.install(patch)
        return prepare(*arguments)


def page_of(fmt: PageFormat, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, fmt.nbytes, dtype=np.uint8)


@st.composite
def tables(draw: st.DrawFn) -> list[list[int]]:
    """Block tables of pages that have no block in common; each begins at a page's border or within a block."""
    order = draw(st.permutations(range(NUM_BLOCKS)))
    return [order[3 * number : 3 * number + 3] for number in range(draw(st.integers(1, NUM_PAGES)))]


EXAMPLES = settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])


@given(tables=tables(), data=st.data())
@EXAMPLES
def test_any_pages_reach_the_blocks_as_numpy_puts_them_there(interpreted: Any, tables: Any, data: Any) -> None:
    """With their digests, but of those that the device has nothing to do with, and of one size that it digests not."""
    undigested = 7 * 2 * FMT.nbytes // 6
    slab_nbytes = data.draw(st.sampled_from([1, 6 * FMT.nbytes, 8 * FMT.nbytes, 1 << 16, 1 << 20]))
    all_of = moved(interpreted, slab_nbytes, {undigested})
    digests: list[int | None] = []
    for number, table in enumerate(tables):
        part = data.draw(st.sampled_from([OWN, OWN, OWN, Shard(0, 4, 0, 4), Shard(2, 9, 0, 2)]))
        fmt = PageFormat(part.num_layers, FMT.page_tokens, part.num_heads, FMT.k_dim, FMT.v_dim, FMT.itemsize)
        first, skip = data.draw(st.integers(0, BLOCK_TOKENS)), data.draw(st.integers(0, FMT.page_tokens))
        page = page_of(fmt, number)
        all_of.pages.load_page(part, table, first, page, skip)
        all_of.plain.load_page(part, table, first, page, skip)
        moves = skip < FMT.page_tokens and all_of.device.loads.can_move(all_of.pages._parts[part][1])
        digests.append(digest(page) if moves and page.nbytes != undigested else None)
        if data.draw(st.booleans()):
            assert all_of.pages.settle_loads() == digests
            digests.clear()
    assert all_of.pages.settle_loads() == digests
    assert all_of.agrees()
    all_of.device.close()
    assert not all_of.stand_in.library.slabs


@given(tables=tables(), data=st.data())
@EXAMPLES
def test_any_pages_leave_the_blocks_as_numpy_packs_them(interpreted: Any, tables: Any, data: Any) -> None:
    all_of = moved(interpreted)
    found, expected = [], []
    copies = all_of.blocks.copy([block for table in tables for block in table])
    for table in tables:
        first = data.draw(st.integers(0, BLOCK_TOKENS))
        found.append(np.zeros(FMT.nbytes, dtype=np.uint8))
        expected.append(np.zeros(FMT.nbytes, dtype=np.uint8))
        all_of.plain.save_page(table, first, expected[-1])
        if data.draw(st.booleans()):
            all_of.pages.save_copied(copies, table, first, found[-1])
        else:
            all_of.pages.save_page(table, first, found[-1])
    assert not any(map(np.any, found)) or len(tables) > 2, "a device is as late as it may be"
    digests = all_of.pages.settle_saves()
    assert np.array_equal(found, expected) and np.any(expected[0])
    assert digests == list(map(digest, expected))
    all_of.device.close()


def smallest(kernel: Any, lanes: int = FEWEST_LANES) -> Moved:
    """With lanes that hold one page each."""
    all_of = moved(kernel, slab_nbytes=2 * lanes * FMT.nbytes)
    assert all_of.device.loads._most_nbytes < 2 * all_of.pages._out.place_nbytes
    assert len(all_of.device.loads._lanes) == len(all_of.device.saves._lanes) == lanes
    return all_of


@pytest.mark.parametrize("pages, lanes", [(0, 2), (1, 2), (2, 2), (3, 3), (4, 4), (9, 4)])
def test_a_pipe_has_lanes_for_a_page_each(pages: int, lanes: int) -> None:
    page_nbytes = 20_000_000
    count, nbytes = lanes_for(pages * page_nbytes + 4 * ALIGNMENT * bool(pages), page_nbytes)
    assert count == lanes and nbytes % ALIGNMENT == 0
    assert count * nbytes <= max(pages, FEWEST_LANES) * page_nbytes * 17 / 16 + MOST_LANES * 4 * ALIGNMENT
    assert nbytes >= aligned(page_nbytes) + aligned(-(-page_nbytes // 1024) * 64), "a page, and what its digest needs"


def test_lanes_for_loads_have_room_for_what_other_shards_have_where_that_costs_no_memory(kernel: Any) -> None:
    whole = replace(FMT, num_layers=2 * FMT.num_layers)
    slab_nbytes, table = 2 * 4 * FMT.nbytes, [3, 1, 2]
    all_of = moved(kernel, slab_nbytes, whole_nbytes=whole.nbytes)
    assert [len(pipe._lanes) for pipe in (all_of.device.loads, all_of.device.saves)] == [2, 4]
    taken = sum(slab.nbytes for slab in all_of.stand_in.library.slabs.values())
    assert taken <= slab_nbytes * 17 / 16 + 2 * MOST_LANES * 2 * ALIGNMENT
    page, part = page_of(whole, 1), Shard(0, whole.num_layers, OWN.head_start, OWN.head_stop)
    all_of.pages.load_page(part, table, 0, page, 0)
    all_of.plain.load_page(part, table, 0, page, 0)
    assert all_of.pages.settle_loads() == [digest(page)], "by the device"
    assert all_of.agrees()


@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_lanes_are_used_again_only_when_they_are_through(kernel: Any, lanes: int) -> None:
    all_of = smallest(kernel, lanes)
    pages = [page_of(FMT, number) for number in range(NUM_PAGES)]
    for number, page in enumerate(pages):
        table = list(range(3 * number, 3 * number + 3))
        all_of.pages.load_page(OWN, table, 0, page, 0)
        all_of.plain.load_page(OWN, table, 0, page, 0)
    done = sum(runs for into, runs in all_of.stand_in.launched if into)
    assert 0 < done == 2 * (NUM_PAGES - lanes), "two blocks a page, and the last pages wait"
    assert all_of.pages.settle_loads() == list(map(digest, pages))
    assert all_of.agrees()


def saves_of(all_of: Moved, count: int) -> tuple[list[Any], list[Any]]:
    """Pages that were begun, and what they have to be."""
    found = [np.zeros(FMT.nbytes, dtype=np.uint8) for _ in range(count)]
    expected = [np.zeros(FMT.nbytes, dtype=np.uint8) for _ in range(count)]
    for number in range(count):
        table = [3 * number, 3 * number + 1]
        assert all_of.pages.save_page(table, 0, found[number]) == number + 1
        all_of.plain.save_page(table, 0, expected[number])
    return found, expected


@pytest.mark.parametrize(
    "slab_nbytes", [1, 6 * FMT.nbytes, 8 * FMT.nbytes, 1 << 20], ids=["two lanes", "three", "four", "all in one"]
)
@pytest.mark.parametrize("first", [1, 3, 7])
def test_the_first_pages_are_settled_while_others_are_under_way(kernel: Any, slab_nbytes: int, first: int) -> None:
    """Each page has the digest of its own bytes, however lanes and batches lie to each other."""
    all_of = moved(kernel, slab_nbytes)
    found, expected = saves_of(all_of, NUM_PAGES)
    digests = all_of.pages.settle_saves(first)
    assert np.array_equal(found[:first], expected[:first]) and all_of.pages.settled == first
    digests += all_of.pages.settle_saves(NUM_PAGES - 1)
    digests += all_of.pages.settle_saves()
    assert digests == list(map(digest, expected)) and np.array_equal(found, expected)
    assert all_of.pages.settled == all_of.pages.saved == NUM_PAGES


def test_a_lane_that_is_being_filled_is_not_begun_for_pages_before_it(kernel: Any) -> None:
    all_of = moved(kernel, 8 * FMT.nbytes)
    found, expected = saves_of(all_of, 3)
    launched = len(all_of.stand_in.launched)
    assert len(all_of.pages.settle_saves(1)) == 1
    assert len(all_of.stand_in.launched) == launched + 1 and not found[2].any() and expected[2].any()
    assert all_of.pages.settle_saves() == list(map(digest, expected[1:])) and np.array_equal(found, expected)


@pytest.mark.parametrize("lanes", [2, 4])
@pytest.mark.parametrize("call, good", itertools.product(("cuMemcpyAsync", "cuStreamSynchronize"), range(3)))
def test_once_the_driver_refused_something_no_page_before_it_is_settled_and_nothing_is_under_way(
    kernel: Any, call: str, good: int, lanes: int
) -> None:
    """What was refused may be of the pages before those that were begun then."""
    all_of = smallest(kernel, lanes)
    all_of.stand_in.library.fail[call] = good
    with pytest.raises(CopyFailed, match=call):
        saves_of(all_of, NUM_PAGES)
    all_of.stand_in.library.fail.clear()
    with pytest.raises(CopyFailed, match=call):
        all_of.pages.settle_saves(1)
    assert not any(all_of.stand_in.library._queues.values())
    assert all_of.pages.settled == all_of.pages.saved
    assert all_of.pages.settle_saves() == []
    page, expected = (np.zeros(FMT.nbytes, dtype=np.uint8) for _ in range(2))
    all_of.pages.save_page([3, 4], 0, page)
    all_of.plain.save_page([3, 4], 0, expected)
    assert all_of.pages.settle_saves() == [digest(expected)] and np.array_equal(page, expected)


def test_where_a_kernel_could_not_be_started_no_page_before_it_is_settled(kernel: Any) -> None:
    """Triton's launcher raises errors of its own."""
    all_of = moved(kernel, 4 * FMT.nbytes)
    start, refused = all_of.pages._out.start, [True]

    def start_later(*arguments: int) -> None:
        if refused:
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        start(*arguments)

    all_of.pages._out = replace(all_of.pages._out, start=start_later)
    with pytest.raises(RuntimeError, match="Triton"):
        saves_of(all_of, NUM_PAGES)
    refused.clear()
    with pytest.raises(CopyFailed, match="Triton"):
        all_of.pages.settle_saves(1)
    assert all_of.pages.settle_saves() == []
    page, expected = (np.zeros(FMT.nbytes, dtype=np.uint8) for _ in range(2))
    all_of.pages.save_page([3, 4], 0, page)
    all_of.plain.save_page([3, 4], 0, expected)
    assert all_of.pages.settle_saves() == [digest(expected)] and np.array_equal(page, expected)


def test_pages_of_the_same_copies_go_in_one_launch(kernel: Any) -> None:
    all_of = moved(kernel)
    copies, others = all_of.blocks.copy(list(range(6))), all_of.blocks.copy([6, 7])
    pages = [np.zeros(FMT.nbytes, dtype=np.uint8) for _ in range(4)]
    for number, page in enumerate(pages):
        source = others if number == 3 else copies
        all_of.pages.save_copied(source, list(range(8)), 2 * number * BLOCK_TOKENS, page)
    all_of.pages.settle_saves()
    assert [runs for _, runs in all_of.stand_in.launched] == [6, 2]


def test_digests_are_compiled_once_for_pages_of_all_sizes(kernel: Any) -> None:
    all_of = moved(kernel)
    assert all_of.stand_in.prepared_digests == 1
    for part in (OWN, Shard(0, 4, 0, 4), Shard(2, 9, 0, 2)):
        fmt = PageFormat(part.num_layers, FMT.page_tokens, part.num_heads, FMT.k_dim, FMT.v_dim, FMT.itemsize)
        page = page_of(fmt, 1)
        all_of.pages.load_page(part, [0, 1], 0, page, 0)
        assert all_of.pages.settle_loads() == [digest(page)]
    assert all_of.stand_in.prepared_digests == 1


def test_a_thread_that_follows_another_one_works_on_the_device_as_well(kernel: Any) -> None:
    """It may have the number of one that has ended."""
    all_of = moved(kernel)
    page, failed = page_of(FMT, 1), []

    def load() -> None:
        try:
            all_of.pages.load_page(OWN, [0, 1], 0, page, 0)
            assert all_of.pages.settle_loads() == [digest(page)]
        except BaseException as error:
            failed.append(error)

    bound = []
    for _ in range(3):
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        bound.append(all_of.stand_in.library.calls["cuCtxPushCurrent_v2"])
    assert not failed and bound[2] == bound[1] + 1 == bound[0] + 2


def test_memory_that_the_driver_locked_is_copied_in_place_and_other_memory_by_way_of_some(kernel: Any) -> None:
    all_of = moved(kernel)
    locks, library = all_of.device.loads._locks, all_of.stand_in.library
    memory = np.zeros(3 * 4096 + 4096, dtype=np.uint8)
    start = -memory.ctypes.data % 4096
    page = memory[start : start + FMT.nbytes]
    page[:] = page_of(FMT, 1)
    for locked in (True, False):
        if locked:
            assert locks.lock(page.ctypes.data, 2 * 4096)
        else:
            locks.unlock(page.ctypes.data)
        held = len(library.locked)
        all_of.pages.load_page(OWN, [0, 1], 0, page, 0)
        all_of.pages.settle_loads()
        assert len(library.locked) - held == (not locked)
        all_of.plain.load_page(OWN, [0, 1], 0, page, 0)
        assert all_of.agrees() and not library.pageable
        all_of.memory.zero_(), all_of.expected.zero_()


def test_where_no_memory_can_be_locked_the_driver_copies_by_itself(kernel: Any) -> None:
    all_of = smallest(kernel)
    all_of.stand_in.library.fail["cuMemHostAlloc"] = 0
    pages = [page_of(FMT, number) for number in range(4)]  # which stay where they are until all is settled
    for number, page in enumerate(pages):
        table = [3 * number, 3 * number + 1]
        for one in (all_of.pages, all_of.plain):
            one.load_page(OWN, table, 0, page, 0)
    all_of.pages.settle_loads()
    found, expected = (np.zeros(FMT.nbytes, dtype=np.uint8) for _ in range(2))
    all_of.pages.save_page([3, 4], 0, found)
    all_of.pages.settle_saves()
    all_of.plain.save_page([3, 4], 0, expected)
    assert all_of.agrees() and np.array_equal(found, expected) and all_of.stand_in.library.pageable


@pytest.mark.parametrize(
    "call, good",
    [*itertools.product(("cuMemcpyAsync", "cuStreamSynchronize"), range(3)), ("cuCtxPushCurrent_v2", 0)],
)
def test_a_refusal_of_the_driver_is_a_copy_that_failed_and_the_next_ones_are_right(
    kernel: Any, call: str, good: int
) -> None:
    all_of = smallest(kernel)
    kept = [page_of(FMT, number) for number in range(4)]
    all_of.stand_in.library.fail[call] = good
    with pytest.raises(CopyFailed, match=call):
        try:
            for number in range(4):
                all_of.pages.load_page(OWN, [3 * number, 3 * number + 1], 0, kept[number], 0)
        finally:
            all_of.pages.settle_loads()
    all_of.stand_in.library.fail.clear()
    try:
        all_of.pages.settle_loads()
    finally:
        for number in range(4):
            for one in (all_of.pages, all_of.plain):
                one.load_page(OWN, [3 * number, 3 * number + 1], 0, kept[number], 0)
        all_of.pages.settle_loads()
    assert all_of.agrees()
    all_of.device.close()
    assert not all_of.stand_in.library.slabs and not all_of.stand_in.library.locked


def test_what_is_begun_before_the_end_is_through_at_the_end_and_nothing_is_begun_after_it(kernel: Any) -> None:
    all_of = moved(kernel)
    page = page_of(FMT, 1)
    all_of.pages.load_page(OWN, [0, 1], 0, page, 0)
    all_of.device.close()
    with pytest.raises(CopyFailed, match="took its KV memory away"):
        all_of.pages.load_page(OWN, [0, 1], 0, page, 0)
    with pytest.raises(CopyFailed):
        all_of.pages.settle_saves()
    library = all_of.stand_in.library
    assert not library.slabs and not library.locked and not library._queues


@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuStreamCreateWithPriority", "cuMemHostAlloc"])
def test_a_device_without_room_leaves_the_slow_way_and_nothing_behind(
    kernel: Any, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in = StandIn(kernel)
    for good in range(5):
        stand_in.library.fail = {call: good}
        opened = opening.open_device(torch.device("cpu"), stand_in.locks_for(None), 1, FMT.nbytes)
        if opened is not None:
            opened.close()
        assert (opened is None) == (good < (1 if call == "cuMemAlloc_v2" else 4))
        assert not stand_in.library.slabs and not stand_in.library.locked and not stand_in.library._queues
