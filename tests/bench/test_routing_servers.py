"""`make bench NAME=routing` in its quick form, with real vLLM servers: every policy has its figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from long_form import LONG

from bench.peers import routing
from bench.peers.vllm import Engine
from models import checkpoint

PYTHON = Path(__file__).parents[2] / ".venvs" / "vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not LONG, reason="three servers of its own (`make test-long`)"),
    pytest.mark.skipif(not PYTHON.exists(), reason="NOT TESTED: vLLM is not installed (`make vllm`)"),
]


def test_every_policy_is_measured_and_the_index_answers():
    said: list[str] = []
    scale = routing.QUICK
    found = routing.run(Engine(PYTHON, checkpoint("qwen3")), scale, said.append)
    values: dict[tuple[str, str], float | None] = {}
    for row in found.rows:
        work, _, figure = row.figure.partition(": ")
        values[work.partition("turns, ")[2], figure] = row.value
    assert len(values) == 4 * len(routing.POLICIES) and None not in values.values()
    hits = {policy: values[policy, "prompt tokens from a cache"] for policy in routing.POLICIES}
    assert min(hits["conductor, history"], hits["conductor, index"]) >= hits["round-robin"]
    requests = scale.conversations * scale.turns * scale.rounds
    assert [line for line in said if "index_questions" in line] == [
        f'mooncake_connector_router_index_questions_total{{outcome="answered"}} {requests:.1f}'
    ]
