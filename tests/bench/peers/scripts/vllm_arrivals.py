"""What tiers behind the pool cost vLLM's scheduler with prompts that nobody has; run by the interpreter that has vLLM.

Argument: one JSON object: model (folder), engines (``--kv-transfer-config`` by name), num_requests, prompt_tokens,
rounds, outcome (path of the JSON file to write). Real schedulers take requests in turn; where a forward pass would be
is a pause, in which other threads run. Each figure is a list by engine:

- ``step_s``: for each round, median seconds of `schedule` and `update_from_output` in a step, while one request
  arrives before each step, up to num_requests, and all are answered;
- ``arrival_s``: for each round, mean seconds of `add_request`;
- ``idle_s`` and ``busy_s``: for each request, seconds from its arrival until a step was planned with it, in an engine
  that has nothing else to do, and in one that answers others.
"""

import gc
import json
import random
import statistics
import sys
import time
from typing import Any

from outcome import write_outcome
from vllm_idle import answer, base_config, make_requests, make_scheduler

_SHORT_S, _LONG_S = 0.002, 0.01
"""A forward pass."""
_ASK_AGAIN_S = 0.001
"""vLLM's own pause where there was nothing to compute."""
_ALONE = 8
_OTHERS = 8
_EVERY = 4
"""Steps from one arrival to the next in an engine that answers others."""


def main(order: dict[str, Any]) -> None:
    config = base_config(order)
    engines = {name: make_scheduler(config, transfer) for name, transfer in order["engines"].items()}
    outcome: dict[str, dict[str, list[float]]] = {
        name: {figure: [] for figure in ("step_s", "arrival_s", "idle_s", "busy_s")} for name in engines
    }
    gc.collect()
    gc.freeze()  # what vLLM has loaded would be walked through in every collection
    gc.disable()
    for number in range(order["rounds"] + 1):
        turns = list(engines)
        random.Random(number).shuffle(turns)
        requests = {name: _requests(order, number) for name in turns}
        for name in turns:
            gc.collect()
            found = measure(engines[name], *requests[name])
            for figure, taken in found.items() if number else ():
                outcome[name][figure] += taken
        write_outcome(order["outcome"], outcome)
    for scheduler in engines.values():
        scheduler.shutdown()
    write_outcome(order["outcome"], {**outcome, "ready": True})


def _requests(order: dict[str, Any], number: int) -> tuple[list[Any], list[Any]]:
    """Those of the crowd, and those that are asked for their first token only; new in every round."""
    count, tokens = order["num_requests"], order["prompt_tokens"]
    crowd = make_requests(count, 2 * number, tokens)
    single = make_requests(_ALONE + 2 * _OTHERS, 2 * number + 1, tokens)
    for request in (*single[:_ALONE], *single[-_OTHERS:]):
        request.max_tokens = 1
    return crowd, single


def measure(scheduler: Any, crowd: list[Any], single: list[Any]) -> dict[str, list[float]]:
    """One round."""
    many = Loop(scheduler, _SHORT_S)
    for request in crowd:
        many.add(request)
        many.step()
    many.drain()
    alone, others, late = single[:_ALONE], single[_ALONE:-_OTHERS], single[-_OTHERS:]
    idle = Loop(scheduler, _SHORT_S)
    for request in alone:
        idle.add(request)
        idle.drain()
    busy = Loop(scheduler, _LONG_S)
    for request in others:
        busy.add(request)
    for request in late:
        for _ in range(_EVERY):
            busy.step()
        busy.add(request)
    busy.drain()
    return {
        "step_s": [statistics.median(many.steps_s)],
        "arrival_s": [many.arrival_s / len(crowd)],
        "idle_s": [idle.waits_s[request.request_id] for request in alone],
        "busy_s": [busy.waits_s[request.request_id] for request in late],
    }


class Loop:
    """What vLLM's engine does, and how long it takes."""

    def __init__(self, scheduler: Any, forward_s: float) -> None:
        self._scheduler, self._forward_s = scheduler, forward_s
        self.steps_s: list[float] = []
        self.arrival_s = 0.0
        self._came_s: dict[str, float] = {}
        self.waits_s: dict[str, float] = {}

    def add(self, request: Any) -> None:
        start = self._came_s[request.request_id] = time.perf_counter()
        self._scheduler.add_request(request)
        self.arrival_s += time.perf_counter() - start

    def drain(self) -> None:
        while self._scheduler.has_unfinished_requests():
            self.step()

    def step(self) -> None:
        start = time.perf_counter()
        scheduled = self._scheduler.schedule()
        planned = time.perf_counter()
        names = list(scheduled.num_scheduled_tokens)
        for request in scheduled.scheduled_new_reqs:
            self.waits_s[request.req_id] = planned - self._came_s[request.req_id]
        time.sleep(self._forward_s if names else _ASK_AGAIN_S)
        output = answer(names)
        computed = time.perf_counter()
        self._scheduler.update_from_output(scheduled, output)
        if names:  # a step with nothing to compute keeps nobody waiting
            self.steps_s.append(planned - start + time.perf_counter() - computed)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
