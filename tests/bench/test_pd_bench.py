"""The comparison of prefill and decode without vLLM: its rows, and what it sends to a server."""

import pytest

from bench.peers.pd import ALONE, CONCURRENT, SEQUENTIAL, Instance, PDScale, better, pd_rows
from bench.streaming_server import StreamingServer
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.processes import free_ports
from mooncake_connector.cli.bench.serve.client import Server, parse_url

OURS = {ALONE: [1.0, 9.0, 1.2], SEQUENTIAL: [1.3, 1.4, 1.5], CONCURRENT: [1.25, 1.25, 9.0]}


def test_what_is_added_is_held_against_what_the_peer_adds():
    rows = pd_rows(OURS, {ALONE: [2.0], SEQUENTIAL: [2.2]}, PDScale())
    assert [round(row.value) for row in rows] == [200, 50, 1400, 1250]
    assert [round(row.peer) for row in rows[:2]] == [200, 200]
    assert [row.ok for row in rows] == [True, True, None, None]
    rows = pd_rows(OURS, {ALONE: [2.0], SEQUENTIAL: [2.09]}, PDScale())
    assert [row.ok for row in rows[:2]] == [False, False]


def test_the_peer_is_its_better_setting():
    slow, quick = {ALONE: [1.0], SEQUENTIAL: [9.0]}, {ALONE: [5.0], SEQUENTIAL: [5.1]}
    assert better([slow, quick]) == better([quick, slow]) == quick
    assert better([slow]) == slow and better([]) == {}


def test_without_the_peer_nothing_is_judged():
    rows = pd_rows(OURS, {}, PDScale())
    assert [(round(row.value), row.peer, row.ok) for row in rows[:2]] == [(200, None, None), (50, None, None)]
    assert [round(row.limit) for row in rows[2:]] == [1200, 1200]


@pytest.fixture
def stand_in():
    with StreamingServer() as server:
        server.behaviour.answer = {"choices": [{"token_ids": [7, 8]}], "kv_transfer_params": {"from": "P"}}
        yield server


@pytest.fixture
def instance(stand_in):
    return Instance(parse_url(stand_in.url, None), transfer_port=0)


def test_both_parts_of_a_request(instance, stand_in):
    stand_in.behaviour.metrics = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 700\n'
    assert instance.tokens_from_connector() == 700
    assert instance.prefill([1, 2], {"transfer_id": "x"}) == {"from": "P"}
    assert instance.ask([1, 2], 5, {"from": "P"}) == [7, 8]
    assert instance.ask([1, 2], 5) == [7, 8]
    first, second, third = stand_in.behaviour.asked
    hand_over = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "x"}
    assert (first["max_tokens"], first["kv_transfer_params"]) == (1, hand_over)
    assert (second["max_tokens"], second["kv_transfer_params"]) == (5, {"from": "P"})
    assert "kv_transfer_params" not in third and "stream_options" not in third, "it streams nothing"


def test_a_server_that_fails_is_an_error(instance, stand_in):
    stand_in.behaviour.status = 500
    with pytest.raises(BenchError, match="answered 500: <h1>Out of order</h1>"):
        instance.ask([1], 1)
    with pytest.raises(BenchError, match="did not answer"):
        Instance(Server("127.0.0.1", free_ports(1)[0]), 0).ask([1], 1)
