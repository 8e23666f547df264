"""Inside vLLM's MultiConnector, beside a connector that loads and stores: transfers are ours, whoever else has KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import Start, every_runner
from other_connector import Store, beside_a_store
from pd import PD_ONLY, PROMPT, Pair, every_order, figures, last, prefill_params, run_all
from test_surface import multi
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
