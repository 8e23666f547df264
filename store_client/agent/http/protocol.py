"""One connection of the agent's HTTP server: uvicorn's own, whose client may not keep it waiting.

uvicorn waits for ever for a request that has begun and for a client that reads nothing. It reads with h11, which is
strict about what a request is and bounds its head to 64 KiB, whichever parsers are installed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""For the head of a request to come in, from the connection on, or from when one that is kept may be closed."""
KEEP_ALIVE_S = 30
REQUEST_S = 120.0
"""For the rest of a request to come in, and for the answer to be taken."""
MOST_CONNECTIONS = 512
_AT_ONCE_NBYTES = 256 << 10
_AT_ONCE = 16
"""So much of a body, or so many pieces of it, are handed on at a time: each time takes as long as a short request."""

_quiet = logging.getLogger("mooncake_connector.uvicorn")
_quiet.setLevel(logging.CRITICAL)  # a line for each bad request would be a stranger's way to fill a disk


class Connection(H11Protocol):
    _timer: asyncio.TimerHandle | None = None
    _to_come = 0
    """Bytes of a body that were not handed on yet, where its head says how many it has."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._pieces: list[bytes] = []
        self.logger, self.access_log = _quiet, False  # of this server alone: an engine may have one in this process

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._wait(HEAD_S)

    def data_received(self, data: bytes) -> None:
        if self._to_come:
            self._pieces.append(data)
            nbytes = sum(map(len, self._pieces))
            if nbytes >= min(self._to_come, _AT_ONCE_NBYTES) or len(self._pieces) == _AT_ONCE:
                whole = b"".join(self._pieces)
                self._pieces.clear()
                self._to_come = max(0, self._to_come - nbytes)
                super().data_received(whole)
            return
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before and self.conn.their_state is h11.SEND_BODY:
            headers = dict(self.headers)
            if b"transfer-encoding" not in headers:
                self._to_come = int(headers[b"content-length"]) - len(self.cycle.body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._wait(KEEP_ALIVE_S + HEAD_S)
        super().on_response_complete()

    def _wait(self, limit_s: float, *, has_begun: bool = False) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(limit_s, self._late, has_begun)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _late(self, had_begun: bool) -> None:
        is_asked = self.cycle is not None and not self.cycle.response_complete
        is_ours = is_asked and not self.cycle.more_body and not self.flow.write_paused
        if is_ours or (is_asked and not had_begun):
            self._wait(REQUEST_S, has_begun=True)
        else:
            self.transport.abort()
