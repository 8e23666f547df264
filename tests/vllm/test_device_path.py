"""Loads and saves by a device, through vLLM's scheduler. The device is a stand-in, with numpy in the kernels' place.

Tests that use `interpreted` have the kernels themselves, in Triton's interpreter (`device_stand_in`).

Tests of loads and saves that hold on the processor are taken over from their modules where a device may break them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import oracle
import test_loads
import test_ranks
import test_saves
from cases import PROMPT, Start, steady_runners, warm_pool, warmed
from device_stand_in import StandIn, interpreted_kernel, kernels_by_numpy
from harness import PATIENCE_S, Engine
from mixes import MIXES
from runner import WrongKV
from test_hybrid import spoil
from test_loads import (  # noqa: F401 - run here as well
    test_a_load_that_was_given_up_is_not_reported_when_it_ends_after_all,
)
from test_lookups import failures
from test_saves import (  # noqa: F401
    OTHERS,
    check_pool,
    overtake,
    overtaken,
    test_one_page_is_saved_however_small_the_cache,
)
from test_sleep import test_after_sleep_pages_are_saved_and_loaded_as_before  # noqa: F401

import vllm_plugin.kv_memory
from mooncake_connector.kv.keys import page_keys
from store_client.embedded import putting
from store_client.jobs import CopyFailed, Overtaken
from vllm_plugin.blocks import BlockCopies
from vllm_plugin.device.opening import open_device
from vllm_plugin.prefix.saver import DeviceSave, _Begun


@pytest.fixture(scope="module")
def interpreted() -> Any:
    return interpreted_kernel()


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    has_kernels = "interpreted" in request.fixturenames
    stand_in = StandIn(request.getfixturevalue("interpreted") if has_kernels else kernels_by_numpy())
    stand_in.install(monkeypatch)
    yield stand_in
    stand_in.release()
    assert not stand_in.library.pageable, "copied by the driver itself, which has the caller wait"


@pytest.fixture(params=["at once", "page by page", "batch by batch"])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab for all pages of a request, or one whose lanes hold a page each, and saves of two pages at a time."""
    if request.param != "at once":
        small_lanes(monkeypatch)
    if request.param == "batch by batch":
        monkeypatch.setattr(putting, "_BEGUN_NBYTES", 1)
        monkeypatch.setattr(putting, "put_batch", lambda nbytes: 2)


def small_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        vllm_plugin.kv_memory, "open_device", lambda where, locks, _, *nbytes: open_device(where, locks, 1, *nbytes)
    )


@pytest.mark.usefixtures("interpreted", "lanes")
@steady_runners
def test_what_one_engine_computed_another_loads_by_its_device(start: Start, device: StandIn) -> None:
    start().check(PROMPT, 20)
    assert device.launched and not any(into for into, _ in device.launched)
    second = start()
    second.check(PROMPT, 20, name="again")
    assert second.computed("again") == len(PROMPT) - 96 + 19
    assert any(into for into, _ in device.launched)


def test_a_kernel_that_does_nothing_is_noticed_by_these_tests(start: Start, device: StandIn) -> None:
    """The control: blocks that no load has filled."""
    engine = warmed(start)
    device.idle = True
    with pytest.raises(WrongKV):
        engine.ask(PROMPT)


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("wrong", [0, 3, 5])
def test_a_page_whose_bytes_are_wrong_is_computed_and_so_are_those_behind_it(
    start: Start, device: StandIn, pool: Path, wrong: int
) -> None:
    """The device digests what it has read, and finds it out after it was moved into the blocks."""
    engine = warmed(start)
    (view,) = engine.prefix._views(0)
    pages: list[bytes] = []
    key = page_keys(PROMPT, 16)[wrong : wrong + 1]
    getattr(view.own, "_inner", view.own).read(key, lambda _, page: pages.append(bytes(page)), nbytes=view.nbytes)
    spoil(pool, pages[0])
    engine.check(PROMPT, 20, computed=len(PROMPT) - 16 * wrong + 19)
    assert any(into for into, _ in device.launched) and engine.prefix._store.store.stats().failures["corrupt"] == 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("mix", MIXES)
