"""The agent as a whole: the pool, what fetches from tiers, and the socket, in one thread until it is told to end.

The same in a process of its own (`process`) and in a thread of an engine (`agent: embedded`). Whoever runs one holds
the agent's lock of the pool (`lock`), so that there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from mooncake_connector import __version__
from mooncake_connector.config.schema import Config
from mooncake_connector.config.secret import read_secret
from mooncake_connector.log import get_logger, log_once
from store_client.agent.exporter import Exporter
from store_client.agent.flow import Flow, close_tier
from store_client.agent.forget import Forgetting
from store_client.agent.http.serve import serving
from store_client.agent.later import LaterTier
from store_client.agent.lock import is_in_place
from store_client.agent.server import Server
from store_client.agent.wish import Fetches
from store_client.embedded import EmbeddedStore
from store_client.embedded.folder import AGENT_SOCKET, DESCRIPTION
from store_client.tiers.open import open_tier

_TICK_S = 1.0
_OPEN_S = 3.0
"""For the first attempts to open the tiers, together; an agent whose tiers take longer begins without them."""
_HANG_UP_S = 0.05
"""For what was written to the connections to leave."""

logger = get_logger(__name__)

OpenFetches = Callable[[EmbeddedStore, Config], Fetches]


def open_flow(store: EmbeddedStore, config: Config) -> Fetches:
    """The tiers of `config` behind `store`. Raises ConfigError for a secret that cannot be used."""
    secret = b"" if config.secret_file is None else read_secret(config.secret_file)
    name = str(store.path)
    tiers = [
        (settings, LaterTier(settings.title, lambda settings=settings: open_tier(settings, secret, name)))  # type: ignore[misc]
        for settings in config.tiers
    ]
    give_up_s = time.monotonic() + _OPEN_S
    for _, tier in tiers:  # what suits a tier is known once it is open
        tier.wait(give_up_s - time.monotonic())
    try:
        return Flow(store, tiers, secret)
    except BaseException:
        for settings, tier in tiers:
            close_tier(settings.title, tier)
        raise


class Agent:
    """Args:
    pool: the folder of a pool that exists.
    lock: file descriptor of its agent's lock, which is held (`lock.hold`).
    idle_s: ends when nobody was connected for so long; None: only when told.
    ending: called once it serves nobody any more, and before its tiers are closed, of which one may hang.
    """

    def __init__(
        self,
        pool: Path,
        config: Config,
        lock: int,
        *,
        idle_s: float | None,
        open_fetches: OpenFetches = open_flow,
        ending: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool, self._config, self._lock, self._idle_s = pool, config, lock, idle_s
        self._open_fetches, self._ending = open_fetches, ending
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._reason = ""
        self._socket: os.stat_result | None = None
        self._started_s = time.monotonic()

    def run(self) -> str:
        """Serve until it is time to end; why it was. Raises PoolError, ConfigError or OSError where it cannot begin."""
        try:
            return self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    def stop(self, reason: str) -> None:
        """Have `run` come to its end. From any thread, and from a signal handler."""

        def stop() -> None:
            self._reason = self._reason or reason
            self._ended.set()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(stop)

    async def _serve(self) -> str:
        # Not made where it is gone: then nobody is there who could ask.
        self._description = self._described()
        store = EmbeddedStore(self._pool, eviction=self._config.eviction, rebuild=False)
        with contextlib.closing(store):
            self._fetches = self._open_fetches(store, self._config)
            try:
                with (
                    Exporter(self._config.agent_metrics_port, store, self._fetches) as exporter,
                    serving(self._config, store, self._fetches, exporter),
                ):
                    await self._listen_until_told(store)
            finally:
                self._fetches.close()
        logger.info("the agent of pool %s ends: %s", self._pool, self._reason)
        return self._reason

    async def _listen_until_told(self, store: EmbeddedStore) -> None:
        self._forgetting = Forgetting(
            self._pool, store, self._fetches, lambda name: self._server.is_asked(name), self._is_current
        )
        self._server = Server(
            self._fetches, is_forgotten=self._forgetting.is_forgotten, forget=self._forgetting.look,
            report=self._report, stop=self.stop,
        )  # fmt: skip
        self._forgetting.look()
        try:
            await self._listen()
            logger.info("the agent of pool %s is ready: process %d", self._pool, os.getpid())
            while not self._ended.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), _TICK_S)
                await self._tick()
        finally:
            self._ending()
            self._server.close()
            await asyncio.sleep(_HANG_UP_S)

    def _described(self) -> tuple[int, int] | None:
        """What changes with the pool's data folder; None where there is none."""
        try:
            found = os.lstat(self._pool / DESCRIPTION)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _is_current(self) -> bool:
        return self._described() == self._description

    async def _listen(self) -> None:
        await self._server.listen(self._pool)
        self._socket = os.lstat(self._pool / AGENT_SOCKET)

    async def _tick(self) -> None:
        self._server.tick()
        self._forgetting.tick()
        if not is_in_place(self._pool, self._lock):
            self.stop("the pool's folder was removed or replaced")
            return
        if not self._is_current():  # tiers may have registered the memory of the old one
            self.stop("the pool was removed or replaced")
            return
        try:
            if self._socket is None or not os.path.samestat(os.lstat(self._pool / AGENT_SOCKET), self._socket):
                raise FileNotFoundError("another file is there")
        except OSError as error:
            log_once("agent.socket", "the agent listens again, its socket was gone: %s", error, logger=logger)
            with contextlib.suppress(OSError):
                await self._listen()
        if self._idle_s is not None and time.monotonic() - self._server.used_s > self._idle_s:
            self.stop(f"no engine was connected for {self._idle_s:g} s")

    def _report(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "serves_metrics": bool(self._config.agent_metrics_port or self._config.agent_http_port),
            "version": __version__,
            "pool": str(self._pool),
            "mode": self._config.agent,
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "users": self._server.users,
            "asks": self._server.asks,
            "asked": self._server.asked,
            "tiers": [
                {**msgspec.to_builtins(report), "write": tier.write, "share": tier.share}
                for tier, report in zip(self._config.tiers, self._fetches.stats(), strict=False)
            ],
        }
