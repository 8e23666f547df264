"""Weights that change in memory: pages are named by what the workers read there, and by nothing until they have."""

from __future__ import annotations

from collections.abc import Callable
from pickle import dumps, loads

import oracle
import pytest
from cases import PROMPT, Start, begin_load, begin_save, every_runner
from core import Core
from harness import Engine

from mooncake_connector.kv.keys import page_keys, root_digest
from vllm_plugin.weights import calls
from vllm_plugin.weights.worker import WeightsReader, read_weights

HIT = 4 + 2
"""Tokens computed for PROMPT and its answer where its six pages come from the pool."""
MISS = len(PROMPT) + 2

Begin = Callable[..., tuple[Engine, Core]]


@pytest.fixture
def begin(start: Start, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Starts an engine whose core has a process of its own."""
    monkeypatch.setattr(calls, "_has_own_process", lambda core: True)

    def begin(**settings: object) -> tuple[Engine, Core]:
        engine = start(**settings)
        return engine, Core(engine)

    return begin


@pytest.mark.parametrize("runner", [{"tp_size": 2}, {"pp_size": 2}])
@pytest.mark.parametrize("before", [True, False])
def test_the_same_weights_have_the_pages_of_before(begin: Begin, before: bool, runner: dict[str, int]) -> None:
    """As after `sleep` and `wake_up`; also where they were written again."""
    engine, core = begin(**runner)
    engine.check(PROMPT)
    name = engine.prefix.namespace().digest
    if before:
        core.load(0)
    assert core.reset()
    engine.check(PROMPT, computed=HIT)
    assert engine.prefix.namespace().digest == name


@every_runner
@pytest.mark.parametrize("order", ["update, reset", "reset, update", "update, reset of vLLM's own cache"])
def test_instances_with_the_same_new_weights_share_and_read_none_of_the_old(begin: Begin, start, order: str) -> None:
    engine, core = begin()
    engine.check(PROMPT)
    for call in order.split(", "):
        if call == "update":
            core.load(1)
        else:
            assert core.reset(connector=call == "reset")
    engine.check(PROMPT, computed=MISS)
    assert not engine.prefix.namespace().is_private
    other, its_core = begin()
    assert its_core.reset()
    its_core.load(1)
    other.check(PROMPT, computed=HIT)
    of_the_files = start()
    of_the_files.check(PROMPT, computed=HIT)


def test_weights_that_come_back_have_their_pages_again(begin: Begin) -> None:
    engine, core = begin()
    for weights, computed in [(0, MISS), (1, MISS), (2, MISS), (1, HIT), (0, HIT)]:
        core.load(weights)
        assert core.reset()
        engine.check(PROMPT, computed=computed)


def test_pages_computed_before_the_answer_are_stored_when_it_is_there(begin: Begin) -> None:
    engine, core = begin()
    core.load(1)
    assert core.reset()
    name = engine.add(PROMPT, 3)
    engine.step()
    assert engine.metadata[-1].read_weights and engine.prefix.namespace() is not None
    engine.finish(name)
    assert all(engine.pages(PROMPT, weights=1))


@every_runner
def test_an_update_without_a_reset_is_noticed(begin: Begin) -> None:
    engine, core = begin(prefix_caching=False)
    engine.check(PROMPT)
    core.load(1)
    engine.check(PROMPT, computed=MISS)
    engine.check(PROMPT, computed=HIT)
    assert engine.prefix.weights.taints, "vLLM's own cache was not emptied"
    assert core.reset(connector=False)
    assert not engine.prefix.weights.taints


def test_what_hangs_on_kv_of_former_weights_in_vllms_own_cache_is_not_stored(begin: Begin, monkeypatch) -> None:
    """vLLM goes on with it: nobody has emptied its cache."""
    engine, core = begin()
    engine.check(PROMPT)
    core.load(1)
    engine.check(PROMPT[::-1])
    monkeypatch.setattr(engine.workers[0].runner, "_attend", lambda *args: None)
    longer = [*PROMPT, *range(200, 300)]
    engine.ask(longer)
    assert engine.computed("r2") < len(longer), "there was no local hit"
    assert not any(engine.prefix._views()[0].contains(keys_of(engine, longer)))


def keys_of(engine: Engine, tokens: list[int]) -> list[bytes]:
    return page_keys(tokens, engine.setup.page_tokens, root=root_digest(None, None))


@every_runner
def test_a_request_that_goes_on_over_an_update_is_not_stored(begin: Begin) -> None:
    engine, core = begin(keep_pace=True)
    name = engine.add(PROMPT, 60)
    engine.run(until=lambda: len(engine.texts[name]) >= 5)
    core.load(1)
    engine.run()
    engine.settle()
    tokens = [*PROMPT, *engine.texts[name]]
    assert not any(engine.prefix._views()[0].contains(keys_of(engine, tokens)))


@every_runner
def test_two_resets_in_a_row_and_an_update_between_steps(begin: Begin) -> None:
    engine, core = begin()
    engine.check(PROMPT)
    assert core.reset() and core.reset()
    core.load(1)
    assert core.reset(running=True)
    engine.check(PROMPT, computed=MISS)
    core.load(0)
    core.load(1)
    engine.scheduler.reset_prefix_cache()
    engine.check(PROMPT, computed=HIT)


@every_runner
def test_weights_are_not_read_while_the_engine_only_collects_its_saves(begin: Begin, faults) -> None:
    """`pause` resets, and weights change behind it: a step in between does not say what comes."""
    engine, core = begin()
    faults.hold_writes()
    name = engine.answer(PROMPT)
    engine.run(until=faults.writing.is_set)
    assert core.reset()
    engine.steps(3)
    assert not any(step.read_weights for step in engine.metadata)
    core.load(1)
    faults.release()
    engine.run()
    assert name in engine.reasons and engine.prefix.weights.unknown
    engine.check(PROMPT, computed=MISS)
    assert all(engine.pages(PROMPT, weights=1))


@every_runner
def test_a_save_under_way_ends_in_the_namespace_of_its_weights(begin: Begin, start, faults) -> None:
    engine, core = begin()
    name = begin_save(engine, faults, max_tokens=3)
    engine.run(until=lambda: name in engine.reasons)
    core.load(1)
    core.reset()
    faults.release()
    engine.run()
    engine.check(PROMPT, computed=MISS)
    start().check(PROMPT, computed=HIT)


@every_runner
def test_a_load_under_way_makes_vllm_refuse_and_what_it_brings_is_not_stored_again(begin: Begin, start, faults) -> None:
    start().check(PROMPT)
    engine, core = begin()
    name = begin_load(engine, faults, 40)
    assert not core.reset()
    faults.release()
    engine.run(until=lambda: name in engine.reasons)
    engine.run()
    core.load(1)
    assert core.reset()
    engine.check(PROMPT, computed=MISS)


def test_workers_that_do_not_answer_are_not_waited_for_long(begin: Begin, monkeypatch, caplog) -> None:
    engine, core = begin()
    core.load(0)
    monkeypatch.setattr(engine.workers[0].side.weights, "before_step", lambda metadata: None)
    assert core.reset()
    engine.check(PROMPT, 40, computed=MISS + 37)
    assert engine.prefix.namespace().is_private and "did not answer" in caplog.text


@pytest.mark.parametrize("equal", [True, False])
def test_only_pages_of_the_weights_in_memory_stay_announced(begin: Begin, equal: bool) -> None:
    engine, core = begin(events=True)
    engine.check(PROMPT)
    announced = engine.prefix._announced._pages
    assert announced.keys() == {*keys_of(engine, PROMPT)}
    core.load(0 if equal else 1)
    engine.check(PROMPT[::-1])
    assert announced.keys() == {*keys_of(engine, PROMPT[::-1]), *(keys_of(engine, PROMPT) if equal else ())}


@pytest.mark.parametrize("fails", ["at first", "later", "silently"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_read_its_weights_leaves_the_instance_to_itself(
    begin: Begin, start, monkeypatch, caplog, fails: str, rank: int
) -> None:
    engine, core = begin(tp_size=2)
    engine.check(PROMPT)

    def refuse() -> None:
        raise RuntimeError("no memory is left")

    if fails == "at first":
        monkeypatch.setattr(engine.workers[rank], "get_model", refuse)
    core.load(1)
    if fails == "later":
        monkeypatch.setattr(engine.workers[rank], "get_model", refuse)
    if fails == "silently":
        monkeypatch.setattr(engine.workers[rank].side.weights, "take", lambda: None)
    assert core.reset()
    engine.check(PROMPT, 40, computed=MISS + 37)
    assert engine.prefix.namespace().is_private
    assert caplog.text.count("cannot be read") == 1
    assert core.reset(connector=False)
    engine.check(PROMPT, computed=HIT)
    start(tp_size=2).check(PROMPT, computed=HIT)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_answers_whatever_happens(begin: Begin, monkeypatch, rank: int) -> None:
    """vLLM's executor reads no further answer than one that failed, and the next call has the others'."""
    engine, core = begin(tp_size=2)
    monkeypatch.setattr(engine.workers[rank].side, "weights", None)
    said = core._call(read_weights)
    assert said.pop(rank) is None and said[0].ranks == 1
    assert loads(dumps(read_weights)) is read_weights, "it is sent by its name"


def test_a_reset_of_vllms_own_cache_alone_reads_nothing(begin: Begin) -> None:
    engine, core = begin()
    engine.check(PROMPT)
    assert core.reset(connector=False)
    engine.check(PROMPT, computed=HIT)
    assert not engine.prefix.weights.watched


def test_an_engine_in_its_users_process_is_left_to_itself(start: Start) -> None:
    """There weights may change past vLLM's calls."""
    engine = start()
    core = Core(engine)
    core.load(0)
    assert core.reset()
    engine.check(PROMPT)
    assert engine.prefix.namespace().is_private


def test_a_reader_that_nobody_told_of_a_worker_says_so(start: Start) -> None:
    reader: WeightsReader = start().workers[0].side.weights
    assert reader._read(7).cause


def test_oracle_tells_weights_apart() -> None:
    assert oracle.generate(PROMPT, 3, 0) != oracle.generate(PROMPT, 3, 1) != oracle.generate(PROMPT, 3, 2)
