"""An RL-like loop on one engine: generate, change the weights in memory, reset, generate.

`python -m e2e.rl_loop MODEL OTHER ROUNDS` runs it on vLLM's `LLM` and prints a tally; the server's is in the test. Each
answer is compared with what the same weights answered to the same prompts under a salt of their own, whose pages nobody
else reads.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from e2e.questions import SMALLEST_GAP, draw_tokens

LENGTHS = range(70, 390, 20)
"""Of the prompts: ends everywhere in pages of 64 tokens and blocks of 128."""
PARTS = 3
"""A round asks one part of so many; odd, so that each part meets all of two checkpoints."""
MAX_TOKENS = 4


class Engine(Protocol):
    def load_weights(self, checkpoint: Path) -> None: ...

    def reset(self, *, connector: bool, running: bool) -> bool: ...

    def ask_all(self, prompts: Sequence[tuple[int, ...]], salt: str | None) -> list[tuple[tuple[int, ...], float]]:
        """Tokens and the smallest gap of each answer."""

    def hit_tokens(self) -> int: ...


@dataclass
class Tally:
    """What came of the loop. `distinct` answers tell the weights apart, `wrong` ones are not those of the weights."""

    rounds: int = 0
    resets: int = 0
    refused: int = 0
    answers: int = 0
    wrong: int = 0
    distinct: int = 0
    hit_tokens: int = 0
    seconds: float = 0.0


def run(engine: Engine, checkpoints: Sequence[Path], rounds: int) -> Tally:
    """Each round: other weights, a reset with the connector, some prompts; then a reset without it, and they again."""
    drawn = [draw_tokens(random.Random(f"{length} {n}"), length) for length in LENGTHS for n in (1, 2)]
    references = []
    for number, checkpoint in enumerate(checkpoints):
        engine.load_weights(checkpoint)
        engine.reset(connector=True, running=False)
        references.append(engine.ask_all(drawn, f"reference {number}"))
    clear = [n for n in range(len(drawn)) if all(answers[n][1] >= SMALLEST_GAP for answers in references)]
    prompts = [drawn[n] for n in clear]
    expected = [[answers[n][0] for n in clear] for answers in references]
    tally = Tally(distinct=sum(one != other for one, other in zip(*expected, strict=True)))
    started_s, hits = time.monotonic(), engine.hit_tokens()
    for tally.rounds in range(1, rounds + 1):
        weights = tally.rounds % len(checkpoints)
        engine.load_weights(checkpoints[weights])
        some = slice(tally.rounds % PARTS, None, PARTS)
        for connector in (True, False):
            tally.resets += 1
            tally.refused += not engine.reset(connector=connector, running=tally.rounds % 4 < 2)
            for (answer, _), right in zip(engine.ask_all(prompts[some], None), expected[weights][some], strict=True):
                tally.answers += 1
                tally.wrong += answer != right
    tally.hit_tokens = engine.hit_tokens() - hits
    tally.seconds = round(time.monotonic() - started_s, 1)
    return tally


class InProcess:
    """vLLM's `LLM`; VLLM_ENABLE_V1_MULTIPROCESSING says whether its engine has a process of its own."""

    def __init__(self, model: Path) -> None:
        from vllm import LLM

        from e2e.server import KV_TRANSFER

        self._llm = LLM(
            str(model), dtype="float32", enforce_eager=True, max_model_len=2048, disable_log_stats=False,
            kv_transfer_config=KV_TRANSFER,
        )  # fmt: skip

    def load_weights(self, checkpoint: Path) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})

    def reset(self, *, connector: bool, running: bool) -> bool:
        return self._llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)

    def ask_all(self, prompts: Sequence[tuple[int, ...]], salt: str | None) -> list[tuple[tuple[int, ...], float]]:
        from vllm import SamplingParams

        asked: list[Any] = [
            {"prompt_token_ids": list(prompt)} | ({} if salt is None else {"cache_salt": salt}) for prompt in prompts
        ]
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=2, ignore_eos=True)
        outputs = [request.outputs[0] for request in self._llm.generate(asked, params, use_tqdm=False)]
        return [(tuple(one.token_ids), min(map(gap, one.logprobs))) for one in outputs]

    def hit_tokens(self) -> int:
        names = "vllm:mooncake_connector_hit_tokens"
        return int(sum(one.value for one in self._llm.get_metrics() if one.name.startswith(names)))

    def sleep_and_wake(self) -> None:
        """On the CPU backend sleeping is no more than its reset; it raises where that is refused."""
        self._llm.sleep(1)
        self._llm.wake_up()


def gap(step: Any) -> float:
    best, second, *_ = sorted((one.logprob for one in step.values()), reverse=True)
    return float(best - second)


if __name__ == "__main__":
    model, other, rounds = sys.argv[1:]
    engine = InProcess(Path(model))
    tally = run(engine, [Path(model), Path(other)], int(rounds))
    for _ in range(3):
        engine.ask_all([draw_tokens(random.Random(1), 300)], None)
        engine.sleep_and_wake()
    print("TALLY", json.dumps(asdict(tally)), flush=True)
