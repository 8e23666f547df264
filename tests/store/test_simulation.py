"""The simulator against the store: the same traffic, hit by hit, for every policy."""

import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from store.pools import space_in
from store.traces import agents, chat, documents

from mooncake_connector.errors import MooncakeConnectorError
from store_client import EmbeddedStore
from store_client.embedded import evictor, ledger, table, writer
from store_client.embedded.names import hash_key
from store_client.embedded.policies import POLICIES
from store_client.simulation.model import ModelPool
from store_client.simulation.sweep import Outcome, advice, simulate, sweep
from store_client.simulation.traces import TraceError, read_trace
from store_client.testing import DEADLINE_S, chain

CAPACITY, NBYTES = 1 << 20, 8192
TRACES = {"chat": chat(1, 45), "agents": agents(2, 12, shared=6), "documents": documents(3, 160)}
policies = pytest.mark.parametrize("policy", sorted(POLICIES))


@policies
@pytest.mark.parametrize("shape", TRACES)
def test_the_simulator_finds_what_the_store_finds_hit_by_hit(pool, monkeypatch, policy, shape):
    names = {block: chain(f"{block}", 1)[0] for _, blocks in TRACES[shape] for block in blocks}
    content = np.zeros(NBYTES, dtype=np.uint8)
    with EmbeddedStore(pool, CAPACITY, eviction=policy) as store:
        space = space_in(store)
        model = ModelPool(policy, CAPACITY, NBYTES, len(names))
        real, simulated = [], []
        begun_ns = table.now_ns()
        for at, blocks in TRACES[shape]:
            now_ns = begun_ns + int(at * 1e9) // 64 * 64
            for module in (table, ledger, writer, evictor):
                monkeypatch.setattr(module, "now_ns", lambda now_ns=now_ns // 64 * 64: now_ns)
            keys = [names[block] for block in blocks]
            hit = space.lookup(keys).pages
            assert all(space.read(keys[:hit], lambda i, view: None, nbytes=NBYTES))
            if hit < len(keys):
                space.write(
                    keys[hit:], lambda i, view: view.__setitem__(slice(None), content), nbytes=NBYTES,
                    parents=[None, *keys][hit : len(keys)], deadline_s=DEADLINE_S,
                )  # fmt: skip
            real.append(hit)
            simulated.append(model.request(now_ns // 64 * 64, [hash_key(key, space._number) for key in keys]))
        assert store.stats().evicted_pages == model.evicted > 100
    assert sum(real) > 100
    assert simulated == real


def written(tmp_path, lines):
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def mooncake(requests):
    return [
        {"timestamp": int(at * 1000), "input_length": 512 * len(blocks) - 100, "output_length": 9, "hash_ids": blocks}
        for at, blocks in requests
    ]


def test_a_mooncake_trace_is_read_and_only_full_tokens_count(tmp_path):
    trace = read_trace(written(tmp_path, mooncake(TRACES["chat"])))
    assert trace.page_tokens == 512 and len(trace.requests) == len(TRACES["chat"])
    assert trace.num_pages == len({block for _, blocks in TRACES["chat"] for block in blocks})
    everything = simulate(trace, "lru", 1 << 30, 1024)
    assert everything.evicted_pages == 0
    assert everything.hit_pages == everything.pages - trace.num_pages
    assert everything.hit_tokens <= everything.tokens == sum(request.tokens for request in trace.requests)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "has no requests"),
        ("{]\n", "line 1 is no JSON"),
        ("[1]\n", "line 1 is no object"),
        ('{"timestamp": 1}\n', "expected timestamp"),
        ('{"timestamp": 1, "input_length": 5, "hash_ids": ["a"]}\n', "expected timestamp"),
        ('{"timestamp": NaN, "input_length": 5, "hash_ids": [1]}\n', "expected timestamp"),
        ('{"timestamp": 1e18, "input_length": 5, "hash_ids": [1]}\n', "expected timestamp"),
        ('{"timestamp": 1, "input_length": -5, "hash_ids": [1]}\n', "expected timestamp"),
        ('{"timestamp": 1, "input_length": 5, "hash_ids": [1, 2, 1]}\n', "names a block twice"),
        ('{"timestamp": 1, "input_length": 5', "line 1 is no JSON"),
        ('{"kind": "mooncake-connector-recording", "page_tokens": "x"}\n', "page_tokens is 'x'"),
        ('{"kind": "mooncake-connector-recording", "page_tokens": 1e9}\n', "page_tokens is"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path, text, said):
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(TraceError, match=said):
        read_trace(file)


def test_prompts_of_one_instant_are_spread_to_the_next(tmp_path):
    requests = [(3.0, [1]), (0.0, [2]), (9.0, [3]), (3.0, [4]), (3.0, [5]), (9.0, [6])]
    trace = read_trace(written(tmp_path, mooncake(requests)))
    assert [request.at_ns // 10**6 for request in trace.requests] == [0, 3000, 4000, 5000, 9000, 10500]
    together = read_trace(written(tmp_path, mooncake([(5.0, [1]), (5.0, [2])])))
    assert [request.at_ns for request in together.requests] == [0, 500_000]


def test_a_line_that_was_not_finished_is_left_out(tmp_path):
    file = written(tmp_path, mooncake(TRACES["chat"]))
    whole = read_trace(file)
    file.write_bytes(file.read_bytes()[:-20])
    assert len(read_trace(file).requests) == len(whole.requests) - 1


def test_a_file_that_is_one_long_line_is_not_read_to_its_end():
    with pytest.raises(TraceError, match=r"line 1 has over 67,108,864 characters"):
        read_trace(Path("/dev/zero"))


@policies
def test_a_pool_of_one_page_and_one_of_none_are_simulated(tmp_path, policy):
    trace = read_trace(written(tmp_path, mooncake([(i, [i % 3 // 2, 10 + i]) for i in range(30)])))
    one, none = (simulate(trace, policy, capacity, 1024) for capacity in (512 << 10, 100 << 10))
    assert one.evicted_pages > 0 and none.evicted_pages == none.hit_pages == 0


def test_a_run_that_is_killed_is_an_error_that_says_why(tmp_path, monkeypatch):
    trace = read_trace(written(tmp_path, mooncake(TRACES["chat"])))
    monkeypatch.setattr(ModelPool, "request", lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(MooncakeConnectorError, match="was killed after 0 of 2 runs: for want of memory"):
        sweep(trace, ["lru"], [1 << 20, 2 << 20], 1024, 2)


@policies
def test_a_larger_pool_finds_no_less_worth_speaking_of(tmp_path, policy):
    trace = read_trace(written(tmp_path, mooncake(TRACES["chat"])))
    sizes = [trace.num_pages * 512 * 1024 * share // 16 for share in (1, 4, 8, 32)]
    rates = [simulate(trace, policy, size, 1024).hit_rate for size in sizes]
    assert all(more > less - 0.05 for less, more in pairwise(rates)) and rates[-1] > rates[0] + 0.1


def test_a_sweep_has_what_single_runs_have(tmp_path):
    trace = read_trace(written(tmp_path, mooncake(TRACES["documents"])))
    sizes, seen = [64 << 20, 128 << 20], []
    found = sweep(trace, ["lru", "auto"], sizes, 1024, 2, lambda done, of: seen.append((done, of)))
    assert found == [simulate(trace, policy, size, 1024) for policy in ("lru", "auto") for size in sizes]
    assert seen == [(done, 4) for done in range(1, 5)]


def test_advice_is_the_first_size_whose_doubling_brings_little():
    def outcome(size, hit_tokens):
        return Outcome("lru", size, 100, 0, 1000, hit_tokens, 0)

    outcomes = [outcome(8, 300), outcome(16, 500), outcome(32, 710), outcome(64, 735), outcome(128, 740)]
    assert advice(outcomes) == (outcomes[2], outcomes[3])
    assert advice(outcomes[:3]) == (outcomes[1], outcomes[2])
    assert advice(outcomes[:1]) is None
