"""`bench routing`: its simulated engine by hand, and the policies on a trace of conversations."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.routing.engine import Clock, Engine, Job, Shape
from mooncake_connector.cli.bench.routing.run import policies, simulate
from mooncake_connector.cli.bench.routing.trace import BLOCK_TOKENS, Asked, read_trace
from mooncake_connector.cli.main import app

SHAPE = Shape(prefill_tokens_per_s=1024.0, cache_tokens=8 * BLOCK_TOKENS, most_running=2, token_s=0.5, decode_share=0.5)


def asked(*hashes: int, answer: int = 2, at_ms: float = 0) -> Asked:
    return Asked(at_ms, len(hashes) * BLOCK_TOKENS, answer, list(hashes))


def answered(*requests: Asked, shape: Shape = SHAPE) -> list[tuple[float, float]]:
    """(first token, last token) of each, in seconds, at one engine."""
    clock, times = Clock(), [[0.0, 0.0] for _ in requests]
    engine = Engine(shape, clock)

    def note(number: int, which: int) -> None:
        times[number][which] = clock.now_s

    for number, one in enumerate(requests):
        job = Job(one, lambda number=number: note(number, 0), lambda number=number: note(number, 1))
        clock.at(one.timestamp / 1000, lambda job=job: engine.submit(job))
    clock.run()
    return [(first, last) for first, last in times]


def test_prompts_are_computed_in_turn_and_decoding_slows_the_next():
    assert answered(asked(1, 2), asked(3, 4)) == [(1.0, 2.0), (1.0 + 1.0 / 0.75, 2.0 + 1.0 / 0.75)]


def test_what_is_cached_is_not_computed_but_for_the_last_token():
    (first, _), (second, _) = answered(asked(1, 2), asked(1, 2, at_ms=5000))
    assert first == 1.0 and second == pytest.approx(5.0 + 1 / 1024)
    assert answered(asked(1, 2), asked(1, 9, at_ms=5000))[1][0] == 5.5


def test_as_many_as_may_run_hold_up_the_others():
    assert answered(*[asked(n, answer=20) for n in range(3)])[2][0] > answered(asked(0, answer=20))[0][1]


def test_what_is_running_leaves_no_room_and_what_was_used_long_ago_goes_first():
    first, second = answered(asked(1, 2, 3, 4), asked(5, 6, 7, 8, at_ms=1))
    assert second[0] > first[1]  # with their answers both do not fit
    times = answered(
        asked(1, 2, 3), asked(4, 5, 6, at_ms=10**4), asked(7, 8, 9, at_ms=2 * 10**4), asked(1, 2, 3, at_ms=3 * 10**4)
    )
    assert times[3][0] == 31.0  # of its three blocks the last two went, for the third request
    assert answered(asked(*range(20)))[0][0] == 10.0  # more than there is memory, alone


requests = st.lists(
    st.builds(
        asked,
        st.integers(0, 3),
        st.integers(4, 6),
        st.integers(7, 20),
        answer=st.integers(0, 9),
        at_ms=st.floats(0, 9000),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=50)
@given(requests, st.integers(1, 4))
def test_every_request_is_answered_once_by_every_policy(trace, count):
    for _, policy, source in policies():
        found = simulate(trace, SHAPE, count, policy, source)
        assert 0 <= found.hit_rate < 1 and 0 < found.ttft_p50_s <= found.ttft_p99_s
        assert found.ttft_p99_s <= sum((one.input_length / 512 + one.output_length) for one in trace)
        assert 1 - 1e-9 <= found.busiest <= count + 1e-9


def conversations(count: int) -> list[Asked]:
    """Of up to eight turns each, behind one of three system prompts."""
    draw, found, fresh = random.Random(18), [], iter(range(100, 10**6))
    for _ in range(count):
        hashes, at_ms = [draw.randrange(3)], draw.uniform(0, 10**5)
        for _ in range(draw.randint(1, 8)):
            hashes = [*hashes, *(next(fresh) for _ in range(draw.randint(1, 6)))]
            found.append(asked(*hashes, answer=50, at_ms=at_ms))
            at_ms += draw.uniform(5000, 20000)
    return sorted(found, key=lambda one: one.timestamp)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "conversations.jsonl"
    rows = [{field: getattr(one, field) for field in one.__struct_fields__} for one in conversations(150)]
    path.write_text("".join(json.dumps({**row, "more": 1}) + "\n" for row in rows))
    return path


def test_the_command_compares_the_policies(trace):
    done = CliRunner().invoke(
        app, ["bench", "routing", str(trace), "--instances", "4", "--cache-tokens", "50000", "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    outcomes = found["outcomes"]["conversations.jsonl"]
    assert list(outcomes) == ["round_robin", "least_loaded", "conductor, history", "conductor, index"]
    assert found["instances"] == 4 and found["shape"]["cache_tokens"] == 50_000
    hits = {name: of["hit_rate"] for name, of in outcomes.items()}
    assert min(hits["conductor, history"], hits["conductor, index"]) > 1.3 * max(
        hits["round_robin"], hits["least_loaded"]
    )
    shown = CliRunner().invoke(app, ["bench", "routing", str(trace)])
    assert shown.exit_code == 0 and Counter(shown.stdout.split())["conversations.jsonl"] == 4


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "has no requests"),
        ("{}", "line 1 is no request of Mooncake's traces"),
        ("[1]\n", "line 1 is no request"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}', "line 1 has no prompt"),
        ('{"timestamp": 0, "input_length": 5, "output_length": -1, "hash_ids": [1]}', "line 1 has no prompt"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path, text, words):
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(BenchError, match=words):
        read_trace(tmp_path / "t.jsonl")
    done = CliRunner().invoke(app, ["bench", "routing", str(tmp_path / "t.jsonl")])
    assert done.exit_code == 1 and words in done.output


def test_a_trace_that_is_not_there(tmp_path):
    with pytest.raises(BenchError, match="cannot be read: No such file"):
        read_trace(tmp_path / "t.jsonl")


def test_a_device_that_never_ends_is_no_trace():
    with pytest.raises(BenchError, match="/dev/zero, line 1 is no request"):
        read_trace(Path("/dev/zero"))
