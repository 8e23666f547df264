"""What runs one half of the PD protocol: gives it messages and the time, and carries out its orders.

Everything here belongs to one event loop. `transfer.serving` and `transfer.fetching` are the two shells.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mooncake_connector.log import get_logger, log_once
from transfer.control.connection import Link
from transfer.protocol.messages import AnyMessage, MessageError, decode, encode
from transfer.protocol.orders import Ending, Half, Order, Release, Send

RANK_PURPOSE = "rank"
"""What control connections between ranks are called in the handshake."""
_LEAVE_S = 30.0
"""How often to look whether transfers with a rank are over that has no connection any more."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a transfer on this rank. The engine's blocks are its own again.

    Args:
        nbytes: KV that was written to peers, or that arrived and was right.
        seconds: from its opening or announcement to its end.
        transport: how it travelled; "" where nothing did or at the consumer, which is not told.
    """

    transfer: str
    ending: Ending
    cause: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    transport: str = ""


class Shell(ABC):
    """See the module.

    Args:
        ended: called once for each transfer that the engine named, in the event loop; must not block.
    """

    def __init__(self, half: Half, loop: asyncio.AbstractEventLoop, ended: Callable[[Ended], None]) -> None:
        self._half = half
        self._loop = loop
        self._ended = ended
        self._links: dict[str, Link] = {}
        self._timer: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def _carry_out(self, order: Order) -> None:
        """Do what an order says, other than to send or to release."""

    @abstractmethod
    def _release(self, order: Release) -> Ended:
        """Forget the transfer."""

    def pump(self) -> None:
        """Carry out what the half ordered; after each of its calls."""
        while orders := self._half.take():
            for order in orders:
                try:
                    self._obey(order)
                except Exception as error:  # a defect of ours must not lose the orders after it: each is given once
                    what = f"{type(order).__name__}: {error!r}"
                    log_once("transfer.order", "an order failed: %s", what, logger=logger, exc_info=True)
        if self._timer is None:
            self._timer = self._loop.call_soon(self._tick)

    def _obey(self, order: Order) -> None:
        if isinstance(order, Send):
            self._send(order.peer, order.message)
        elif isinstance(order, Release):
            self._over(self._release(order))
        else:
            self._carry_out(order)

    def _over(self, ended: Ended) -> None:
        line = "transfer %s %s bytes=%d seconds=%.6f transport=%s cause=%s"
        values = (ended.transfer, ended.ending.value, ended.nbytes, ended.seconds, ended.transport or "-")
        logger.debug(line, *values, ended.cause or "none")
        self._ended(ended)

    def _tick(self) -> None:
        delay_s = self._half.tick(now_s())
        self._timer = None if delay_s is None else self._loop.call_later(delay_s, self._tick)
        if delay_s is not None:
            self.pump()

    def _send(self, peer: str, message: AnyMessage) -> None:
        link = self._links.get(peer)
        if link is None:
            return
        try:
            link.send(encode(message))
        except MessageError as error:
            log_once("transfer.message", "a message cannot be sent: %s", error, logger=logger)

    async def _converse(self, peer: str, link: Link) -> None:
        """Hand over messages until the connection ends. Raises Unavailable then."""
        while True:
            try:
                message = decode(await link.receive())
            except MessageError as error:
                log_once("transfer.malformed", "a peer's connection is closed: %s", error, logger=logger)
                link.close()
                raise
            self._half.receive(peer, message, now_s())
            self.pump()

    def _leave(self, peer: str) -> None:
        """Forget a rank whose connection is over, as soon as no transfer has to do with it."""
        if peer not in self._links and not self._half.forget(peer):
            self._loop.call_later(_LEAVE_S, self._leave, peer)

    def _start(self, work: asyncio.Task[None]) -> None:
        """Keep a task from being collected."""
        self._tasks.add(work)
        work.add_done_callback(self._tasks.discard)


def look(task: asyncio.Task[Any]) -> None:
    """A failure is told to whoever waits for it; asyncio would log it as an error where nobody does."""
    if not task.cancelled():
        task.exception()


def peer_name(instance: bytes) -> str:
    """What the halves call a rank: one name for each life of it."""
    return instance.hex()


def now_s() -> float:
    """The clock of the protocol."""
    return time.monotonic()
