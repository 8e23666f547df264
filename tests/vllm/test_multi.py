"""Inside vLLM's MultiConnector, beside connectors that load: only what a forward pass has seen is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import PROMPT, Start, begin_load, every_runner, warm_pool
from harness import Engine
from other_connector import Store, beside_a_store
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from mooncake_connector.kv.keys import page_keys

COLD = list(range(200, 300))


@pytest.fixture
def other(pool: Path) -> Path:
    """The pool of the other connector."""
    return pool.with_name("other")


@every_runner
def test_abort_while_another_connector_loads_saves_nothing_of_what_has_not_arrived(
    start: Start, pool: Path, other: Path, faults: Any
) -> None:
    """vLLM counts tokens as computed from the moment on that their load is planned."""
    warm_pool(start, extra={"pool": str(other)})
    engine = beside_a_store(start, pool, other)
    name = begin_load(engine, faults)
    engine.abort(name)
    engine.steps(3)
    faults.release()
    engine.finish()
    assert engine.num_pages() == 0


@every_runner
def test_what_another_connector_loaded_is_saved_with_the_rest(start: Start, pool: Path, other: Path) -> None:
    warm_pool(start, PROMPT[:48], extra={"pool": str(other)})
    engine = beside_a_store(start, pool, other)
    engine.check(PROMPT, computed=len(PROMPT) - 48 + 2)
    assert engine.pages(PROMPT) == [True] * 6


class AtOnce(Store):
    """Another one, which loads the first blocks of a prompt in the step that computes the others."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return (48, False) if request.all_token_ids[0] == PROMPT[0] and not num_computed_tokens else (0, False)


@pytest.fixture(params=[False, True], ids=["v1", "v2"])
def engine(
    request: pytest.FixtureRequest, start: Start, pool: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> Engine:
    """With asynchronous scheduling, beside that one."""
    monkeypatch.setitem(KVConnectorFactory._registry, "Store", lambda: AtOnce)
    return beside_a_store(start, pool, other, v2_runner=request.param, async_scheduling=True, lazy=True)


def saved(engine: Engine) -> list[list[bytes]]:
    """Keys of each save that was planned."""
    return [job.keys for step in engine.metadata for job in step.metadata[1].saves]


def test_what_another_connector_loads_in_the_same_step_is_not_saved(engine: Engine) -> None:
    """The next step is planned as well before vLLM hears that the load failed."""
    loading, cold = engine.add(PROMPT), engine.add(COLD)
    for _ in range(2):
        engine.begin_step()
    for name in (loading, cold):
        engine.abort(name)
    engine.begin_step()
    assert saved(engine) == [page_keys(COLD, 16)]


def test_what_another_connector_may_have_loaded_is_not_saved_for_a_request_that_hits_it(engine: Engine) -> None:
    """vLLM gives such blocks away as a local hit before it hears whether the load failed."""
    for _ in range(2):
        engine.add(PROMPT)
        engine.begin_step()
    engine.begin_step()
    assert saved(engine) == []
