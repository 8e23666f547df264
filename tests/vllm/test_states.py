"""Models that keep states: which are stored, what goes on from one, and that a wrong one is noticed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import oracle
import pytest
from cases import Start, begin_save, every_runner
from harness import Engine
from mixes import full, state, window
from runner import WrongKV

from mooncake_connector.kv.keys import page_keys
from store_client.testing import get_pages, put_pages

STATES = [full(), state(), state()]
MIXED = [full(), window(20), state()]
MIXES = {"states": STATES, "state and window": MIXED}
PROMPT = [random.Random(5).randrange(oracle.VOCAB) for _ in range(100)]
KEY = page_keys(PROMPT, 16)[5]
"""Of the state after 96 of its tokens."""
GENEROUS = {"extra": {"state_budget": 1024}}
every_mix = pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)


def states(engine: Engine, tokens: list[int]) -> list[int]:
    """Tokens after which the pool has a state of every group that keeps one."""
    size, groups = engine.setup.page_tokens, engine.prefix._geometry.groups
    held = [engine.pages(tokens, group=at) for at, group in enumerate(groups) if group.kind == "state"]
    assert held
    return [size * (page + 1) for page, found in enumerate(zip(*held, strict=True)) if all(found)]


def restarted(start: Start, engine: Engine, **settings: object) -> Engine:
    engine.shut_down()
    return start(**settings)


@every_runner
@every_mix
def test_another_instance_goes_on_from_the_state_at_the_end_of_a_prompt(start: Start, mix: list) -> None:
    engine = start(kv_spec=mix, **GENEROUS)
    engine.check(PROMPT, 3)
    assert states(engine, PROMPT) == [96]
    engine = restarted(start, engine, kv_spec=mix, **GENEROUS)
    engine.check(PROMPT, 20, computed=4 + 19)
    engine.check([*PROMPT[:97], *range(40)], 20, computed=41 + 19)


@pytest.mark.parametrize("page_tokens", [16, 32])
def test_pages_may_be_larger_than_blocks(start: Start, page_tokens: int) -> None:
    for computed in (100, 4):
        engine = start(kv_spec=STATES, page_tokens=page_tokens, **GENEROUS)
        engine.check(PROMPT, 3, computed=computed + 2)
        engine.shut_down()


@pytest.mark.parametrize(("set_to", "page_tokens"), [(0, 34), (64, 64)])
def test_pages_divide_the_blocks_unless_their_size_is_set(
    start: Start, caplog: pytest.LogCaptureFixture, set_to: int, page_tokens: int
) -> None:
    """Where 64 does not divide 544, a hit of 64 could end at multiples of 1,088 only."""
    prompt = [token % oracle.VOCAB for token in range(7, 7 + 3 * 600, 3)]
    blocks = {"kv_spec": [full(544), state(544)], "num_blocks": 16, "block_tokens": 544, "page_tokens": set_to}
    for computed in (600, 600 if set_to else 600 - 544):
        engine = start(max_num_batched_tokens=1024, **blocks, **GENEROUS)
        assert engine.prefix._page_tokens == page_tokens
        engine.check(prompt, 3, computed=computed + 2)
        engine.shut_down()
    assert ("leave page_tokens out for pages of 34" in caplog.text) == bool(set_to)


@pytest.mark.parametrize(
    ("mix", "fitting"),
    [
        ([full(528), state(528)], 48),
        ([full(16), window(20)], 64),
        ([full(128), window(20, 128)], 64),
        ([full(547), state(547)], 64),
    ],
)
def test_pages_are_as_large_as_fits(start: Start, mix: list, fitting: int) -> None:
    assert start(kv_spec=mix).prefix._geometry.fitting_page(64) == fitting


@every_mix
def test_no_state_in_the_pool_is_no_hit_although_all_pages_are_there(start: Start, mix: list) -> None:
    engine = start(kv_spec=mix, **GENEROUS)
    engine.check(PROMPT, 3)
    engine = restarted(start, engine, kv_spec=mix, **GENEROUS)
    engine.check([*PROMPT[:90], *range(40)], 3, computed=130 + 2)


@every_runner
def test_where_prompts_part_the_second_leaves_a_state_for_the_third(start: Start, runner: object) -> None:
    """vLLM sees that by itself only while its own cache has the first prompt's pages; here it has none."""
    engine = start(kv_spec=STATES, **GENEROUS)
    engine.check(PROMPT, 3)
    for number, computed in enumerate([120, 120 - 80]):
        engine = restarted(start, engine, kv_spec=STATES, **GENEROUS)
        fork = [*PROMPT[:90], *range(number, number + 30)]
        engine.check(fork, 3, computed=computed + 2)
        assert 80 in states(engine, fork)


