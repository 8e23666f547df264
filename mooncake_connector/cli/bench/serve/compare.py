"""`bench serve --model DIR`: the same requests to vLLM alone and with our connector (or others beside it).

On the CPU all servers are up at once, as far as the memory allows, and take turns round by round, so that a
neighbour's load falls on all of them; a server that waits is idle. On a device there is one at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mooncake_connector.cli.bench.machine import check_room, describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import BenchError, Progress
from mooncake_connector.cli.bench.serve.answer import Answer
from mooncake_connector.cli.bench.serve.client import completion
from mooncake_connector.cli.bench.serve.engines import (
    ALONE,
    MODEL_NAME,
    OURS,
    Connectors,
    Engine,
    Memory,
    Shape,
    fits_at_once,
    probe,
    read_shape,
    start,
)
from mooncake_connector.cli.bench.serve.load import Pass, run_pass
from mooncake_connector.cli.bench.serve.report import NEW, SEEN, Absent, ServeReport, ServeRow, row_of
from mooncake_connector.cli.bench.serve.workload import Prompt, Workload, token_prompts

_SETTLE_S = 1.0
"""Between the two passes of a round: saves are asynchronous."""

_PRESSURE_UP_TO = 0.5


@dataclass
class _Found:
    """The passes of each server so far, one for each round, in the order of the servers."""

    passes: dict[tuple[str, str], list[Pass]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, server: str, prompts: str, item: Pass) -> None:
        self.passes.setdefault((server, prompts), []).append(item)

    def rows(self) -> list[ServeRow]:
        """All answers are held against what vLLM alone answered to the prompts when they were new."""
        alone = self.passes.get((ALONE, NEW))
        right = [item.answers for item in alone] if alone else None
        return [
            row_of(server, prompts, passes, None if (server, prompts) == (ALONE, NEW) else right)
            for (server, prompts), passes in self.passes.items()
        ]


def run(
    python: Path, model: Path, dtype: str, work: Workload, connectors: Connectors, folder: Path, limit_s: float,
    progress: Progress,
) -> ServeReport:  # fmt: skip
    """Measure. A connector that does not run is in the report with its reason; vLLM alone and ours have to run."""
    shape = read_shape(model, dtype)
    environment = probe(python)
    memory = Memory.of(shape, work, on_cpu=environment.device is None)
    if memory.share > _PRESSURE_UP_TO:
        progress(
            f"WARNING: the engine's own cache has room for {memory.share:.0%} of the prefixes, since it has to hold "
            f"{work.concurrency} requests at a time: there is little left for a connector to do; give more --prefixes "
            "or less --concurrency"
        )
    found = _Found()
    check_room(folder, 2 * memory.capacity_nbytes, "ask for fewer --prefixes or --rounds")
    machine = {**describe_machine(folder), "accelerator": environment.device}
    together = environment.device is None and fits_at_once(shape, memory, len(connectors))
    for group in [connectors] if together else [{name: set_up} for name, set_up in connectors.items()]:
        progress(f"starting vLLM: {', '.join(group)}")
        with start(group, environment, shape, memory, folder) as (engines, absent):
            found.absent.update(absent)
            for name, reason in absent.items():
                progress(f"WARNING: {name} is not measured: {reason}")
            _measure(engines, shape, work, limit_s, found, progress)
        for name in (ALONE, OURS):
            if name in group and (name, SEEN) not in found.passes:
                raise BenchError(f"{name} could not be measured: {found.absent.get(name, 'no request succeeded')}")
    machine["load_1min_at_the_end"] = round(os.getloadavg()[0], 2)
    settings: dict[str, str | int | float | None] = {
        **{name: getattr(work, name) for name in work.__slots__},
        "model": model.resolve().name,
        "dtype": dtype,
        "engine_cache_blocks": memory.blocks,
        "engine_cache_share": round(memory.share, 2),
        "block_tokens": memory.block_tokens,
        "servers": "all at once, in turns" if together else "one at a time",
    }
    absent_rows = [Absent(name, reason) for name, reason in found.absent.items()]
    return ServeReport(machine, {**describe_versions(), **environment.versions}, settings, found.rows(), absent_rows)


def _measure(
    engines: Sequence[Engine], shape: Shape, work: Workload, limit_s: float, found: _Found, progress: Progress
) -> None:
    alive = list(engines)
    for number in range(work.rounds + 1):
        # The first round has a few requests only: it warms up what a server does once.
        prompts = token_prompts(work, shape.vocabulary, f"round {number}")
        if number == 0:
            prompts = prompts[: work.concurrency]
        for engine in alive if number % 2 else alive[::-1]:
            progress(f"{engine.name}: round {number} of {work.rounds}" if number else f"{engine.name}: warming up")
            new, seen = _one_round(engine, prompts, work, limit_s)
            if not engine.is_alive:
                found.absent[engine.name] = f"died in round {number}: {engine.reason()}"
                progress(f"WARNING: {engine.name} {found.absent[engine.name]}")
            elif number == 0 and seen.reason is not None:
                progress(f"WARNING: {engine.name}: {seen.reason}")
            if number:
                found.add(engine.name, NEW, new)
                found.add(engine.name, SEEN, seen)
        alive = [engine for engine in alive if engine.is_alive]


def _one_round(engine: Engine, prompts: Sequence[Prompt], work: Workload, limit_s: float) -> tuple[Pass, Pass]:
    def ask(prompt: Prompt) -> Answer:
        body = {**completion(MODEL_NAME, prompt, work.answer_tokens), "ignore_eos": True, "return_token_ids": True}
        return engine.server.stream(body, limit_s)

    new = run_pass(engine.server, ask, prompts, work.concurrency)
    time.sleep(_SETTLE_S)
    return new, run_pass(engine.server, ask, prompts, work.concurrency)
