"""What tiers behind the pool cost vLLM's scheduler with prompts that nobody has; run by the interpreter that has vLLM.

Argument: one JSON object: model (folder), engines (``--kv-transfer-config`` by name), num_requests, prompt_tokens,
rounds, plain (name of the engine without tiers), outcome (path of the JSON file to write). Real schedulers take
requests in turn; where a forward pass would be is a pause, in which other threads run. Each figure is a list by engine:

- ``step_s``: for each round, median seconds of `schedule` and `update_from_output` in a step, while one request
  arrives before each step, up to num_requests, and all are answered;
- ``cpu_s`` and ``plain_cpu_s``: for each round, CPU seconds of the scheduler's thread in all steps that answer such
  requests, and those of the plain engine, whose steps were in turn with these one by one;
- ``arrival_s``: for each round, mean seconds of `add_request`;
- ``pause_s``: vLLM's own pause of a millisecond where nothing is to be computed, by itself, among those of ``idle_s``;
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
_IN_TURN = 1 << 20
"""Beyond the numbers of other rounds' requests."""
_FIGURES = ("step_s", "cpu_s", "plain_cpu_s", "arrival_s", "idle_s", "busy_s", "pause_s")
_EVERY = 4
"""Steps from one arrival to the next in an engine that answers others."""


def main(order: dict[str, Any]) -> None:
    config = base_config(order)
    engines = {name: make_scheduler(config, transfer) for name, transfer in order["engines"].items()}
    outcome: dict[str, dict[str, list[float]]] = {
        name: {figure: [] for figure in _FIGURES} for name in engines
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
        for turn, name in enumerate(turns):
            if name != order["plain"]:
                gc.collect()
                ours, plain = in_turn(order, engines[name], engines[order["plain"]], number * len(turns) + turn)
                if number:
                    outcome[name]["cpu_s"].append(ours)
                    outcome[name]["plain_cpu_s"].append(plain)
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


def in_turn(order: dict[str, Any], scheduler: Any, plain: Any, number: int) -> tuple[float, float]:
    """CPU seconds of both for a crowd each that is new to them, step by step in turn: what is between two steps is the
    same for both."""
    loops = [Loop(scheduler, _SHORT_S), Loop(plain, _SHORT_S)]
    crowds = [make_requests(order["num_requests"], _IN_TURN + 2 * number + i, order["prompt_tokens"]) for i in (0, 1)]
    step = 0
    while step < order["num_requests"] or any(loop.is_busy() for loop in loops):
        first = (step + number) % 2
        both = [(loops[i], crowds[i]) for i in (first, 1 - first)]
        for loop, crowd in both:
            if step < len(crowd):
                loop.add(crowd[step])
        for loop, _ in both:
            loop.plan()
        time.sleep(_SHORT_S)
        for loop, _ in both:
            loop.finish()
        step += 1
    return loops[0].cpu_s, loops[1].cpu_s


def measure(scheduler: Any, crowd: list[Any], single: list[Any]) -> dict[str, list[float]]:
    """One round."""
    many = Loop(scheduler, _SHORT_S)
    for request in crowd:
        many.add(request)
        many.step()
    many.drain()
    alone, others, late = single[:_ALONE], single[_ALONE:-_OTHERS], single[-_OTHERS:]
    idle, pauses_s = Loop(scheduler, _SHORT_S), []
    for request in alone:
        start = time.perf_counter()
        time.sleep(_ASK_AGAIN_S)
        pauses_s.append(time.perf_counter() - start)
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
        "pause_s": pauses_s,
    }


class Loop:
    """What vLLM's engine does, and how long it takes."""

    def __init__(self, scheduler: Any, forward_s: float) -> None:
        self._scheduler, self._forward_s = scheduler, forward_s
        self.steps_s: list[float] = []
        self.arrival_s = self.cpu_s = 0.0
        self._names: list[str] = []
        self._came_s: dict[str, float] = {}
        self.waits_s: dict[str, float] = {}

    def add(self, request: Any) -> None:
        start = self._came_s[request.request_id] = time.perf_counter()
        self._scheduler.add_request(request)
        self.arrival_s += time.perf_counter() - start

    def is_busy(self) -> bool:
        return bool(self._scheduler.has_unfinished_requests())

    def drain(self) -> None:
        while self.is_busy():
            self.step()

    def step(self) -> None:
        self.plan()
        time.sleep(self._forward_s if self._names else _ASK_AGAIN_S)
        self.finish()

    def plan(self) -> None:
        start, cpu_s = time.perf_counter(), time.thread_time()
        self._scheduled = scheduled = self._scheduler.schedule()
        planned = time.perf_counter()
        self.cpu_s += time.thread_time() - cpu_s
        self._names = list(scheduled.num_scheduled_tokens)
        for request in scheduled.scheduled_new_reqs:
            self.waits_s[request.req_id] = planned - self._came_s[request.req_id]
        self._planning_s = planned - start

    def finish(self) -> None:
        """After the forward pass."""
        output = answer(self._names)
        computed, cpu_s = time.perf_counter(), time.thread_time()
        self._scheduler.update_from_output(self._scheduled, output)
        self.cpu_s += time.thread_time() - cpu_s
        if self._names:  # a step with nothing to compute keeps nobody waiting
            self.steps_s.append(self._planning_s + time.perf_counter() - computed)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
