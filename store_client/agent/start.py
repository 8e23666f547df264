"""Sees to it that a pool has an agent: starts a process, or a thread of this one, or leaves it to others.

A process that is started inherits nothing but what it needs: a fresh interpreter in a session of its own, that is no
child of the engine's (engines kill their children), with a few environment variables and no open file but the agent's
lock and its log. That lock is taken before and handed over, so that of any number of processes that start one at the
same time one does. Settings go through a pipe.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import ENV_PREFIX
from mooncake_connector.log import get_logger, printable
from store_client.agent import lock as lock_
from store_client.agent.settings import dump_settings
from store_client.embedded.folder import AGENT_LOG
from store_client.embedded.locks import open_file

if TYPE_CHECKING:
    from store_client.agent.agent import Agent

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_WELL_S = 60.0
"""A connection that lasted so long says that the agent works: the next start is not put off."""
_DETACHED_S = 30.0
_STOP_S = 15.0
_LAST_NBYTES = 4096
_VARIABLES = {
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME",
    "VIRTUAL_ENV", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
}  # fmt: skip
_PREFIXES = ("MOONCAKE_", "MC_", "AWS_", "SSL_")
# The first process ends as soon as it has made the second, whose parent is then nobody of the engine's.
_DETACH = "import os, sys\nif os.fork(): os._exit(0)\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"

logger = get_logger(__name__)


class Starter:
    """Belongs to one thread.

    Args:
        lost: counts and says why no agent serves: a message and what belongs into it, the error last.
    """

    def __init__(self, pool: Path, config: Config, lost: Callable[..., None]) -> None:
        self._pool, self._config, self._lost = pool, config, lost
        self._pause_s = _FIRST_PAUSE_S
        self._next_s = 0.0
        self._served = True
        """Whether the agent that was started last has welcomed this process."""
        self._agent: Agent | None = None
        self._thread: threading.Thread | None = None

    def see_to_it(self) -> bool:
        """Called while no agent listens. False where others are to start it."""
        if self._config.agent == "external":
            return False
        if time.monotonic() < self._next_s:
            return True
        self._next_s = time.monotonic() + self._pause_s
        try:
            lock = lock_.hold(self._pool)
            if lock is None:  # one is about to listen, or to fail at that
                return True
            if self._config.agent == "embedded":
                self._begin_thread(lock)
            else:
                self._begin_process(lock)
        except Exception as error:
            said = "no page is fetched: the agent of pool %s cannot be started (tried again within %d s): %s"
            self._lost(said, self._pool, _LONGEST_PAUSE_S, error)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True

    def lasted(self, connected_s: float) -> None:
        """The connection to an agent is over, after so long."""
        self._served = True
        if connected_s > _WELL_S:
            self._pause_s = _FIRST_PAUSE_S

    def close(self) -> None:
        """End the agent that is a thread of this process, if there is one."""
        if self._agent is not None and self._thread is not None:
            self._agent.stop("its process closes the pool")
            self._thread.join(_STOP_S)

    def _begin_process(self, lock: int) -> None:
        if not self._served:  # nobody else reads what it says
            said = "no page is fetched: the agent of pool %s that was started ended and not served this process: %s"
            self._lost(said, self._pool, _last_words(self._pool / AGENT_LOG))
        self._served = False
        try:
            start_process(self._pool, self._config, lock)
        finally:
            lock_.let_go(lock)

    def _begin_thread(self, lock: int) -> None:
        thread = threading.Thread(
            target=self._run, args=(lock,), name="mooncake-connector-embedded-agent", daemon=True
        )
        try:
            thread.start()
        except Exception:  # as many as may be are there; else nobody could start one on this pool any more
            lock_.let_go(lock)
            raise
        self._thread = thread

    def _run(self, lock: int) -> None:
        try:
            from store_client.agent.agent import Agent  # not before it is wanted: it brings what all tiers need

            self._agent = Agent(self._pool, self._config, lock, idle_s=None)
            self._agent.run()
        except Exception as error:
            self._lost("no page is fetched: the embedded agent ended: %s", error)
        finally:
            lock_.let_go(lock)


def start_process(pool: Path, config: Config, lock: int) -> None:
    """Start an agent that has this lock from now on; the caller lets go of it. Raises OSError, ValueError,
    subprocess.SubprocessError."""
    settings = dump_settings(pool, lock, config)
    log = open_file(pool / AGENT_LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        starting = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _DETACH, "-m", "store_client.agent"],
            stdin=subprocess.PIPE, stdout=log, stderr=log, close_fds=True, pass_fds=[lock], cwd="/",
            start_new_session=True, env=wanted_environ(os.environ),
        )  # fmt: skip
        try:
            starting.communicate(settings, timeout=_DETACHED_S)
        except BaseException:
            starting.kill()
            raise
        finally:
            starting.wait(_DETACHED_S)
    finally:
        os.close(log)
    if starting.returncode:
        raise OSError(f"the first process of the agent ended with {starting.returncode}; see {pool / AGENT_LOG}")
    logger.info("the agent of pool %s was started; it says in %s how it goes", pool, pool / AGENT_LOG)


def _last_words(log: Path) -> str:
    """Of an agent that has ended, without their time."""
    try:
        fd = open_file(log, os.O_RDONLY)
        try:
            end = os.pread(fd, _LAST_NBYTES, max(0, os.fstat(fd).st_size - _LAST_NBYTES))
        finally:
            os.close(fd)
    except OSError as error:
        return f"{log} cannot be read: {error}"
    lines = end.decode(errors="replace").splitlines()
    return printable(lines[-1].partition(": ")[2] or lines[-1], 1000) if lines else f"{log} is empty"


def wanted_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What an agent needs of it. Our own variables are left out, since the settings have them."""
    return {
        name: value
        for name, value in environ.items()
        if (name in _VARIABLES or name.upper() in _VARIABLES or name.startswith(_PREFIXES))
        and not name.startswith(ENV_PREFIX)
    }
