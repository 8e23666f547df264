"""Models with several KV-cache groups on several pipeline stages: which layers these have, and who reads what of whom.

In models of one layer a group each stage has none of some groups.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cases import PROMPT, Start, steady_runners
from harness import Engine
from mixes import MIXES, full, state, window
from settings import Setup, kv_cache_configs, vllm_config
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import page_keys
from vllm_plugin import stages
from vllm_plugin.geometry import Unsupported
from vllm_plugin.kv_groups import read_geometry

GENEROUS = {"extra": {"state_budget": 1024}}
every_mix = pytest.mark.parametrize("mix", MIXES)


def settings(mix: str, pp_size: int, layers_a_group: int = 2) -> dict[str, Any]:
    return {"kv_spec": MIXES[mix], "pp_size": pp_size, "layers_a_group": layers_a_group, **GENEROUS}


def held(engine: Engine) -> list[list[bool]]:
    """Which of the prompt's pages each group has, in all stages' shards."""
    return [engine.pages(PROMPT, group=at) for at in range(len(engine.prefix._geometry.groups))]


@every_mix
@pytest.mark.parametrize("layers_a_group", [1, 2])
@pytest.mark.parametrize(("wrote", "reads"), [(2, 2), (1, 2), (2, 1), (3, 2)])
def test_an_instance_goes_on_from_what_one_with_any_number_of_stages_stored(
    start: Start, faults, mix: str, layers_a_group: int, wrote: int, reads: int
) -> None:
    wrote = min(wrote, layers_a_group * len(MIXES[mix]))
    engine = start(**settings(mix, wrote, layers_a_group))
    engine.check(PROMPT, 3)
    engine.shut_down()
    num_pages = sum(faults.written.values())
    engine = start(**settings(mix, reads, layers_a_group))
    engine.check(PROMPT, 10, computed=4 + 9)
    assert engine.num_pages() == num_pages, "pages that other stages cover were stored again"
    if wrote == reads:
        assert all(any(pages) for pages in held(engine))


@steady_runners
@every_mix
def test_what_vllms_own_cache_has_is_added_to(start: Start, mix: str, runner: object) -> None:
    first = start(**settings(mix, 2), retention_tokens=None)
    first.check(PROMPT, 3)
    first.shut_down()
    engine = start(**settings(mix, 2), retention_tokens=None)
    engine.check(PROMPT[:50], 3)
    engine.check(PROMPT, 20, computed=4 + 19)
    engine.check([*PROMPT, *range(200, 230)], 3)


@every_mix
def test_a_page_that_one_stage_has_lost_ends_the_hit_of_all(start: Start, mix: str) -> None:
    first = start(**settings(mix, 2))
    first.check(PROMPT, 3)
    first.shut_down()
    for group in range(len(MIXES[mix])):
        for stage in range(2):
            engine = start(**settings(mix, 2))
            engine.check(PROMPT, 3, computed=4 + 2)
            assert engine.scheduler.reset_prefix_cache()
            view = engine.prefix._views(group)[stage]
            assert view.own.remove(page_keys(PROMPT, 16)) > 0
            name = engine.answer(PROMPT, 3)
            rest = len(PROMPT) - 96 if (mix, group) == ("chunked", 1) else len(PROMPT)
            assert engine.computed(name) == rest + 2, f"group {group} of stage {stage}"
            engine.finish(name)
            engine.shut_down()


@steady_runners
@pytest.mark.parametrize("layers_a_group", [1, 2])
@every_mix
def test_a_page_that_one_stage_loses_while_it_loads_is_computed_by_all(
    start: Start, faults, mix: str, layers_a_group: int
) -> None:
    first = start(**settings(mix, 2, layers_a_group))
    first.check(PROMPT, 3)
    first.shut_down()
    engine = start(**settings(mix, 2, layers_a_group))
    shard = engine.prefix._views(0)[-1].shard
    faults.lose_reads_of = {shard: 0}
    engine.check(PROMPT, 10, computed=len(PROMPT) + 9)


def test_stages_and_ranks_divide_a_page_and_each_part_has_one_writer(start: Start, faults) -> None:
    mix = [full(heads=1), window(40, heads=1), state(heads=1)]
    one = {"kv_spec": mix, "layers_a_group": 2, "tp_size": 2, **GENEROUS}
    engine = start(**one, pp_size=2)
    engine.check(PROMPT, 3)
    assert set(faults.written.values()) <= {1, 2, 3}, "each group's page has a name of its own"
    cells = {(shard.layer_start, shard.layer_stop, shard.head_start) for shard, _ in faults.written}
    assert cells == {(layer, layer + 1, head) for layer in range(2) for head in range(2)}
    engine.shut_down()
    engine = start(**one)
    engine.check(PROMPT, 20, computed=4 + 19)


def test_stages_may_have_any_part_of_a_group(start: Start) -> None:
    """Three groups of three layers on two stages: five and four."""
    engine = start(**settings("all", 2, 3))
    groups = engine.prefix._geometry.groups
    assert [group.stages for group in groups] == [(2, 1), (2, 1), (1, 2)]
    assert [group.layers for group in groups] == [(0, 3, 6), (1, 4, 7), (2, 5, 8)]
    engine.check(PROMPT, 3)
    assert groups[2].shards() == [Shard(0, 1, 0, 1), Shard(1, 3, 0, 1)]


# What vLLM tells of the other stages


@pytest.fixture
def configs(base_config: Any, pool: Any) -> tuple[Any, Any, list[Any]]:
    """vLLM's settings, and the configurations of the scheduler and of each worker."""
    setup = Setup(kv_spec=MIXES["all"], pp_size=2, layers_a_group=2)
    config = vllm_config(setup, base_config, pool)
    return config, *kv_cache_configs(setup, config)


