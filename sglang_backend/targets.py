"""Functions of SGLang that hooks rest on, each compared with what it was in the version that this package knows."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


@dataclass(frozen=True, slots=True)
class Target:
    """A function of SGLang that we hook (or, without `hook`, call), and what it was in the version we know.

    Args:
        parameters: None for what is no function, and only has to be there.
        names: of attributes and functions that its code uses, and that we rest on.
    """

    path: str
    parameters: tuple[str, ...] | None = None
    hook: Callable[..., Any] | None = None
    type: HookType = HookType.AROUND
    names: tuple[str, ...] = ()


class _Nested:
    """Our hooks around one function as one hook, each around those placed before it: SGLang warns of several."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hooks = [hook]

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for hook in self.hooks:
            call = partial(hook, call)
        return call(*args, **kwargs)


def misfits(targets: Sequence[Target]) -> list[str]:
    """One phrase for each target that is missing here or has other parameters; it imports what the targets are in."""
    return [found for target in targets if (found := misfit(target))]


def misfit(target: Target) -> str | None:
    """What is wrong with `target` in this SGLang, or None."""
    try:
        found = pkgutil.resolve_name(target.path)
        if target.parameters is None:
            return None
        parameters = tuple(inspect.signature(found).parameters)
    except Exception as error:
        return f"{target.path} cannot be found ({error})"
    if parameters != target.parameters:
        return f"{target.path} has the parameters ({', '.join(parameters)}) instead of ({', '.join(target.parameters)})"
    known = getattr(getattr(inspect.unwrap(found), "__code__", None), "co_names", ())
    missing = [name for name in target.names if name not in known]
    return f"{target.path} does without {', '.join(missing)}" if missing else None


def place(targets: Sequence[Target]) -> None:
    """Register the hooks, each once in a process. SGLang applies them after the plugin has returned."""
    for target in targets:
        if target.hook is None or _registered(target):
            continue
        if target.type is not HookType.AROUND:
            HookRegistry.register(target.path, target.hook, target.type)
        elif nested := next((hook for hook in _hooks(target) if isinstance(hook, _Nested)), None):
            nested.hooks.append(target.hook)
        else:
            HookRegistry.register(target.path, _Nested(target.hook), target.type)


def in_force(targets: Sequence[Target]) -> bool:
    """Whether all hooks are in force in this process."""
    return all(
        _registered(target) and target.path in HookRegistry._patched for target in targets if target.hook is not None
    )


def _registered(target: Target) -> bool:
    return any(target.hook in (hook.hooks if isinstance(hook, _Nested) else [hook]) for hook in _hooks(target))


def _hooks(target: Target) -> list[Callable[..., Any]]:
    """What anybody has registered for the function."""
    return [hook for _, hook, _ in HookRegistry._hooks.get(target.path, ())]
