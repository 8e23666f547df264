"""Loads: when they start and end, what becomes of aborted and failed ones, and that each is reported exactly once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import oracle
import pytest
from cases import PROMPT, Start, begin_load, every_runner, warm_pool, warmed
from vllm.v1.request import RequestStatus

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import page_keys
from store_client.base import Lookup

OTHER = list(range(200, 300))


@every_runner
def test_loads_are_asynchronous_and_start_once_a_step_is_taken_in(start: Start, faults, monkeypatch) -> None:
    """Traps 1, 3 and 7. Cure: a hit is offered as asynchronous, so its blocks are in no batch of that step."""
    engine = warmed(start)
    order: list[str] = []
    worker = engine.workers[0]
    update, start_load_kv = worker.runner.update, worker.connector.start_load_kv
    monkeypatch.setattr(worker.runner, "update", lambda *a: (order.append("update"), update(*a))[1])
    monkeypatch.setattr(
        worker.connector, "start_load_kv", lambda *a, **k: (order.append("loads"), start_load_kv(*a, **k))[1]
    )
    request = engine.requests[engine.add(PROMPT)]
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (96, True)
    engine.run()
    assert order[:2] == ["update", "loads"]
    assert order.count("loads") == order.count("update")


@every_runner
def test_other_requests_run_while_one_loads(start: Start, faults) -> None:
    engine = warmed(start)
    faults.hold_reads()
    loading = engine.add(PROMPT)
    running = engine.answer(OTHER, 5)
    assert engine.texts == {loading: [], running: oracle.generate(OTHER, 5)}
    faults.release()
    engine.finish(loading)


@every_runner
def test_blocks_of_a_load_are_hashed_only_after_they_arrived(start: Start, faults) -> None:
    """Trap 8. Cure: the load is asynchronous. A second request of the same prompt must not share unfilled blocks."""
    engine = warmed(start)
    first = begin_load(engine, faults)
    manager = engine.scheduler.kv_cache_manager
    probe = engine.requests[first]
    assert manager.get_computed_blocks(probe)[1] == 0
    second = engine.add(PROMPT)
    engine.steps(5)
    faults.release()
    engine.finish()
    assert engine.texts[first] == engine.texts[second] == oracle.generate(PROMPT, 3)
    assert manager.get_computed_blocks(probe)[1] == 96


# Aborts. Trap 2: a report about a request that the scheduler does not know kills the engine. Cure: one report a load,
# at its end, also where the request was aborted; vLLM keeps an aborted request until then.


@every_runner
def test_abort_before_scheduling(start: Start) -> None:
    engine = warmed(start)
    engine.abort(engine.add(PROMPT))
    engine.run()
    assert not engine.received
    engine.check(PROMPT, name="next")


@every_runner
@pytest.mark.parametrize("lost", [False, True], ids=["arrives", "fails"])
def test_abort_while_loading(start: Start, faults, lost: bool) -> None:
    """The blocks come back only when the load has ended: until then its thread may write them."""
    engine = warmed(start)
    name = begin_load(engine, faults)
    engine.abort(name)
    engine.steps(5)
    assert engine.free_blocks() < engine.setup.num_blocks - 1
    assert engine.scheduler.has_requests(), "an idle engine would never learn of the load's end"
    if lost:
        faults.lose_reads = lambda keys: [True] * len(keys)
    faults.release()
    engine.run()
    faults.lose_reads = None
    assert engine.received == {name: 1}
    assert engine.ask(PROMPT, name="next") == oracle.generate(PROMPT, 3)
    assert engine.received == {name: 1, "next": 1}
    assert not engine.sent, "no request was ever held for sending"
    engine.check_at_rest()


@every_runner
def test_abort_while_loading_saves_nothing_of_what_has_not_arrived(start: Start, faults) -> None:
    """Cure: `finished` plans no save for a request that is loading. Its pages leave the pool meanwhile, so whatever
    its blocks hold would be stored in their place."""
    engine = warmed(start)
    name = begin_load(engine, faults)
    for view in engine.prefix._views():
        view.own.remove(page_keys(PROMPT, 16))
    engine.abort(name)
    engine.steps(3)
    faults.release()
    engine.run()
    engine.settle()
    engine.check_at_rest()
    assert engine.num_pages() == 0


@every_runner
@pytest.mark.parametrize("lost", [False, True], ids=["arrived", "failed"])
def test_abort_in_the_step_that_reports_the_load(start: Start, faults, lost: bool) -> None:
    """The worker has reported, the scheduler has not read it yet, and the abort comes in between."""
    engine = warmed(start)
    if lost:
        faults.lose_reads = lambda keys: [True] * len(keys)
    name = engine.add(PROMPT)
    while not engine.received:
        engine.begin_step()
        if not engine.received:
            engine.end_step()
    engine.abort(name)
    engine.drain()
    engine.finish()
    assert engine.received == {name: 1}


@every_runner
@pytest.mark.parametrize("lost", [False, True], ids=["arrived", "failed"])
def test_abort_between_the_report_and_the_next_schedule(start: Start, faults, lost: bool) -> None:
    engine = warmed(start)
    if lost:
        faults.lose_reads = lambda keys: [True] * len(keys)
    name = engine.add(PROMPT)
    engine.run(until=lambda: name in engine.scheduler.finished_recving_kv_req_ids)
    assert engine.requests[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.abort(name)
    engine.finish()


@every_runner
def test_abort_after_the_load_and_after_the_end(start: Start) -> None:
    engine = warmed(start)
    name = engine.add(PROMPT, 30)
    engine.run(until=lambda: engine.texts[name])
    engine.abort(name)
    engine.run()
    engine.abort(name)
    engine.finish()
    assert engine.received == {name: 1}


# Failures


@every_runner
@pytest.mark.parametrize("kept", [0, 1, 3, 5])
def test_a_lost_page_is_recomputed_from_there_on(start: Start, faults, kept: int) -> None:
    """Traps 3 and 5. Cures: asynchronous loads, and the policy "recompute" in place of vLLM's default "fail"."""
    engine = warmed(start)
    assert engine.scheduler.vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    faults.lose_reads = lambda keys: [index >= kept for index in range(len(keys))]
    assert engine.ask(PROMPT, 20, name="again") == oracle.generate(PROMPT, 20)
    assert engine.reasons["again"] == "length"
    assert engine.computed("again") == len(PROMPT) - 16 * kept + 19
    engine.check_at_rest()
    assert all(engine.pages([*PROMPT, *oracle.generate(PROMPT, 19)]))


