"""Speculative decoding: tokens that are proposed and refused leave KV behind that is nobody's, and is never stored."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
from cases import Interruption, Start
from harness import Engine
from mixes import chunked, full, state, window
from settings import Setup, kv_cache_config, layer_names, vllm_config
from test_hybrid_walk import store_one
from test_walk import check_answers, check_pool, prompts, walk
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

import vllm_plugin.identity
from mooncake_connector.config.schema import Config
from vllm_plugin.identity import instance_namespace
from vllm_plugin.kv_groups import read_geometry
from vllm_plugin.prefix.states import StatePlanner

SPECS: dict[str, Any] = {
    "plain": None,
    "window": [full(), window(20)],
    "windows": [window(40), full(), window(17)],
    "chunks": [full(), chunked(32)],
}
STATES: dict[str, Any] = {
    "states": lambda drafts: [full(), state(drafts=drafts), state(drafts=drafts)],
    "a window and a state": lambda drafts: [full(), window(20), state(drafts=drafts)],
}
GENEROUS = {"extra": {"state_budget": 1024}}
PROMPT = [random.Random(11).randrange(oracle.VOCAB) for _ in range(100)]
every_runner = pytest.mark.parametrize("v2_runner", [False, True])
"""vLLM proposes n-grams after the step that they follow, so never with asynchronous scheduling."""


@pytest.fixture
def _weightless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model here has files with weights."""
    monkeypatch.setattr(vllm_plugin.identity, "weights_digest", lambda model, *rest: f"weights of {model}")


@every_runner
@pytest.mark.parametrize("name", SPECS)
def test_pages_that_end_among_refused_tokens_hold_what_was_said_in_their_place(
    start: Start, name: str, v2_runner: bool
) -> None:
    for drafts in (1, 3, 20):
        engine = start(kv_spec=SPECS[name], drafts=drafts, v2_runner=v2_runner, retention_tokens=None)
        engine.check(PROMPT, 90)
        text = [*PROMPT, *oracle.generate(PROMPT, 90)]
        assert engine.num_pages() >= 10
        for group in range(
            len(engine.prefix._geometry.groups)
        ):  # looks at every byte; windows leave pages behind
            assert sum(engine.pages(text, group=group)) >= (1 if group else 10)
            for view in engine.prefix._views(group):
                view.clear()
        engine.shut_down()


@every_runner
@pytest.mark.parametrize("name", SPECS)
def test_others_go_on_from_there_whether_they_propose_or_not(start: Start, name: str, v2_runner: bool) -> None:
    for drafts in (3, 0):
        engine = start(kv_spec=SPECS[name], drafts=drafts, v2_runner=v2_runner)
        engine.check(PROMPT, 60)
        engine.shut_down()
        engine = start(kv_spec=SPECS[name], drafts=3 - drafts, v2_runner=v2_runner)
        engine.check(PROMPT, 60)
        assert engine.prefills["r0"].num_external_cached_tokens == 96
        engine.prefix._views()[0].clear()
        engine.shut_down()


