"""One client of the library and what it takes to have one: it is set up, watched, and set up anew when it must be.

A thread of its own does this, so that a master that is down delays nobody: until there is a client, calls fail at
once with the reason. A client is only ever called after its `setup` succeeded, and is closed only when no call is in
it; both would crash the process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from mooncake_connector.log import get_logger, kind_of, log_once, printable
from store_client.tiers.base import TierError
from store_client.tiers.mooncake import trial
from store_client.tiers.mooncake.memory import Registered
from store_client.tiers.mooncake.names import PROBE
from store_client.tiers.mooncake.settings import DEFAULT_VARIABLES, ClientSettings

TRIAL_S = 30.0
"""For a process that tries to set a client up; most of it is for a busy machine to start Python."""
_FIRST_S, _MOST_S = 0.5, 15.0
"""Between two tries, at first and in the end."""
_PATIENCE_S = 30.0
"""For a client whose master does not answer to find it again by itself; then another is set up."""
_CLOSE_S = 10.0
_CONNECT_S = 2.0

_log = get_logger(__name__)
_environment = threading.Lock()  # the library reads it while it sets a client up


class Link:
    """The client of one tier. Safe to use from any thread.

    Args:
        title: of the tier, for messages.
        library: the module mooncake.store.
    """

    def __init__(self, title: str, settings: ClientSettings, library: ModuleType, registered: Registered) -> None:
        self._title, self._settings, self._library, self._registered = title, settings, library, registered
        self._changed = threading.Condition()
        self._client: Any = None
        self._usable = self._closed = self._doubted = False
        self._why: str | None = None
        self._calls = 0
        self.setups = 0
        self._thread = threading.Thread(target=self._keep, name=f"mooncake tier {title}", daemon=True)
        self._thread.start()

    @contextmanager
    def client(self, deadline_s: float) -> Iterator[Any]:
        """The client, for one call. Waits for the first set-up only; raises TierError where there is none."""
        end_s = time.monotonic() + deadline_s
        with self._changed:
            while not (self._usable or self._closed or self._why):
                if not self._changed.wait(end_s - time.monotonic()):
                    raise TierError(f"tier {self._title}: its client is still being set up", "timeout")
            if self._closed:
                raise TierError(f"tier {self._title} is closed", "unavailable")
            if not self._usable:
                cause = "version" if "version" in (self._why or "").lower() else "unavailable"
                raise TierError(f"tier {self._title}: {self._why}", cause)
            client = self._client
            self._calls += 1
        try:
            yield client
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def doubt(self, reason: str) -> None:
        """The master did not answer: nobody calls the client until it does, or another one is set up."""
        with self._changed:
            if self._usable:
                self._usable, self._doubted, self._why = False, True, reason
                self._changed.notify_all()

    @property
    def state(self) -> str:
        with self._changed:
            return "connected" if self._usable else self._why or "being set up"

    def close(self) -> None:
        with self._changed:
            self._closed, self._usable = True, False
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    def _keep(self) -> None:
        while not self._closed:
            if self._set_up():
                self._watch()
            self._put_away()

    def _set_up(self) -> bool:
        """Until there is a client, or nobody wants one any more."""
        pause_s = _FIRST_S
        while not self._closed:
            reason = self._why_not() or self._tried()
            if reason is None:
                with self._changed:
                    self.setups += 1
                    self._usable, self._doubted, self._why = not self._closed, False, None
                    self._changed.notify_all()
                _log.info("tier %s: connected to the Mooncake master at %s", self._title, self._settings.master)
                return True
            self._unavailable(reason)
            self._sleep(pause_s)
            pause_s = min(pause_s * 2, _MOST_S)
        return False

    def _why_not(self) -> str | None:
        """Why it makes no sense to set a client up, found out where that can be bounded."""
        settings = self._settings
        if settings.address is not None:
            try:
                socket.create_connection(settings.address, _CONNECT_S).close()
            except OSError as error:
                return f"nobody listens at {settings.master} ({error}): is mooncake_master running there?"
        order = json.dumps({"arguments": self._arguments(0), "options": self._options(), "probe": PROBE})
        try:
            ended = subprocess.run(
                [sys.executable, trial.__file__, order], stdin=subprocess.DEVNULL, capture_output=True,
                env={**DEFAULT_VARIABLES, **os.environ, **settings.variables()}, timeout=TRIAL_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"the master at {settings.master} has not answered a client within {TRIAL_S:g} s"
        except OSError as error:
            return f"no process can be started to try the master at {settings.master}: {error}"
        if ended.returncode == 0:
            return None
        lines = [line for line in ended.stderr.decode(errors="replace").splitlines() if line.startswith("E")]
        said = printable(lines[-1].rpartition("] ")[2], 300) if lines else f"status {ended.returncode}"
        return f"no client can be set up with the master at {settings.master}: {said}"

    def _tried(self) -> str | None:
        """Set a client up in this process; why that failed."""
        client = self._library.MooncakeDistributedStore()
        with _environment:
            for name, value in DEFAULT_VARIABLES.items():
                os.environ.setdefault(name, value)
            os.environ.update(self._settings.variables())
            status = client.setup(*self._arguments(self._settings.segment_nbytes), **self._options())
        if status != 0:
            return f"no client can be set up with the master at {self._settings.master}: status {status}"
        self._client = client
        self._registered.attach(client)
        return None

    def _arguments(self, segment_nbytes: int) -> tuple[Any, ...]:
        host, metadata, _, *others = self._settings.arguments
        return (host, metadata, segment_nbytes, *others)

    def _options(self) -> dict[str, str]:
        return {} if self._settings.tenant is None else {"tenant_id": self._settings.tenant}

    def _watch(self) -> None:
        """Until the client is of no use any more."""
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._doubted or self._closed)
            if not self._closed and not self._recovered():
                return

    def _recovered(self) -> bool:
        end_s, pause_s = time.monotonic() + _PATIENCE_S, _FIRST_S
        while not self._closed and time.monotonic() < end_s:
            self._sleep(pause_s)
            if self._client.is_exist(PROBE) >= 0:
                with self._changed:
                    self._usable, self._doubted, self._why = not self._closed, False, None
                _log.info("tier %s: the Mooncake master at %s answers again", self._title, self._settings.master)
                return True
            pause_s = min(pause_s * 2, _MOST_S)
        return False

    def _put_away(self) -> None:
        """Close the client once no call is in it. Where that is not to be had it is kept for good."""
        with self._changed:
            self._usable = False
            client, self._client = self._client, None
            idle = self._changed.wait_for(lambda: self._calls == 0, _CLOSE_S if self._closed else 2 * TRIAL_S)
        self._registered.attach(None)
        if client is not None and idle and self._settings.address is not None:
            client.close()
        elif client is not None:
            _kept.append(client)

    def _unavailable(self, reason: str) -> None:
        with self._changed:
            self._why = reason
            self._changed.notify_all()
        log_once(
            f"tiers.mooncake.setup:{self._title}:{kind_of(reason)}", "tier %s: %s; it is tried again", self._title,
            reason, logger=_log,
        )  # fmt: skip

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)


_kept: list[Any] = []
"""Clients with a call in them that does not return, since to destroy one would crash the process; and those of elected
masters, which take up to half a minute to close, with the interpreter lock held."""
