"""What a fault of the pool means: a caller's own exception, damage that ends in a rebuild, or something that passes."""

import struct
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import lmdb

from mooncake_connector.log import get_logger, log_once

logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class Damaged(Exception):
    """Something in the pool is what no writer of ours leaves."""


class CallersOwn(Exception):
    """Carries an exception of the caller's callback, its cause, out of a call that contains its own."""


DAMAGE = (
    Damaged, lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, lmdb.PageNotFoundError, lmdb.PanicError,
    struct.error, ValueError, IndexError, KeyError, OverflowError,
)  # fmt: skip
"""What only damaged files raise once the caller's arguments were checked: nothing else may cost anybody the pool."""


def callers(callback: Callable[P, R]) -> Callable[P, R]:
    """`callback`, whose exceptions are not ours to contain."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return callback(*args, **kwargs)
        except Exception as error:
            raise CallersOwn from error

    return call


def start_thread(name: str, run: Callable[..., None], *arguments: Any) -> bool:
    """Run in the background; False, after one log line, where the system has no thread left."""
    try:
        threading.Thread(target=run, args=arguments, name=f"mooncake-connector-{name}", daemon=True).start()
    except RuntimeError as error:
        log_once("store.thread", "no thread can be started (%s); raise the limit (`ulimit -u`)", error, logger=logger)
        return False
    return True