def test_a_state_costs_a_step_only_where_prompts_part(start: Start) -> None:
    """Chunks that end inside tokens nobody shares doubled time to first token elsewhere (vllm#45238, #51250)."""

    def steps(engine: Engine, prompt: list[int]) -> int:
        engine.add(prompt, 1)
        return sum(engine.step() > 0 for _ in iter(lambda: engine.scheduler.has_requests(), False))

    fork, settings = [*PROMPT[:90], *range(30)], {"kv_spec": STATES, "max_num_batched_tokens": 256}
    alone = start(**settings, extra={"prefix_reuse": False})
    engine = start(**settings, **GENEROUS)
    assert steps(engine, PROMPT) == steps(alone, PROMPT)
    engine = restarted(start, engine, **settings, **GENEROUS)
    assert alone.scheduler.reset_prefix_cache()
    assert steps(engine, fork) == steps(alone, fork) + 1
    assert states(engine, fork) == [80, 112]


def test_a_prompt_that_waits_for_one_like_it_parts_from_it_nowhere(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lookup finds as many pages as the other has by then; only where the last one ended counts."""
    monkeypatch.setattr("vllm_plugin.prefix.lookups._LOOKUP_REUSE_S", -1.0)
    engine = start(kv_spec=STATES, max_num_batched_tokens=32, max_num_seqs=1, keep_pace=True, **GENEROUS)
    first, second = engine.add(PROMPT), engine.add(PROMPT)
    seen = []
    for _ in range(3):
        engine.step()
        engine.connector.get_num_new_matched_tokens(engine.requests[second], 0)
        seen.append(set(engine.prefix._tracked[second].junctions))
    assert seen[:2] == [{32}, {64}] and len(seen[2]) <= 1
    engine.finish(first, second)


@every_mix
def test_long_prompts_in_several_steps_leave_one_state_at_their_end(start: Start, mix: list) -> None:
    engine = start(kv_spec=mix, max_num_batched_tokens=32, **GENEROUS)
    engine.check(PROMPT, 3)
    assert states(engine, PROMPT) == [96]


def test_retention_tells_how_often_a_state_is_stored(start: Start) -> None:
    engine = start(kv_spec=STATES, max_num_batched_tokens=16, retention_tokens=32, **GENEROUS)
    engine.check(PROMPT, 3)
    assert states(engine, PROMPT) == [32, 64, 96]


def test_the_budget_spaces_states_out(start: Start) -> None:
    engine = start(kv_spec=STATES, max_num_batched_tokens=16, retention_tokens=16)
    spacing = engine.prefix._states.spacing_tokens
    assert spacing == 2 * 48 // (4 * engine.prefix._geometry.main.page_format(_shard(engine), 1).nbytes)
    planner = engine.prefix._states
    planner.spacing_tokens = 33
    engine.check(PROMPT, 3)
    assert states(engine, PROMPT) == [48, 96]
    engine = restarted(start, engine, kv_spec=STATES, max_num_batched_tokens=16, retention_tokens=16)
    engine.prefix._states.spacing_tokens = 33
    longer = [*PROMPT, *range(28)]
    engine.check(longer, 3, computed=128 - 96 + 2)
    assert states(engine, longer) == [48, 96], "the next is due 33 tokens behind the one that was hit"


def _shard(engine: Engine) -> object:
    return engine.prefix._geometry.main.shard(0, 0)


@every_mix
def test_a_prompt_without_a_whole_block_before_its_last_token_leaves_no_state(start: Start, mix: list) -> None:
    engine = start(kv_spec=mix, **GENEROUS)
    engine.check(PROMPT[:16], 3)
    assert states(engine, PROMPT) == []


def test_where_vllm_does_not_say_which_block_holds_a_state_the_model_is_left_alone(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(kv_spec=[full(), state(mode="none")])
    assert engine.prefix is None
    assert "mamba_cache_mode 'none'" in caplog.text


@pytest.mark.parametrize("position", [1, 2])
def test_a_state_with_other_bytes_and_a_right_checksum_is_noticed_by_who_goes_on(start: Start, position: int) -> None:
    """The negative control: what is loaded is what the model goes on from."""
    engine = start(kv_spec=STATES, **GENEROUS)
    engine.check(PROMPT, 3)
    falsify(engine, position)
    engine = restarted(start, engine, kv_spec=STATES, **GENEROUS)
    with pytest.raises(WrongKV, match="the state after 96 tokens"):
        engine.ask(PROMPT)


@pytest.mark.parametrize("position", [1, 2])
def test_one_wrong_byte_in_a_state_is_refused_and_the_prompt_computed(start: Start, pool: Path, position: int) -> None:
    engine = start(kv_spec=STATES, **GENEROUS)
    engine.check(PROMPT, 3)
    damage(pool, state_of_prompt(engine, position))
    engine = restarted(start, engine, kv_spec=STATES, **GENEROUS)
    engine.check(PROMPT, 3, computed=100 + 2)


def test_ranks_load_their_own_halves_and_another_number_of_them_finds_no_state(start: Start) -> None:
    halves = [full(heads=1), state(heads=1), state(heads=1)]
    engine = start(kv_spec=halves, tp_size=2, **GENEROUS)
    engine.check(PROMPT, 3)
    engine = restarted(start, engine, kv_spec=halves, tp_size=2, **GENEROUS)
    engine.check(PROMPT, 3, computed=4 + 2)
    engine = restarted(start, engine, kv_spec=STATES, **GENEROUS)
    engine.check(PROMPT, 3, computed=100 + 2)


@every_runner
@every_mix
def test_what_is_saved_late_is_right_although_its_blocks_were_zeroed(start: Start, faults, mix: list) -> None:
    """Model Runner V2 zeroes the blocks that a step gives to others before the connector hears of that step."""
    engine = start(kv_spec=mix, num_blocks=20, **GENEROUS)
    first = begin_save(engine, faults)
    engine.abort(first)
    crowd(engine)
    faults.release()
    engine.finish()
    text = engine.requests[first].prompt_token_ids
    assert all(engine.pages(text)) and states(engine, text) == [96]


@every_runner
def test_what_is_saved_when_a_request_ends_is_right_although_its_blocks_are_zeroed_in_the_next_step(
    start: Start,
) -> None:
    """The next prompt takes the whole cache in one step."""
    engine = start(kv_spec=STATES, num_blocks=20, **GENEROUS)
    name = engine.add(PROMPT, 29)  # the page that ends with token 128 is complete one step before the request ends
    engine.run(until=lambda: name in engine.reasons)
    engine.check([token % 256 for token in range(17, 240)], 3)
    text = [*PROMPT, *oracle.generate(PROMPT, 29)]
    assert all(engine.pages(text)[:6])


def crowd(engine: Engine) -> None:
    """Others fill the whole cache."""
    for prompt in (list(range(start, start + 100)) for start in (120, 230, 340)):
        name = engine.answer(prompt, 20)
        engine.check_answer(name)


def test_a_request_id_that_comes_twice_leaks_no_block_and_stores_right_states(start: Start) -> None:
    engine = start(kv_spec=STATES, **GENEROUS)
    engine.check(PROMPT, 3, name="twice")
    other = PROMPT[::-1]
    engine.workers[0].runner.num_computed.clear()
    engine.check(other, 3, name="twice")
    assert states(engine, PROMPT) == states(engine, other) == [96]


def test_a_request_that_is_aborted_in_the_step_of_its_state_leaves_nothing_wrong(start: Start) -> None:
    engine = start(kv_spec=STATES, async_scheduling=True, v2_runner=True, lazy=True, **GENEROUS)
    name = engine.add(PROMPT, 3)
    engine.step()
    engine.abort(name)
    engine.check(PROMPT[::-1], 3)
    engine.check_at_rest()
    assert states(engine, PROMPT) in ([], [96])  # `states` reads every byte


def state_of_prompt(engine: Engine, position: int) -> npt.NDArray[np.uint8]:
    """The bytes that the pool has of a group, at the end of PROMPT."""
    (view,) = engine.prefix._views(position)
    found = np.empty(view.nbytes, np.uint8)
    assert get_pages(view.own, [KEY], [found], nbytes=view.nbytes) == [True]
    return found


def falsify(engine: Engine, position: int) -> None:
    """Give that state another last byte, and the checksum that belongs to it."""
    wrong = state_of_prompt(engine, position)
    wrong[-1] ^= 1
    (view,) = engine.prefix._views(position)
    assert view.own.remove([KEY]) == 1
    put_pages(view.own, [KEY], [wrong], parents=[None], deadline_s=60.0)


def damage(pool: Path, content: npt.NDArray[np.uint8]) -> None:
    """Change one byte where the pool keeps these."""
    (arena,) = pool.rglob("arena")
    at = arena.read_bytes().find(content.tobytes())
    assert at >= 0
    with arena.open("r+b") as file:
        file.seek(at + len(content) - 1)
        file.write(bytes([content[-1] ^ 1]))


LARGER = {"kv_spec": [full(), state(32, 1)], "num_blocks": 48}
"""States in larger blocks than full attention. A draft model with small blocks of its own has the same effect."""


def test_states_in_larger_blocks_are_left_alone(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's own hits may then end inside a block of states."""
    engine = start(**LARGER)
    assert engine.connector._scheduler is None
    assert "end inside a block of states" in caplog.text


@pytest.mark.parametrize("smallest", [16, 32])
def test_vllm_by_itself_goes_on_from_wrong_states_in_larger_blocks(start: Start, smallest: int) -> None:
    """Why they are left alone; where this fails, vLLM has mended it.

    A slot of states is what is left after its last token where chunks of a prefill end with slots. vLLM's scheduler has
    them end with `cache_config.block_size`, the smallest block of all groups: here after 16 tokens, in the middle of a
    slot, which vLLM's prefix cache then takes for the state after 32.
    """
    engine = start(**LARGER, block_tokens=smallest, max_num_batched_tokens=32, retention_tokens=None)
    assert engine.prefix is None

    def ask_all() -> None:
        engine.check(PROMPT)
        for cut in range(20, 100, 3):
            engine.check([*PROMPT[:cut], *range(30)])

    if smallest == 32:
        ask_all()
        return
    with pytest.raises(WrongKV, match="the state after 64 tokens"):
        ask_all()