@every_runner
def test_a_load_that_failed_is_not_offered_to_that_request_again(start: Start, faults) -> None:
    """Cure: `refused`. Without it a request whose pages are listed but broken would be loaded for ever."""
    engine = warmed(start)
    faults.lose_reads = lambda keys: [True] * len(keys)
    name = engine.add(PROMPT, 5)
    engine.run()
    engine.check_answer(name)
    assert faults.calls["read"] == 1
    assert engine.received == {name: 1}
    faults.lose_reads = None
    assert engine.ask([*PROMPT, 1], name="another") == oracle.generate([*PROMPT, 1], 3)


def test_a_failed_load_beside_a_good_one_and_a_running_request(start: Start, faults) -> None:
    running = list(range(300, 400))
    warm_pool(start, PROMPT, OTHER)
    engine = start()
    faults.lose_reads = lambda keys: [faults.calls["read"] == 1] * len(keys)
    prompts = [PROMPT, OTHER, running]
    engine.check_all(prompts, 20)


def test_a_local_hit_before_a_failed_load_is_kept(start: Start, faults) -> None:
    """The failed blocks that are reported never include those of the local hit, which others may be using."""
    long = [*PROMPT, *range(400, 500)]
    warm_pool(start, long, page_tokens=64)
    engine = start(page_tokens=64)
    engine.ask(PROMPT[:90])
    faults.lose_reads = lambda keys: [True] * len(keys)
    shared = engine.add([*PROMPT[:90], 5], 40)
    engine.run(until=lambda: engine.texts[shared])
    engine.check(long, 3, computed=200 - 80 + 2)
    assert engine.texts[shared] == oracle.generate([*PROMPT[:90], 5], 40)


