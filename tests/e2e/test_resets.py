"""Resets while pages are being saved: never refused, and no text of weights that were replaced in memory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from long_form import LONG

from e2e import rl_loop
from e2e.conftest import Shared
from e2e.process import ENVIRONMENTS, small_environment
from e2e.rl_loop import MAX_TOKENS, Tally
from e2e.server import Server
from models import checkpoint

ROUNDS = 100 if LONG else 6  # even


def assert_clean(tally: Tally) -> None:
    assert tally.rounds == ROUNDS and tally.answers > 0
    assert tally.distinct > 0, "the two checkpoints answer alike, so nothing would be noticed"
    assert tally.hit_tokens > 0, "the pool was not used"
    assert (tally.refused, tally.wrong) == (0, 0), tally


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, *([2] if LONG else [])])
def test_loop_of_an_llm(qwen3: Path, pool: Path, logs: Path, processes: int) -> None:
    """Its engine is in the same process, or has one of its own."""
    command = [
        *(str(ENVIRONMENTS / "vllm" / "bin" / "python"), "-P", "-m", "e2e.rl_loop"),
        *(str(qwen3), str(checkpoint("qwen3-other")), str(ROUNDS)),
    ]
    env = small_environment() | {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "MOONCAKE_CONNECTOR_POOL": f"{pool}-{processes}",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(processes - 1),
        "VLLM_NO_USAGE_STATS": "1",
    }
    log = logs / f"rl-loop-{processes}.log"
    with log.open("w") as errors:
        said = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=3600).stdout
    found = [line for line in said.splitlines() if "TALLY" in line]
    assert found, f"it did not come to its end; see {log}"
    print(found[0])
    assert_clean(Tally(**json.loads(found[0].partition("TALLY ")[2])))


class InServer:
    def __init__(self, server: Server) -> None:
        self._server = server

    def load_weights(self, checkpoint: Path) -> None:
        self._server.load_weights(checkpoint)

    def reset(self, *, connector: bool, running: bool) -> bool:
        return self._server.resets(connector=connector, running=running)

    def ask_all(self, prompts: Sequence[tuple[int, ...]], salt: str | None) -> list[tuple[tuple[int, ...], float]]:
        answers = [self._server.ask(prompt, max_tokens=MAX_TOKENS, cache_salt=salt) for prompt in prompts]
        return [(answer.token_ids, answer.smallest_gap) for answer in answers]

    def hit_tokens(self) -> int:
        return self._server.tokens_from_connector()


@pytest.mark.long
def test_loop_of_a_server(qwen3: Path, shared: Shared) -> None:
    """In the end it has its own weights again."""
    tally = rl_loop.run(InServer(shared.server), [qwen3, checkpoint("qwen3-other")], ROUNDS)
    print(tally)
    assert_clean(tally)
