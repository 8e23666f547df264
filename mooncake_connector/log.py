"""One log line per cause, however often the cause occurs, and one line it is, whoever the words in it come from.

A fault that repeats on every page must not flood an engine's log; the counters tell how often it happened. Names,
versions, causes and addresses may be a stranger's: what is no printable character is escaped, and what is long is cut,
so that nobody can forge a line or send escapes to a terminal.
"""

import logging
import os
import re
import threading
import traceback

ROOT_LOGGER = "mooncake_connector"

_MAX_CAUSES = 4096
_MAX_LENGTH = 2000
"""Characters of a message that are shown."""
_lock = threading.RLock()  # what the collector of cycles ends may log, inside of this as well
_seen: set[str] = set()
_VARYING = re.compile("[0-9'\"`]")


def get_logger(name: str) -> logging.Logger:
    """A logger below `mooncake_connector`, whose level `log_level` sets, whichever package asks.

    `name` is the module's `__name__`; no handlers are added, since the process belongs to the engine.
    """
    is_ours = name == ROOT_LOGGER or name.startswith(ROOT_LOGGER + ".")
    logger = logging.getLogger(name if is_ours else f"{ROOT_LOGGER}.{name}")
    logger.addFilter(_one_line)  # counts once, however often it is added
    return logger


def printable(text: str, limit: int = _MAX_LENGTH) -> str:
    """`text` on one line: other characters than printable ones escaped, and cut after `limit` characters."""
    shown = text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
    if shown.isprintable():
        return shown
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in shown)


def _one_line(record: logging.LogRecord) -> bool:
    try:
        message = record.getMessage()
    except Exception as error:  # a filter's exception would reach the engine, other than a handler's
        message = f"{record.msg} ({type(error).__name__} in its arguments)"
    record.msg, record.args = printable(message), ()
    if record.exc_info and not record.exc_text:
        lines = "".join(traceback.format_exception(*record.exc_info)).splitlines()
        record.exc_text = "\n".join("  " + printable(line) for line in lines)  # none begins like a line of a log
    return True


def set_log_level(level: str) -> None:
    """Apply the configured `log_level` ("DEBUG" .. "ERROR") to this package's loggers alone."""
    logging.getLogger(ROOT_LOGGER).setLevel(level)


def log_once(
    cause: str,
    message: str,
    *args: object,
    level: int = logging.WARNING,
    logger: logging.Logger | None = None,
    exc_info: bool = False,
) -> bool:
    """Log `message % args` the first time this process meets `cause`; return whether it was logged.

    `cause` is a short, stable name ("store.checksum", "pool.full:/dev/shm/x"), not the message. After 4,096 different
    causes further new ones are dropped: by then somebody put a varying value into the cause (see `kind_of`).
    """
    with _lock:
        if cause in _seen or len(_seen) >= _MAX_CAUSES:
            return False
        _seen.add(cause)
    target = logger if logger is not None else get_logger(ROOT_LOGGER)
    target.log(level, message, *args, exc_info=exc_info)
    return True


def kind_of(reason: str) -> str:
    """What is the same in reasons that differ in numbers and quoted text only: all before the first of these."""
    return _VARYING.split(reason, maxsplit=1)[0][:80]


def _after_fork_in_child() -> None:
    """A thread that the child does not have may have held the lock."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)
