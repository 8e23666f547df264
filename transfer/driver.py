"""What drives one side of the protocol: gives it messages and the time, and carries out its orders.

Everything here belongs to one event loop. `transfer.serving` and `transfer.fetching` are the two drivers.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from mooncake_connector.log import get_logger, log_once
from transfer.control.connection import Link
from transfer.protocol.messages import AnyMessage, MessageError, decode, encode
from transfer.protocol.orders import Ended, Failed, Order, Protocol, Send, Transfer

RANK_PURPOSE = "rank"
"""What control connections between ranks are called in the handshake."""

logger = get_logger(__name__)


class Driver(ABC):
    """See the module.

    Args:
        report: called with each word for the engine, in the event loop; must not block.
    """

    def __init__(
        self, protocol: Protocol, loop: asyncio.AbstractEventLoop, report: Callable[[Failed | Ended], None]
    ) -> None:
        self._protocol = protocol
        self._loop = loop
        self._report = report
        self._links: dict[str, Link] = {}
        self._timer: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @abstractmethod
    def _carry_out(self, order: Order) -> None:
        """Do what an order says, other than to send or to report."""

    def tell(self, call: Callable[..., object], *args: object) -> None:
        """Make a call of the protocol, which takes the time last, and carry out what it orders."""
        try:
            call(*args, now_s())
        except Exception as error:
            log_once(f"transfer.call:{type(error).__name__}", "a call failed: %r", error, logger=logger, exc_info=True)
        self._dispatch()

    def _dispatch(self) -> None:
        while orders := self._protocol.take():
            for order in orders:
                try:
                    self._obey(order)
                except Exception as error:  # a defect of ours must not lose the orders after it: each is given once
                    what = f"{type(order).__name__}: {error!r}"
                    log_once("transfer.order", "an order failed: %s", what, logger=logger, exc_info=True)
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_soon(self._tick)

    def _obey(self, order: Order) -> None:
        if isinstance(order, Failed | Ended):
            if isinstance(order, Ended):
                _log(order.transfer)
            self._report(order)
        elif self._closed:
            return
        elif isinstance(order, Send):
            self._send(order.peer, order.message)
        else:
            self._carry_out(order)

    def close(self, cause: str) -> None:
        """Once the loop has ended, and nothing touches the blocks any more; from then on any thread may `tell`."""
        self._closed = True
        self.tell(self._protocol.close, cause)

    def _tick(self) -> None:
        delay_s = self._protocol.tick(now_s())
        self._timer = None if delay_s is None else self._loop.call_later(delay_s, self._tick)
        if delay_s is not None:
            self._dispatch()

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
            self._receive(peer, message)

    def _receive(self, peer: str, message: AnyMessage) -> None:
        self.tell(self._protocol.receive, peer, message)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it in the loop, and keep it from being collected."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _log(transfer: Transfer) -> None:
    assert transfer.ending is not None
    line = "transfer %s %s bytes=%d seconds=%.6f transport=%s cause=%s"
    values = (transfer.name, transfer.ending.value, transfer.nbytes, transfer.seconds, transfer.transport or "-")
    logger.debug(line, *values, transfer.cause or "none")


def look(task: asyncio.Task[Any]) -> None:
    """A failure is told to whoever waits for it; asyncio would log it as an error where nobody does."""
    if not task.cancelled():
        task.exception()


def peer_name(instance: bytes) -> str:
    """What the protocol calls a rank: one name for each process."""
    return instance.hex()


def now_s() -> float:
    """The clock of the protocol."""
    return time.monotonic()
