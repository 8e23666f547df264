"""The comparison of prefill and decode without SGLang: its rows, what it sends to servers, and in which turns."""

import json
from dataclasses import replace

import pytest

from bench.peers.pd_sglang import ALONE, MOONCAKE, OURS, Answered, Found, Scale, Way, equal_percent, measure, rows
from bench.streaming_server import StreamingServer, event
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.serve.client import parse_url

ANSWER = Answered(0.5, 1.0, (7, 8), "[-0.1, -0.2]")
SMALL = Scale(prompt_tokens=5, rounds=1, crowd=3, crowd_tokens=2, crowd_rounds=1)


def found(whole_s: float, first_s: float, answer: Answered = ANSWER) -> Found:
    return Found([whole_s] * 3, [first_s] * 3, [2 * first_s] * 3, [answer] * 3)


def test_what_is_added_is_held_against_what_the_peer_adds():
    of = {ALONE: found(1.0, 0.5), OURS: found(1.05, 0.6), MOONCAKE: found(1.2, 0.7)}
    made = rows(of, Scale())
    assert [round(row.value) for row in made] == [50, 1050, 600, 1200, 100]
    assert [round(row.peer) for row in made[:4]] == [200, 1200, 700, 1400]
    assert [round(row.limit) for row in made[1:4]] == [1000, 500, 1000]
    assert [row.ok for row in made] == [True, None, True, True, True]
    other = replace(ANSWER, logprobs="[-0.1, -0.20000001]")
    made = rows(of | {OURS: found(1.15, 0.8, other)}, Scale())
    assert [row.ok for row in made] == [False, None, False, False, False]


def test_without_the_peer_nothing_is_judged():
    made = rows({ALONE: found(1.0, 0.5), OURS: found(1.05, 0.6)}, Scale())
    assert [(row.peer, row.ok) for row in made] == [(None, None)] * 4


def test_answers_are_equal_to_the_last_digit():
    assert equal_percent([ANSWER, ANSWER], [ANSWER, replace(ANSWER, token_ids=(7, 9))]) == 50
    assert equal_percent([ANSWER], [replace(ANSWER, whole_s=9.0)]) == 100


@pytest.fixture
def stand_ins():
    with StreamingServer() as prefill, StreamingServer() as decode:
        for server in (prefill, decode):
            server.behaviour.stream = [
                event(output_ids=[7], meta_info={"output_token_logprobs": [[-0.1, 7, None]]}),
                event(output_ids=[7, 8], meta_info={"output_token_logprobs": [[-0.1, 7, None], [-0.2, 8, None]]}),
                "data: [DONE]\n\n",
            ]
        yield prefill, decode


@pytest.fixture
def way(stand_ins):
    prefill, decode = (parse_url(server.url, None) for server in stand_ins)
    return Way(decode, prefill, bootstrap_port=9)


def test_both_instances_are_asked_with_the_same_room(way, stand_ins):
    answer = way.ask([1, 2], 4)
    assert (answer.token_ids, answer.logprobs) == ((7, 8), "[-0.1, -0.2]")
    assert 0 < answer.first_token_s <= answer.whole_s
    ((of_prefill,), (of_decode,)) = (server.behaviour.asked for server in stand_ins)
    assert of_prefill == of_decode
    assert of_prefill["input_ids"] == [1, 2] and of_prefill["sampling_params"]["max_new_tokens"] == 4
    assert of_prefill["bootstrap_port"] == 9 and isinstance(of_prefill["bootstrap_room"], int)
    Way(way.server).ask([1], 1)
    assert "bootstrap_room" not in stand_ins[1].behaviour.asked[-1]


def test_every_way_is_asked_the_same_prompts(way, stand_ins):
    told = []
    of = measure({ALONE: Way(way.server), OURS: way}, 100, SMALL, told.append)
    assert all((len(one.whole_s), len(one.first_s), len(one.last_s)) == (1, 3, 1) for one in of.values())
    prompts = [json.dumps(body["input_ids"]) for body in stand_ins[1].behaviour.asked]
    assert len(prompts) == 10 and prompts[0] == prompts[1] != prompts[2] == prompts[3], "the first round warms up"
    assert sorted(prompts[4:7]) == sorted(prompts[7:])
    assert any("round 1 of 1" in line for line in told)


@pytest.mark.parametrize("which", [0, 1])
def test_a_server_that_fails_is_an_error(way, stand_ins, which):
    stand_ins[which].behaviour.status = 500
    with pytest.raises(BenchError, match="did not answer: answered 500: <h1>Out of order</h1>"):
        way.ask([1], 1)
    stand_ins[which].behaviour.status = 200
    stand_ins[which].behaviour.stream = [event(error={"message": "aborted"})]
    with pytest.raises(BenchError, match="failed while it answered: aborted"):
        way.ask([1], 1)
    stand_ins[which].behaviour.stream = []
    with pytest.raises(BenchError, match="ended without a token"):
        way.ask([1], 1)