def test_both_processes_read_the_same_geometry(configs: tuple[Any, Any, list[Any]]) -> None:
    config, scheduler, workers = configs
    found = [read_geometry(config, scheduler)]
    for rank, worker in enumerate(workers):
        config.parallel_config.rank = rank
        found.append(read_geometry(config, worker))
    assert len({(one.compatibility(), tuple(str(group.identity) for group in one.groups)) for one in found}) == 1
    assert [[group.layer_names for group in one.groups] for one in found[1:]] == [
        [tuple(names) for names in stage] for stage in stages.stages_of(config, workers[1])
    ]


def test_groups_have_the_same_names_for_any_number_of_stages(
    configs: tuple[Any, Any, list[Any]], base_config: Any, pool: Any
) -> None:
    config, scheduler, _ = configs
    alone = Setup(kv_spec=MIXES["all"], layers_a_group=2)
    whole = vllm_config(alone, base_config, pool)
    one, two = read_geometry(whole, kv_cache_configs(alone, whole)[0]), read_geometry(config, scheduler)
    assert one.compatibility() == two.compatibility()
    assert [group.identity for group in one.groups] == [group.identity for group in two.groups]


def test_where_vllm_does_not_tell_the_model_is_left_alone(configs: tuple[Any, Any, list[Any]]) -> None:
    config, scheduler, workers = configs
    config.parallel_config.rank = 1
    with pytest.raises(Unsupported, match=r"3 KV-cache groups on several pipeline ranks.* did not say which layers"):
        read_geometry(config, scheduler)  # another stage's
    delattr(workers[1], stages._FIELD)
    with pytest.raises(Unsupported, match="did not say which layers"):
        read_geometry(config, workers[1])


def test_a_stage_whose_layers_come_between_those_of_another_is_refused() -> None:
    """As those of a draft model on the last stage, whose numbers begin at 0."""
    with pytest.raises(Unsupported, match="come before those of an earlier one"):
        stages.layers_of(["layers.0"], [["layers.0", "layers.2"], ["layers.1"]])


def test_vllm_tells_of_all_stages_where_its_engine_makes_the_configurations(
    configs: tuple[Any, Any, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _, workers = configs
    for worker in workers:
        delattr(worker, stages._FIELD)
    for module in (kv_cache_utils, core):
        monkeypatch.setattr(module, "get_kv_cache_configs", lambda *args: workers)
    for _ in range(2):
        stages.watch()
    assert core.get_kv_cache_configs(config, [], []) is workers
    for rank, worker in enumerate(workers):
        config.parallel_config.rank = rank
        assert stages.stages_of(config, worker)
    one_stage = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=1))
    others = [SimpleNamespace(kv_cache_groups=[])]
    stages.tell(one_stage, others)
    assert vars(others[0]) == {"kv_cache_groups": []}
