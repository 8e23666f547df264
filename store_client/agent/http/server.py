"""The server's thread: uvicorn, at an address that is taken before, so that whatever fails costs the server alone."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from mooncake_connector.log import get_logger, log_once
from store_client.agent import sockets
from store_client.agent.http.app import App

_BACKLOG = 128
_AT_ONCE = 256
"""Requests and connections, beyond which the answer is 503."""
_CLOSE_S = 5.0

logger = get_logger(__name__)


class HttpServer:
    """Serves while it is entered. Without a port, without uvicorn, or where the address is taken it serves nothing, and
    says so in the log."""

    def __init__(self, host: str, port: int, app: App) -> None:
        self._host, self._port, self._app = host, port, app
        self._server: Any = None
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> HttpServer:
        try:
            import uvicorn  # comes with the engines, and is not needed where nothing is served

            from store_client.agent.http.protocol import KEEP_ALIVE_S, Connection
        except ImportError as error:
            said = "the agent serves no HTTP: %s; pip install 'mooncake-connector[index]'"
            log_once("agent.http.uvicorn", said, error, logger=logger)
            return self
        try:
            self._listener = self._listen()
            config = uvicorn.Config(
                self._app, loop="asyncio", http=Connection, ws="none", lifespan="off", log_config=None,
                server_header=False, proxy_headers=False, limit_concurrency=_AT_ONCE,
                timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=1,
            )  # fmt: skip
            self._server = uvicorn.Server(config)
            self._thread = threading.Thread(target=self._run, name="mooncake-connector-http", daemon=True)
            self._thread.start()
        except (OSError, RuntimeError) as error:
            said = "the agent serves no HTTP at %s port %d: %s; set another `agent_http_port`"
            log_once("agent.http.listen", said, self._host, self._port, error, logger=logger)
            self._hang_up()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._thread is not None:
            self._server.should_exit = True
            self._thread.join(_CLOSE_S)
        self._hang_up()

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        sockets.keep_from_children(listener.fileno())
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host, self._port))
            listener.listen(_BACKLOG)
        except BaseException:
            sockets.close(listener)
            raise
        return listener

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except BaseException as error:  # uvicorn may end with SystemExit
            log_once("agent.http.ended", "the agent's HTTP server ended: %r", error, logger=logger)

    def _hang_up(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                sockets.close(self._listener)
            self._listener = None
