"""Wraps functions of vLLM's that have no hook."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

_MARK = "_mooncake_connector_wraps"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Have `around` called in place of a function, method or class method of `owner`, with the former before its
    arguments; safe to call again. What this vLLM lacks is left out."""
    found = getattr(owner, name, None)
    former = getattr(found, "__func__", found)
    if not callable(former) or getattr(former, _MARK, False):
        return

    @wraps(former)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(former, *args, **kwargs)

    setattr(call, _MARK, True)
    setattr(owner, name, call if former is found else classmethod(call))
