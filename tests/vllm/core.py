"""What vLLM's EngineCore does around weights that change, on an engine of `harness`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from harness import Engine
from vllm.lora.request import LoRARequest

from vllm_plugin.weights import calls


class Core:
    """An EngineCore with a process of its own, as far as it calls its workers and its scheduler.

    Args:
        engine: what it is the core of.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.scheduler = engine, engine.scheduler
        self.model_executor = SimpleNamespace(collective_rpc=self._call)

    def _call(self, function: Callable[[Any], Any]) -> list[Any]:
        """After the steps that were launched before: each worker does one thing after the other."""
        engine = self.engine
        for _ in range(len(engine._queue)):
            scheduled, output = engine._queue.popleft()
            engine._queue.append((scheduled, output or engine._execute(scheduled)))
        answers = []
        for worker in engine.workers:
            with worker._as_this_worker():
                answers.append(function(worker))
        return answers

    def rpc(self, function: Callable[[Any], Any]) -> list[Any]:
        answers: list[Any] = calls._around_rpc(Core._call, self, function)
        return answers

    def load(self, weights: int) -> None:
        """`reload_weights` and the like."""

        def load(worker: Any) -> None:
            worker.runner.weights = weights

        self.rpc(load)

    def reset(self, *, running: bool = False, connector: bool = True) -> bool:
        answer: bool = calls._around_reset(Core._reset, self, running, connector)
        return answer

    def _reset(self, running: bool, connector: bool) -> bool:
        return bool(self.scheduler.reset_prefix_cache(running, connector))

    def add_lora(self, lora: LoRARequest, *, meanwhile: Callable[[], object] = bool) -> None:
        """The workers load an adapter, and `meanwhile` something happens."""
        calls._around_add_lora(lambda core, request: meanwhile(), self, lora)