def test_models_of_several_groups_load_what_they_stored(start: Start, device: StandIn, mix: str) -> None:
    start(kv_spec=MIXES[mix]).check(PROMPT, 20)
    second = start(kv_spec=MIXES[mix])
    second.check(PROMPT, 20, name="again")
    assert second.computed("again") < len(PROMPT) + 19
    assert any(into for into, _ in device.launched)


@pytest.mark.parametrize(
    "wrote, reads, block_tokens, layout",
    [
        ((1, 1), (2, 2), 64, "BHLNC"),
        ((2, 1), (1, 2), 16, "LBNHC"),
        ((2, 2), (1, 1), 64, "LBNHC"),
        ((4, 1), (2, 1), 16, "BHLNC"),
    ],
)
def test_pages_of_other_splits_go_into_the_blocks(
    start: Start, wrote: tuple[int, int], reads: tuple[int, int], block_tokens: int, layout: str
) -> None:
    splits = [dict(zip(("tp_size", "pp_size"), sizes, strict=True)) for sizes in (wrote, reads)]
    test_ranks.test_pages_of_any_split_go_into_every_layout(start, *splits, block_tokens, layout)


@pytest.mark.usefixtures("lanes")
@steady_runners
def test_late_saves_read_what_was_copied_aside(start: Start, faults: Any, aside: bool) -> None:
    test_saves.test_pages_saved_late_hold_the_kv_of_their_key_although_others_got_the_blocks(start, faults, aside)


def test_blocks_come_back_when_the_device_has_left_them(start: Start, faults: Any) -> None:
    test_loads.test_abort_while_loading(start, faults, lost=False)


def save_under_way(start: Start, device: StandIn) -> tuple[Engine, str]:
    """A request whose pages the device is about to read, and does not get to."""
    engine = start(num_blocks=20, prefix_caching=False)
    device.hold(into_blocks=False)
    name = engine.add(PROMPT, 100)
    engine.run(until=device.waits.is_set)
    return engine, name


@pytest.mark.usefixtures("lanes")
@steady_runners
def test_a_page_whose_blocks_are_written_before_the_device_read_them_is_not_stored_as_it_was_read(
    start: Start, aside: bool, device: StandIn
) -> None:
    engine, first = save_under_way(start, device)
    overtake(engine, first)
    device.release()
    engine.finish()
    check_pool(engine, PROMPT, *OTHERS, num_tokens=100)
    assert all(engine.pages(PROMPT)) == aside
    assert (overtaken(engine) > 0) != aside


