"""No exception of ours crosses into the engine's scheduler or forward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from mooncake_connector.log import get_logger, log_once

logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def contained(answer: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Keep an exception of ours out of the engine: log it once and give `answer()` instead."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                name = method.__qualname__
                log_once(f"contained.{name}", "%s failed: %r", name, error, logger=logger, exc_info=True)
                return cast(R, answer())

        return call

    return decorate


def nothing() -> None:
    """The answer where nothing is expected."""