@pytest.mark.usefixtures("_weightless")
@pytest.mark.parametrize(
    ("name", "v2_runner", "proposer"),
    [
        ("plain", False, "ngram"),
        ("windows", True, "ngram"),
        ("chunks", False, "ngram"),
        ("windows", False, "eagle"),
        ("states", False, "mtp"),
        ("a window and a state", True, "ngram"),
    ],
)
def test_random_walk(
    start: Start, faults, name: str, v2_runner: bool, proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_plugin.prefix.lookups._STALL_PAUSE_S", 0.1)
    rng = random.Random(f"drafts {name}")
    engine = start(
        kv_spec=STATES[name](4) if name in STATES else SPECS[name], drafts=4, proposer=proposer, v2_runner=v2_runner,
        num_blocks=64 if name in STATES else 48, max_num_batched_tokens=96,
        extra={"load_deadline_s": 0.05, "save_deadline_s": 0.25, "state_budget": 1024},
    )  # fmt: skip
    interruption = Interruption(monkeypatch)
    faults.lose_reads = lambda keys: [rng.random() < 0.03 for _ in keys]
    walk(engine, faults, rng, prompts(rng), interruption, monkeypatch, num_requests=40)
    interruption.event.set()
    store_one(engine, monkeypatch)
    check_answers(engine)
    assert check_pool(engine) > 0
    drafted = [stats.spec_decoding_stats for stats in engine.stats if stats.spec_decoding_stats is not None]
    assert sum(one.num_draft_tokens for one in drafted) > sum(one.num_accepted_tokens for one in drafted) > 0


PROPOSERS = ("eagle", "draft_model")
GROUPS = {
    "the draft in a window": [full(), window(20)],
    "the draft in full attention": [window(40), full()],
    "two windows": [full(), window(17), window(40)],
}


@pytest.mark.usefixtures("_weightless")
@every_runner
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("name", GROUPS)
def test_layers_of_a_draft_model_are_stored_and_loaded_with_the_group_that_they_are_in(
    start: Start, name: str, proposer: str, v2_runner: bool
) -> None:
    """What the proposer attends to has to be there like all else, or few of its tokens are accepted (vllm#54926)."""
    settings: dict[str, Any] = {"kv_spec": GROUPS[name], "drafts": 3, "proposer": proposer, "v2_runner": v2_runner}
    engine = start(**settings)
    engine.check(PROMPT, 60)
    engine.shut_down()
    engine = start(**settings)
    engine.check(PROMPT, 60)
    assert engine.prefills["r0"].num_external_cached_tokens == 96
    assert engine.scheduler.reset_prefix_cache()
    for group in range(len(GROUPS[name])):
        for view in engine.prefix._views(group):
            assert view.clear() > 0
        name_of_request = engine.add(PROMPT, 4)
        engine.finish(name_of_request)
        cached = engine.prefills[name_of_request].num_external_cached_tokens
        assert cached == 0, "without any of them, the draft's too, there is no hit"
        assert engine.scheduler.reset_prefix_cache()


@pytest.mark.usefixtures("_weightless")
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_what_vllms_own_cache_has_and_gives_up_for_a_draft_comes_from_the_pool(start: Start, proposer: str) -> None:
    """For EAGLE vLLM takes the last block off its own hits; the rest of the prompt is loaded behind it."""
    engine = start(kv_spec=GROUPS["two windows"], drafts=3, proposer=proposer, retention_tokens=None)
    engine.check(PROMPT, 20)
    name = engine.add([*PROMPT, *range(300, 330)], 20)
    engine.finish(name)
    seen = engine.prefills[name]
    assert seen.num_cached_tokens == 96
    assert (seen.num_external_cached_tokens > 0) == (proposer == "eagle")


def held(engine: Engine, text: list[int]) -> list[list[int]]:
    """After which tokens of a text the pool has a state, for each group that keeps one; looks at every byte."""
    groups = enumerate(engine.prefix._geometry.groups)
    found = [engine.pages(text, group=at) for at, group in groups if group.kind == "state"]
    return [[16 * (page + 1) for page, there in enumerate(one) if there] for one in found]


@every_runner
@pytest.mark.parametrize("proposer", ["ngram", "mtp"])
@pytest.mark.parametrize("name", STATES)
def test_states_are_those_that_a_prompt_left_and_never_one_of_a_proposal(
    start: Start, name: str, proposer: str, v2_runner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though vLLM offers one at each boundary: it moves them when it knows which proposals were right."""
    monkeypatch.setattr(vllm_plugin.identity, "weights_digest", lambda model, *rest: f"weights of {model}")
    for drafts in (1, 3, 15):
        settings: dict[str, Any] = {"kv_spec": STATES[name](drafts), "drafts": drafts, "proposer": proposer}
        settings |= {"v2_runner": v2_runner, "retention_tokens": None, "model_id": f"{drafts}"} | GENEROUS
        engine = start(**settings)
        engine.check(PROMPT, 90)
        text = [*PROMPT, *oracle.generate(PROMPT, 90)]
        assert {max(ends) for ends in held(engine, text)} == {96 if proposer == "ngram" else 80}
        engine.shut_down()
        engine = start(**settings)
        name_of_request = engine.add([*PROMPT, *range(300, 330)], 60)
        engine.finish(name_of_request)
        assert engine.prefills[name_of_request].num_external_cached_tokens == (96 if proposer == "ngram" else 80)
        engine.shut_down()


def test_the_state_that_a_step_with_proposals_leaves_is_another_ones(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: behind its forward pass vLLM has not moved it yet, and the pool would have it under a wrong name."""
    monkeypatch.setattr(StatePlanner, "_certain", lambda planner, request, offers, scheduled: offers)
    engine = start(kv_spec=STATES["states"](3), drafts=3, retention_tokens=None, num_blocks=128, **GENEROUS)
    wrong = 0
    for count in range(90, 100):
        engine.ask(PROMPT[:count], 60)
        try:
            held(engine, [*PROMPT[:count], *oracle.generate(PROMPT[:count], 60)])
        except AssertionError as error:
            wrong += "holds other KV" in str(error)
    assert wrong > 0


def test_layers_of_a_draft_model_are_part_of_the_page(base_config: Any, pool: Path) -> None:
    """EAGLE and MTP of a plain model: they are in its one group, which is stored and handed over whole (vllm#54926)."""
    setup = Setup()
    config, cache = vllm_config(setup, base_config, pool), kv_cache_config(setup)
    names = [*layer_names(), "model.layers.2.self_attn.attn"]
    drafting = KVCacheConfig(4, [], [KVCacheGroupSpec(names, cache.kv_cache_groups[0].kv_cache_spec, True)])
    (group,) = read_geometry(config, drafting).groups
    assert (group.num_layers, group.layer_names) == (3, tuple(names))


DRAFTING = Setup(drafts=3, proposer="eagle")


@pytest.mark.parametrize("changes", [{"setup": replace(DRAFTING, proposer="mtp")}, {"draft": "other"}], ids=str)
def test_pages_with_layers_of_a_draft_model_are_those_of_its_weights(
    base_config: Any, pool: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(vllm_plugin.identity, "weights_digest", lambda model, *rest: f"weights of {model}")
    cache = kv_cache_config(Setup())

    def digest(setup: Setup = DRAFTING, draft: str = "draft") -> bytes:
        config = vllm_config(setup, base_config, pool)
        if config.speculative_config is not None:
            config.speculative_config.draft_model_config.model = draft
        return instance_namespace(config, read_geometry(config, cache), Config()).digest

    assert len({digest(), digest(**changes), digest(Setup())}) == 3