@pytest.mark.usefixtures("lanes")
def test_without_the_look_after_the_device_wrong_pages_would_be_stored(
    start: Start, device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    monkeypatch.setattr(DeviceSave, "_was_overtaken", lambda save, one: False)
    engine, first = save_under_way(start, device)
    overtake(engine, first)
    device.release()
    engine.finish()
    with pytest.raises(AssertionError, match="holds other KV"):
        engine.pages(PROMPT)


CALLS = ("cuMemcpyAsync", "cuStreamSynchronize", "cuCtxPushCurrent_v2")


@pytest.mark.parametrize("call", CALLS)
def test_a_driver_that_fails_costs_a_load_and_no_more(start: Start, device: StandIn, call: str) -> None:
    engine = warmed(start)
    device.library.fail[call] = 0
    engine.check(PROMPT, 3, computed=len(PROMPT) + 2)
    assert failures(engine)["load_copy"] == 1
    device.library.fail.clear()
    engine.scheduler.reset_prefix_cache()
    engine.check(PROMPT, 3, computed=4 + 2)


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("call", CALLS)
def test_a_driver_that_fails_costs_a_save_and_no_more(start: Start, device: StandIn, call: str) -> None:
    engine = start()
    device.library.fail[call] = 0
    engine.check(PROMPT, 3)
    assert failures(engine)["save_copy"] and not any(engine.pages(PROMPT))
    device.library.fail.clear()
    other = list(range(200, 300))
    engine.check(other, 3)
    assert all(engine.pages(other))


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("good", [0, 1, 2, 3])
def test_a_kernel_that_is_not_started_costs_a_save_and_no_more(start: Start, device: StandIn, good: int) -> None:
    """Nothing is stored that it did not write: its pages may be of a batch before the one that is begun then."""
    engine = start()
    device.starts = good
    engine.check(PROMPT, 3)
    if device.starts is None:
        assert sum(failures(engine).values()) and not all(engine.pages(PROMPT))
    device.starts = None
    other = list(range(200, 300))
    engine.check(other, 3)
    assert all(engine.pages(other))


def test_after_three_loads_that_failed_none_is_offered_for_a_while(start: Start, device: StandIn) -> None:
    warm_pool(start, PROMPT)
    engine = start(prefix_caching=False)
    device.library.fail["cuStreamSynchronize"] = 0
    for name in ("a", "b", "c", "d"):
        engine.check(PROMPT, 3, name=name)
    assert engine.received == {"a": 1, "b": 1, "c": 1} and failures(engine)["load_copy"] == 3


def test_while_a_device_hangs_others_are_not_offered_its_loads(start: Start, device: StandIn) -> None:
    engine = warmed(start, extra={"load_deadline_s": 0.05}, prefix_caching=False)
    device.hold(into_blocks=True)
    hangs = engine.add(PROMPT, 3)
    engine.run(until=lambda: device.waits.is_set() and engine.prefix._lookups.stalled)
    computed = engine.add(PROMPT, 3)
    engine.run(until=lambda: computed in engine.reasons)
    engine.check_answer(computed)
    assert engine.received == {} and hangs not in engine.reasons
    device.release()
    engine.finish(hangs)
    assert engine.texts[hangs] == oracle.generate(PROMPT, 3) and engine.received == {hangs: 1}


def test_a_device_without_room_for_the_slab_serves_the_pool_the_slow_way(
    start: Start, device: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    device.library.fail["cuMemAlloc_v2"] = 0
    engine = start()
    engine.check(PROMPT, 3)
    start().check(PROMPT, 3, computed=4 + 2)
    assert not device.launched
    assert len([one for one in caplog.messages if "by way of host memory, which is slow" in one]) == 1


def test_nothing_of_the_device_is_left_when_the_engine_ends(start: Start, device: StandIn) -> None:
    engine = warmed(start)
    engine.check(PROMPT, 3)
    assert device.library.slabs
    engine.shut_down()
    assert not device.library.slabs and not device.library.locked and not device.library.registered


def test_a_load_that_the_engine_gives_up_touches_no_block_from_then_on(start: Start, device: StandIn) -> None:
    """The engine waits for what the device is about to write, which is no longer than a batch takes."""
    engine = warmed(start)
    device.hold(into_blocks=True)
    name = engine.add(PROMPT, 3)
    engine.run(until=device.waits.is_set)
    ended = threading.Event()
    side = engine.workers[0].side
    stopping = threading.Thread(target=lambda: (side.unregister(), ended.set()))
    stopping.start()
    assert not ended.wait(0.1), "blocks would be the engine's again while the device writes to them"
    device.release()
    assert ended.wait(PATIENCE_S)
    stopping.join()
    memory = engine.workers[0].runner.memory
    before = memory.copy()
    assert not device.library._queues and (memory == before).all()
    side.restore()
    engine.finish(name)
    assert oracle.generate(PROMPT, 3) == engine.texts[name]
    warm_pool(start)


class Turns:
    """In place of a device's pages: a page is read when it is settled, or when `saved` says so."""

    closed = False

    def __init__(self) -> None:
        self.begun = self.saved = self.settled = 0
        self.copied: list[int] = []

    def save_page(self, block_ids: Any, first_token: int, page: Any) -> int:
        self.begun += 1
        return self.begun

    def save_copied(self, copies: Any, block_ids: Any, first_token: int, page: Any) -> int:
        self.copied.append(first_token)
        return self.save_page(block_ids, first_token, page)

    def settle_saves(self, turn: int | None = None) -> list[int]:
        settled, self.settled = self.settled, self.begun if turn is None else turn
        return list(range(100 + settled, 100 + self.settled))


def save_over(pages: Any, kind: type[DeviceSave] = DeviceSave) -> DeviceSave:
    save = object.__new__(kind)
    save._filled, save._waiting, save._taken = [], deque(), {}
    save.device_pages, save.plan = pages, SimpleNamespace(block_ids=[])
    return save


def test_a_page_that_was_overtaken_before_it_was_begun_is_no_fault_of_a_device_that_is_closed() -> None:
    class Lost(DeviceSave):
        def _source(self, number: int) -> None:
            raise Overtaken

    class Closed:
        closed, settled = True, 0

        def settle_saves(self, turn: int | None = None) -> None:
            raise CopyFailed("the device is closed")

    save = save_over(Closed(), Lost)
    begun = _Begun(0, np.empty(0, np.uint8))
    save._filled, save._waiting = [begun], deque([begun])
    with pytest.raises(Overtaken):
        save.settle(1)


class Given(DeviceSave):
    """`given_away`: number of a page to what was copied aside of it, and what waits for that; None if nothing was."""

    def _source(self, number: int) -> Any:
        if number in given_away and given_away[number] is None:
            raise Overtaken
        return given_away.get(number)

    def first_token(self, number: int) -> int:
        return number


given_away: dict[int, Any] = {}


@pytest.fixture(autouse=True)
def none_given_away() -> Iterator[None]:
    yield
    given_away.clear()


def fill(save: DeviceSave, count: int) -> None:
    for number in range(count):
        save.fill(number, np.empty(0, np.uint8))


def test_pages_that_were_read_in_time_are_not_read_again_and_are_not_lost() -> None:
    pages = Turns()
    save = save_over(pages, Given)
    fill(save, 3)
    pages.saved = 2
    save.fill(3, np.empty(0, np.uint8))
    given_away.update({0: None, 1: (object.__new__(BlockCopies), None), 2: (object.__new__(BlockCopies), None)})
    assert save.settle(4) == [100, 101, 104, 103], "the third is read again, and has the digest of that"
    assert pages.copied == [2]


def test_what_fails_when_a_page_is_read_again_is_what_is_told() -> None:
    def fail() -> None:
        raise CopyFailed("the copies aside")

    save = save_over(Turns(), Given)
    fill(save, 3)
    given_away[2] = object.__new__(BlockCopies), fail
    with pytest.raises(CopyFailed, match="the copies aside"):
        save.settle(3)


def test_a_page_that_is_read_again_behind_those_of_the_next_batch_has_the_digest_of_that() -> None:
    pages = Turns()
    save = save_over(pages, Given)
    fill(save, 3)
    save.fill(3, np.empty(0, np.uint8))
    given_away[1] = object.__new__(BlockCopies), None
    assert save.settle(2) == [100, 104], "the fifth that was begun"
    assert pages.settled == 5 and save.settle(2) == [102, 103]
    assert not save._taken and not save._filled and not save._waiting


def test_a_page_that_could_not_be_read_again_is_not_settled_although_it_was_of_the_batch_before() -> None:
    """What is in its place was read from blocks that are others'."""

    class NoKernel(Turns):
        def save_copied(self, copies: Any, block_ids: Any, first_token: int, page: Any) -> int:
            raise RuntimeError("the compiler")

    pages = NoKernel()
    save = save_over(pages, Given)
    fill(save, 2)
    given_away[0] = object.__new__(BlockCopies), None
    pages.saved = 1
    with pytest.raises(RuntimeError, match="the compiler"):
        save.fill(2, np.empty(0, np.uint8))
    with pytest.raises(RuntimeError, match="the compiler"):
        save.settle(2)


def test_pages_of_the_next_batch_are_not_waited_for() -> None:
    pages = Turns()
    save = save_over(pages, Given)
    fill(save, 4)
    assert save.settle(1) == [100] and pages.settled == 1
    given_away[2] = object.__new__(BlockCopies), None
    assert save.settle(3) == [101, 104, 103]


def test_where_pages_could_not_be_settled_those_of_the_next_batch_have_no_digests() -> None:
    """What is under way is over then, and is not told of again: see `Pipe.settle`."""

    class Broken(Turns):
        def settle_saves(self, turn: int | None = None) -> list[int]:
            super().settle_saves()
            raise CopyFailed("the driver")

    save = save_over(Broken(), Given)
    fill(save, 4)
    with pytest.raises(CopyFailed):
        save.settle(2)
    with pytest.raises(KeyError):
        save.settle(2)
