"""The agent as a process of its own: `python -m store_client.agent`, and what `agent --foreground` runs."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import msgspec

from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import load_config
from mooncake_connector.errors import MooncakeConnectorError
from mooncake_connector.log import ROOT_LOGGER, get_logger, printable, set_log_level
from store_client.agent import lock as lock_
from store_client.agent.agent import Agent
from store_client.agent.settings import Settings, read_settings

_ENDED_S = 15.0
"""An agent that is to end has ended by then, whatever its tiers do."""
MAX_LOG_NBYTES = 1 << 20
KEPT_LOG_NBYTES = 128 << 10
_LOOK_AT_LOG_S = 10.0
_SESSION = Path("/proc/self/autogroup")
_SESSIONS_NICENESS = 5
"""A third of the weight of an engine's session. With a tenth (10) a save waits for the thread that publishes."""
_SESSION_S = 1.0
EXIT_FAILED = 1

logger = get_logger(__name__)


def serve(pool: Path, config: Config, lock: int, idle_s: float | None) -> int:
    """Run the agent until it is told to end; the exit code. SIGTERM and SIGINT end it in order."""
    log_to_stderr(config.log_level)
    try:
        agent = Agent(pool, config, lock, idle_s=idle_s, ending=partial(_end_at_last, _ENDED_S))
    except Exception as error:
        logger.error("the agent of pool %s cannot begin: %s", pool, printable(str(error)))
        return EXIT_FAILED

    def end(number: int, frame: object) -> None:
        agent.stop(f"signal {signal.Signals(number).name}")
        _end_at_last(_ENDED_S)  # also where it is not serving yet

    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        reason = agent.run()
    except (MooncakeConnectorError, OSError) as error:
        logger.error("the agent of pool %s ends: %s", pool, error)
        return EXIT_FAILED
    except Exception:
        logger.exception("the agent of pool %s ends", pool)
        return EXIT_FAILED
    return EXIT_FAILED if "removed or replaced" in reason else 0


def main() -> int:
    """Started by an engine (`start`): the settings come from standard input, the lock is open already."""
    os.umask(0o077)
    try:
        settings: Settings = read_settings(sys.stdin.fileno())
        config = load_config(settings.config, {})
    except (MooncakeConnectorError, OSError, msgspec.MsgspecError, ValueError) as error:
        print(f"the agent was not told what to do: {printable(str(error))}", file=sys.stderr)
        return EXIT_FAILED
    _bound_log()
    _give_way_as_a_session()
    return serve(Path(settings.pool), config, lock_.take_over(settings.lock), settings.idle_s)


def leave(code: int) -> None:
    """End this process at once: libraries of tiers take long to be unloaded, and may crash at it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def log_to_stderr(level: str) -> None:
    """What this package logs, from `level` on. May be called again."""
    ours = logging.getLogger(ROOT_LOGGER)
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        ours.addHandler(handler)
        ours.propagate = False
    set_log_level(level)


def _end_at_last(after_s: float) -> None:
    timer = threading.Timer(after_s, os._exit, [EXIT_FAILED])
    timer.daemon = True
    timer.start()


def cut_log(fd: int) -> None:
    """Keep only the end of a file that has become large. Raises OSError."""
    size = os.fstat(fd).st_size
    if size > MAX_LOG_NBYTES:
        end = os.pread(fd, KEPT_LOG_NBYTES, size - KEPT_LOG_NBYTES)
        os.ftruncate(fd, 0)
        os.write(fd, end)


def _give_way_as_a_session() -> None:
    """Where the kernel weighs sessions and no control groups (`sched_autogroup_enabled`), the niceness of our threads
    does not reach engines, which are in others. This session is the agent's alone (`start`)."""
    give_up_s = time.monotonic() + _SESSION_S
    while True:
        try:
            _SESSION.write_text(str(_SESSIONS_NICENESS))
            return
        except BlockingIOError:  # somebody else's was changed a moment ago
            if time.monotonic() > give_up_s:
                return
            time.sleep(0.05)
        except OSError:  # there are none, or a container forbids it
            return


def _bound_log() -> None:
    """Keep the file that standard error goes to small: it lies in the pool's folder, which is memory."""

    def watch() -> None:
        while True:
            time.sleep(_LOOK_AT_LOG_S)
            try:
                cut_log(2)
            except OSError as error:
                logger.warning("the agent's log cannot be kept short: %s", error)
                return

    threading.Thread(target=watch, name="mooncake-connector-log", daemon=True).start()
