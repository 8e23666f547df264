"""Inside vLLM's MultiConnector, beside a connector that loads and stores: transfers are ours, whoever else has KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from cases import Start, every_runner
from other_connector import Store, beside_a_store
from pd import (
    PD_ONLY,
    PROMPT,
    Pair,
    every_granularity,
    every_order,
    figures,
    last,
    prefill_params,
    run_all,
    transfers_of,
)
from runner import WrongKV
from simulated.waiting import wait_for
from test_surface import multi
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

NUM_TOKENS = len(PROMPT)
SHARED = PROMPT[:48]
"""Three pages."""


def pair_beside_a_store(start: Start, folders: list[Path], ours_first: bool) -> Pair:
    """Two instances with a store each, whose pools are in `folders`."""
    return Pair(*(beside_a_store(start, one, one, ours_first=ours_first, extra=PD_ONLY) for one in folders))


@pytest.fixture
def folders(pool: Path) -> list[Path]:
    return [pool, pool.with_name("other")]


def warmed(start: Start, folder: Path) -> None:
    """The pool there has the first pages of the prompt."""
    engine = start(extra={"pool": str(folder)})
    engine.ask(SHARED)
    engine.shut_down()


@every_runner
def test_beside_a_connector_that_does_not_know_several_groups(start: Start, pool: Path, tmp_path: Path) -> None:
    settings = {"transfer": multi(pool, tmp_path), "hybrid_manager_off": True}
    both = Pair(start(**settings), start(**settings))
    both.ask(PROMPT, computed=1 + 2)


@every_runner
@every_order
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours-first", "ours-second"])
def test_what_another_connector_loaded_at_prefill_travels_with_the_rest(
    start: Start, folders: list[Path], order: str, ours_first: bool
) -> None:
    warmed(start, folders[0])
    both = pair_beside_a_store(start, folders, ours_first=ours_first)
    name = both.ask(PROMPT, order=order)
    assert both.prefill.computed(last(both.prefill)) == NUM_TOKENS - 48
    assert both.decode.computed(name) == 1 + 2
    assert figures(both.decode)["fetched_tokens"] == NUM_TOKENS
    both.check_at_rest()


@every_runner
@every_order
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours-first", "ours-second"])
def test_the_first_connector_that_has_something_at_decode_brings_it(
    start: Start, folders: list[Path], order: str, ours_first: bool
) -> None:
    """Where that is not ours, the prefill instance is told that nobody wants its KV."""
    warmed(start, folders[1])
    both = pair_beside_a_store(start, folders, ours_first=ours_first)
    both.ask(PROMPT, order=order, computed=(1 if ours_first else NUM_TOKENS - 48) + 2)
    both.finish()


@every_runner
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours-first", "ours-second"])
def test_a_prefill_leg_that_is_aborted_while_another_connector_loads(
    start: Start, folders: list[Path], faults: Any, ours_first: bool
) -> None:
    """vLLM forgets it when the load has ended, and would end itself over any word of ours after that."""
    warmed(start, folders[0])
    both = pair_beside_a_store(start, folders, ours_first=ours_first)
    faults.hold_reads()
    name = both.add_granted(PROMPT)
    leg = last(both.prefill)
    run_all(both.prefill, until=faults.reading.is_set)
    both.prefill.abort(leg)
    both.prefill.steps(3)
    faults.release()
    both.finish(name, computed=NUM_TOKENS + 2)


@every_runner
def test_a_decode_leg_that_is_aborted_while_it_fetches(start: Start, folders: list[Path]) -> None:
    both = pair_beside_a_store(start, folders, ours_first=False)
    name = both.add_granted(PROMPT)
    both.decode.abort(name)
    both.finish()
    assert both.decode.texts[name] == []


def test_where_another_connector_shakes_hands_first_transfers_are_left_to_it(
    start: Start, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MultiConnector passes on what the first one says; two answers to one request would end the engine."""
    monkeypatch.setattr(Store, "get_handshake_metadata", lambda self: KVConnectorHandshakeMetadata())
    both = pair_beside_a_store(start, folders, ours_first=False)
    name = both.prefill.add(PROMPT, 3, params=prefill_params())
    run_all(both.prefill)
    both.prefill.check_answer(name)
    assert both.prefill.answers[name] is None
    both.prefill.check_at_rest()


class Breaking(Store):
    """Another one, whose first load is part of the step that computes the rest, and fails."""

    failed: ClassVar[set[int]] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return (48, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.failed.update(blocks.get_block_ids()[0][:3])

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = set(self.failed)
        self.failed.clear()
        return failed


@every_granularity
def test_what_was_computed_from_a_load_that_failed_is_not_handed_over(
    start: Start, pool: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch, granularity: str
) -> None:
    """vLLM hears of the failure after the step, when all of it may have travelled, and computes the request again."""
    monkeypatch.setitem(KVConnectorFactory._registry, "Store", lambda: Breaking)
    extra = PD_ONLY | {"granularity": granularity}
    prefill = beside_a_store(start, folders[0], folders[0], extra=extra)
    both = Pair(prefill, start(extra=extra))
    runner, wrong = prefill.workers[0].runner, set[str]()
    attend, sample = runner._attend, runner._sample

    def attend_to_anything(group: Any, number: int, one: Any, part: Any) -> None:
        try:
            attend(group, number, one, part)
        except WrongKV:  # it leaves what it computes as wrong as that
            wrong.add(one.req_id)

    def sample_what_is_right(one: Any) -> list[int]:
        if one.req_id not in wrong:
            return sample(one)
        wrong.remove(one.req_id)
        return []

    monkeypatch.setattr(runner, "_attend", attend_to_anything)
    monkeypatch.setattr(runner, "_sample", sample_what_is_right)
    name = both.add_granted(PROMPT)
    prefill.step()
    sessions = [session for one in transfers_of(prefill) for session in one.sessions.values()]
    wait_for(lambda: all(one.ending or (one.sent and not one.writing) for one in sessions))
    both.finish(name, computed=NUM_TOKENS + 2)
    assert prefill.computed(last(prefill)) == NUM_TOKENS