def test_tokens_of_a_local_hit_are_not_written(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of 64 tokens begins inside the local hit of 80; others may be reading those blocks."""
    long = [*PROMPT, *range(400, 500)]
    warm_pool(start, long, page_tokens=64)
    engine = start(page_tokens=64)
    engine.ask(PROMPT[:90])
    blocks = engine.workers[0].connector._worker.memory.groups[0].blocks
    skipped: dict[int, int] = {}
    load_page = blocks.load_page

    def record(part: Shard, table: list[int], first_token: int, page: object, skip_tokens: int) -> None:
        skipped[first_token] = skip_tokens
        load_page(part, table, first_token, page, skip_tokens)

    monkeypatch.setattr(blocks, "load_page", record)
    assert engine.ask(long) == oracle.generate(long, 3)
    assert skipped == {64: 16, 128: 0}


@every_runner
def test_a_load_always_ends_at_its_deadline(start: Start, faults) -> None:
    """Trap 6. Cure: `Mover.take_ended` gives up what is queued or hangs in the pool; vLLM has no deadline of its own.

    The read goes on later, when the blocks belong to others: it must not write any of them.
    """
    warm_pool(start, PROMPT, OTHER)
    engine = start(extra={"load_deadline_s": 0.05})
    faults.hold_reads()
    engine.check_all([PROMPT, OTHER], 3)
    assert engine.received == {"r0": 1, "r1": 1}
    assert engine.computed("r0") == engine.computed("r1") == len(PROMPT) + 2
    loads = engine.workers[0].connector._worker.prefix._loads
    memory = engine.workers[0].memory.copy()
    faults.release()
    assert loads.stop(30.0)
    assert (engine.workers[0].memory == memory).all()
    engine.finish()
    assert engine.received == {"r0": 1, "r1": 1}


def test_a_pool_that_hangs_is_not_offered_for_a_while(start: Start, faults, monkeypatch) -> None:
    """Cure: `PrefixScheduler.matched_tokens` pauses; every request would wait for its own deadline otherwise."""
    engine = warmed(start, extra={"load_deadline_s": 0.05}, prefix_caching=False)
    faults.hold_reads()
    engine.ask(PROMPT, name="waits")
    engine.ask(PROMPT, name="does not wait")
    assert engine.received == {"waits": 1}
    faults.release()
    monkeypatch.setattr(engine.prefix._lookups, "_stalled_until_s", 0.0)
    engine.ask(PROMPT, name="hits again")
    assert engine.received == {"waits": 1, "hits again": 1}


def test_a_load_that_was_given_up_is_not_reported_when_it_ends_after_all(start: Start, faults, monkeypatch) -> None:
    """Trap 2. Cure: `Job.end`. The late end is that of a miss, which touches no block; the request is long gone."""
    monkeypatch.setattr("vllm_plugin.prefix.lookups._STALL_PAUSE_S", 0.0)
    warm_pool(start, PROMPT, OTHER)
    engine = start(extra={"load_deadline_s": 0.05}, prefix_caching=False)
    faults.hold_reads()
    assert engine.ask(PROMPT, 1) == oracle.generate(PROMPT, 1)
    for view in engine.prefix._views():
        view.own.remove(page_keys(PROMPT, 16))
    faults.release()
    engine.workers[0].connector._worker.prefix._config = msgspec.structs.replace(
        engine.workers[0].connector._worker.prefix._config, load_deadline_s=60.0
    )
    assert engine.ask(OTHER, 1) == oracle.generate(OTHER, 1)
    assert engine.received == {"r0": 1, "r1": 1}
    engine.check_at_rest()


def test_pages_that_arrived_before_the_deadline_are_used(start: Start, faults, monkeypatch) -> None:
    monkeypatch.setattr("store_client.jobs._MOVE_NBYTES", 0)
    monkeypatch.setattr("store_client.jobs._MOVE_PAGES", 2)
    engine = warmed(start)
    loads = engine.workers[0].prefix._loads

    def hold_the_second(keys: Sequence[bytes]) -> list[bool]:
        faults.hold_reads()
        return [False] * len(keys)

    faults.lose_reads = hold_the_second
    name = engine.add(PROMPT)
    engine.run(until=lambda: loads.pending and loads.pending[0].pages == 2)
    loads.pending[0].deadline_s = 0.0
    engine.finish(name, computed=len(PROMPT) - 2 * 16 + 2)
    faults.release()


@pytest.fixture
def landed(faults) -> list[bytes]:
    """Pages that the workers are told of; the others are on their way. The scheduler is told of all."""
    landed: list[bytes] = []

    def answer(keys: Sequence[bytes], found: Lookup) -> Lookup:
        if threading.current_thread().name != "mooncake-connector-load":
            return found
        count = next((index for index, key in enumerate(keys) if key not in landed), len(keys))
        return Lookup(min(count, found.pages), pending=count < len(keys))

    faults.answer = answer
    return landed


@every_runner
def test_a_load_begins_with_the_pages_that_are_there_and_takes_the_others_as_they_land(
    start: Start, landed: list[bytes]
) -> None:
    engine = warmed(start)
    keys = page_keys(PROMPT, 16)
    name = engine.add(PROMPT, 20)
    for count in (2, 3, 6):
        running = engine.add(OTHER, 5)
        engine.run(until=lambda running=running: running in engine.reasons)
        assert not engine.received and engine.texts[name] == []
        landed += keys[len(landed) : count]
        if count < 6:
            (load,) = engine.workers[0].prefix._loads.pending
            engine.run(until=lambda count=count, load=load: load.pages == count)
    engine.finish(name)
    assert engine.computed(name) == 4 + 19 and engine.received == {name: 1}


def test_a_load_of_which_no_more_pages_land_ends_at_its_deadline_and_touches_no_block_from_then_on(
    start: Start, landed: list[bytes]
) -> None:
    engine = warmed(start, extra={"load_deadline_s": 600})
    landed += page_keys(PROMPT, 16)[:2]
    name = engine.add(PROMPT)
    loads = engine.workers[0].prefix._loads
    engine.run(until=lambda: loads.pending and loads.pending[0].pages == 2)
    loads.pending[0].deadline_s = 0.0  # as if nothing had landed for so long
    engine.run()
    engine.check_answer(name, len(PROMPT) - 2 * 16 + 2)
    memory = engine.workers[0].memory.copy()
    landed += page_keys(PROMPT, 16)[2:]
    assert loads.stop(30.0)
    assert (engine.workers[0].memory == memory).all()
    engine.check_at_rest()


def test_a_fault_in_bookkeeping_does_not_keep_a_load_from_starting(start: Start, faults) -> None:
    """Cure: the load is planned before anything else is done; a request whose load is not sent waits for ever."""
    engine = warmed(start)
    faults.raise_in = {"record_lookup"}
    engine.check(PROMPT, computed=4 + 2)


@pytest.mark.parametrize("call", ["lookup", "contains", "read", "write", "space", "record_lookup"])
def test_no_exception_of_the_pool_reaches_the_engine(start: Start, faults, call: str) -> None:
    engine = warmed(start)
    faults.raise_in = {call}
    for number in range(3):
        prompt = [*PROMPT, number]
        assert engine.ask(prompt, 20) == oracle.generate(prompt, 20)
    engine.check_at_rest()


# Preemption


@every_runner
@pytest.mark.parametrize("lost", [False, True])
def test_a_preempted_request_asks_again_and_is_right(start: Start, faults, lost: bool) -> None:
    """Trap 9. Two requests that together need more blocks than there are; the local cache cannot help."""
    engine = start(num_blocks=16, prefix_caching=False, keep_pace=True)
    if lost:
        faults.lose_reads = lambda keys: [True] * len(keys)
    names = [engine.add(prompt, 60) for prompt in (PROMPT, OTHER)]
    engine.finish(*names)
    assert any(engine.requests[name].num_preemptions for name in names)
    assert faults.calls["read"] > 0, "the preempted request did not ask the pool for its pages"
