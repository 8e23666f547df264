"""No exception of ours crosses into the engine's scheduler or forward pass, and no wait without an end."""

from __future__ import annotations

import sys
import threading
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


def apart(work: Callable[[], object], deadline_s: float) -> bool:
    """Have `work`, which raises nothing, done by a thread of its own; False where it is not over in time, and goes on.

    For what takes locks and may be called by the collector of cycles: that works inside whatever it interrupts, which
    may hold one of these locks, and lets go of it only when the collector is through.
    """
    thread = threading.Thread(target=work, name="mooncake-connector-apart", daemon=True)
    try:
        if sys.is_finalizing():  # before Python 3.12 a thread that begins now never does, and is waited for
            raise RuntimeError
        thread.start()
    except RuntimeError:  # none can be started
        work()
        return True
    thread.join(deadline_s)
    return not thread.is_alive()
