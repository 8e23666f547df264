"""The calls by which weights in an engine's memory change, or are about to: three methods of vLLM's EngineCore.

`collective_rpc` is the one way from outside into the workers, for `update_weights`, `reload_weights` and functions of
the user's own. `reset_prefix_cache` comes after an update, or before one (`sleep`, `pause`). In an engine that runs in
its user's process weights may change past both, so there nothing is concluded from them. `add_lora` loads an adapter
when the engine starts or the user says so; others are loaded with their first request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mooncake_connector.contain import contained, nothing
from vllm_plugin.adapter_files import Signature
from vllm_plugin.weights.reading import Reading
from vllm_plugin.wrapping import wrap


@contained(nothing)
def watch() -> None:
    """Have EngineCore say when weights may change; safe to call again. Where it cannot, each reset ends all sharing."""
    from vllm.v1.engine.core import EngineCore

    methods: dict[str, Callable[..., Any]] = {
        "collective_rpc": _around_rpc,
        "reset_prefix_cache": _around_reset,
        "add_lora": _around_add_lora,
    }
    if all(callable(getattr(EngineCore, name, None)) for name in methods):
        for name, around in methods.items():
            wrap(EngineCore, name, around)


def _around_rpc(call: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    _before(core)
    try:
        return call(core, *args, **kwargs)
    finally:  # also one that failed may have changed weights
        _after_rpc(core)


def _around_reset(
    call: Callable[..., Any], core: Any, reset_running_requests: bool = False, reset_connector: bool = False
) -> Any:
    if reset_connector:  # others empty vLLM's own cache alone, as benchmarks do
        _before(core)
    answer = call(core, reset_running_requests, reset_connector)
    if answer is True:
        _after_reset(core)
    return answer


def _around_add_lora(call: Callable[..., Any], core: Any, lora_request: Any) -> Any:
    signatures = _before_add_lora(core, lora_request)  # later its files may say something else
    answer = call(core, lora_request)
    _after_add_lora(lora_request, signatures)
    return answer


@contained(list)
def _before_add_lora(core: Any, lora_request: Any) -> list[tuple[Any, Signature | None]]:
    return [(side.prefix, side.prefix.adapter_files(lora_request)) for side in _sides(core)]


@contained(nothing)
def _after_add_lora(lora_request: Any, signatures: list[tuple[Any, Signature | None]]) -> None:
    for prefix, signature in signatures:
        prefix.adapter_loaded(lora_request, signature)


@contained(nothing)
def _before(core: Any) -> None:
    """Without a deadline: after a `timeout` vLLM's executor takes a late answer for that to its next call, a step.

    Each worker has one instead (`worker`), and one that has died ends the wait. A device that hangs holds up any call.
    """

    def run(function: Callable[[Any], Reading | None]) -> list[Reading | None]:
        return list(core.model_executor.collective_rpc(function))

    if _has_own_process(core):
        for side in _sides(core):
            side.prefix.weights.remember(run)


@contained(nothing)
def _after_rpc(core: Any) -> None:
    for side in _sides(core):
        side.weights_may_be_others()


@contained(nothing)
def _after_reset(core: Any) -> None:
    for side in _sides(core):
        side.prefix.own_cache_emptied()


def _has_own_process(core: Any) -> bool:
    from vllm.v1.engine.core import EngineCoreProc

    return isinstance(core, EngineCoreProc)


def _sides(core: Any) -> Iterator[Any]:
    """The scheduler side of each connector of ours; none while the engine is being made."""
    from vllm_plugin.connector import ours

    for connector in ours(getattr(getattr(core, "scheduler", None), "connector", None)):
        if connector._scheduler is not None:
            yield connector._scheduler
