"""The agent's side of the socket: who may ask, how much at a time, and what each is told.

Lives in one event loop, which never waits for a tier. What cannot be trusted is hung up on with one log line for its
kind; nothing here depends on a peer reading, writing or ending in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mooncake_connector import __version__
from mooncake_connector.errors import MooncakeConnectorError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import KEY_NBYTES
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, log_once, printable
from store_client.agent import messages, sockets
from store_client.agent.messages import Frames, Junk
from store_client.agent.wish import Fetch, Fetches, Wish, Word
from store_client.tiers.base import SpaceName

MAX_PEERS = 512
MAX_ASKS = 1024
"""Of one connection at a time, and how many keys they may have together."""
MAX_ASKED_KEYS = 1 << 18
MAX_SEEKS = 256
"""Of one connection at a time; to one more the answer is that nothing was found."""
_MAX_PLACES = 1024
_MAX_UNSENT_NBYTES = 1 << 20
"""A peer that does not read is hung up on beyond so many bytes."""
_HELLO_S = 10.0
_FRAME_S = 20.0
"""A frame that has begun has ended by then."""
_GATHER_S = 0.0005
"""How many pages come is told as soon as that is settled; before, what is found within so long is told at once."""

logger = get_logger(__name__)


class Server:
    """The connections of an agent. Belongs to its event loop.

    Args:
        fetches: looks after what is asked.
        is_forgotten: whether pages of a namespace must not be fetched now.
        forget: called where a peer says that there are new marks.
        report: the agent's state, for people; plain values.
        stop: called with a reason where a peer asks the agent to end.
    """

    def __init__(
        self,
        fetches: Fetches,
        *,
        is_forgotten: Callable[[bytes], bool],
        forget: Callable[[], None],
        report: Callable[[], Any],
        stop: Callable[[str], None],
    ) -> None:
        self.fetches, self.is_forgotten, self.forget, self.report, self.stop = (
            fetches, is_forgotten, forget, report, stop,
        )  # fmt: skip
        self.peers: set[Peer] = set()
        self.asked = 0
        """Asks so far."""
        self.used_s = time.monotonic()
        """When an engine was last connected."""
        self._listening: asyncio.base_events.Server | None = None
        self._curious: list[Peer] = []
        """Who waits for a report; one thread makes them, since tiers are asked for theirs."""

    async def listen(self, pool: Path) -> None:
        """Listen in the pool's folder, instead of where it listened before. Raises OSError."""
        self._stop_listening()
        listener = sockets.listen(pool)
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(lambda: Peer(self), sock=listener)

    def _stop_listening(self) -> None:
        if self._listening is not None:
            for each in self._listening.sockets:
                sockets.release(each.fileno())
            self._listening.close()
            self._listening = None

    @property
    def users(self) -> int:
        """Engines' processes that are connected. This and `asks` from any thread."""
        return sum(peer.is_user for peer in self.peers.copy())

    @property
    def asks(self) -> int:
        """Asks that are being looked after."""
        return sum(len(peer.asks) for peer in self.peers.copy())

    def is_asked(self, namespace: bytes | None) -> bool:
        """Whether anybody waits for pages of the namespace, or of any; from any thread."""
        for peer in self.peers.copy():
            for asked in list(peer.asks.values()):
                if namespace in (None, asked.namespace):
                    return True
        return False

    def ask_report(self, peer: Peer) -> None:
        """Have the report sent to it, once there is one."""
        self._curious.append(peer)
        if len(self._curious) == 1:
            loop = asyncio.get_running_loop()
            thread = threading.Thread(
                target=self._make_report, args=(loop,), name="mooncake-connector-report", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                self._send_report(error)

    def _make_report(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            report: bytes | Exception = msgspec.json.encode(self.report())
        except Exception as error:
            report = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._send_report, report)

    def _send_report(self, report: bytes | Exception) -> None:
        if isinstance(report, Exception):
            log_once("agent.report", "the agent cannot report: %r", report, logger=logger)
        curious, self._curious = self._curious, []
        for peer in curious:
            if isinstance(report, bytes):
                peer.send(messages.Report(report))
            else:
                peer.send(messages.Refused(f"it cannot report: {printable(repr(report))}"[:500]))
                peer.hang_up()

    def tick(self) -> None:
        """To be called every second or so."""
        now_s = time.monotonic()
        for peer in list(self.peers):
            peer.tick(now_s)
        if self.users:
            self.used_s = now_s

    def close(self) -> None:
        """Hang up on everybody."""
        self._stop_listening()
        for peer in list(self.peers):
            peer.hang_up()


class Asked:
    """An Ask that is being looked after."""

    __slots__ = ("fetch", "gathers", "namespace", "num_keys", "told", "word")

    def __init__(self, namespace: bytes, num_keys: int) -> None:
        self.namespace, self.num_keys = namespace, num_keys
        self.word = Word()
        self.told: Word | None = None
        """What the peer knows."""
        self.gathers = False
        self.fetch: Fetch | None = None


class Peer(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames = Frames(messages.MAX_HELLO_NBYTES)
        self._places: dict[int, tuple[Namespace, Shard]] = {}
        self._num_keys = self._num_seeks = 0
        self._since_s = time.monotonic()
        """When it connected, or when a frame began that has not ended."""
        self._welcome = False
        self._fd = -1
        self.asks: dict[int, Asked] = {}
        self.is_user = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        connection = transport.get_extra_info("socket")
        self._fd = sockets.keep_from_children(connection.fileno())
        try:
            sockets.check_user(connection)
        except (sockets.Stranger, OSError) as error:
            log_once("agent.stranger", "a connection to the agent was refused: %s", error, logger=logger)
            transport.abort()
            return
        if len(self._server.peers) >= MAX_PEERS:
            self._refuse("agent.crowded", f"{MAX_PEERS} processes are connected already")
            return
        self._server.peers.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        sockets.release(self._fd)  # it is closed next
        self._server.peers.discard(self)
        self._transport = None
        for asked in self.asks.values():
            if asked.fetch is not None:
                asked.fetch.cancel()
        self.asks.clear()

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        try:
            while self._transport is not None and (body := self._frames.take()) is not None:
                self._since_s = time.monotonic()
                if self._welcome:
                    message = messages.read_inbound(body)
                    if not self.is_user and not isinstance(message, messages.ForPeople):
                        raise Junk(f"{type(message).__name__} from a command line, whose version may be another one")
                    self._handle(message)
                else:
                    self._meet(messages.read_hello(body))
        except Junk as error:
            self._refuse("agent.junk", str(error))

    def _meet(self, hello: messages.Hello) -> None:
        if hello.version != messages.VERSION and not hello.person:  # who must be able to end an old agent
            self._refuse(
                f"agent.version:{hello.version}",
                f"it speaks version {hello.version} of the agent's protocol (mooncake-connector {hello.package[:32]}), "
                f"the agent version {messages.VERSION} (mooncake-connector {__version__}): stop the agent with "
                "`mooncake-connector agent --stop` once all engines of this pool are upgraded",
            )
            return
        self._welcome, self.is_user = True, not hello.person
        self._frames.limit = messages.MAX_FRAME_NBYTES
        self.send(messages.Welcome(messages.VERSION, __version__))

    def _handle(self, message: messages.Inbound) -> None:
        match message:
            case messages.Ask():
                self._ask(message)
            case messages.Seek():
                self._seek(message)
            case messages.Place():
                self._place(message)
            case messages.Which():
                self._which(message)
            case messages.Cancel():
                asked = self.asks.pop(message.number, None)
                if asked is not None:
                    self._num_keys -= asked.num_keys
                    if asked.fetch is not None:
                        asked.fetch.cancel()
            case messages.Forget():
                self._server.forget()
            case messages.Query():
                self._server.ask_report(self)
            case messages.Stop():
                self._server.stop("it was asked to")

    def _place(self, place: messages.Place) -> None:
        if len(self._places) >= _MAX_PLACES and place.number not in self._places:
            raise Junk(f"more than {_MAX_PLACES} places")
        try:
            self._places[place.number] = Namespace.from_dict(place.namespace), Shard(*place.shard)
        except (MooncakeConnectorError, ValueError) as error:
            raise Junk(f"a place that cannot be: {error}") from None

    def _ask(self, ask: messages.Ask) -> None:
        place = self._places.get(ask.place)
        if place is None or ask.number in self.asks:
            raise Junk(f"Ask {ask.number} at place {ask.place}: expected a new number and a known place")
        namespace, shard = place
        num_keys = len(ask.keys) // KEY_NBYTES
        if len(self.asks) >= MAX_ASKS or self._num_keys + num_keys > MAX_ASKED_KEYS:
            self.send(messages.Told(ask.number, 0, 0, True, "busy"))
            return
        if self._server.is_forgotten(namespace.digest):
            self.send(messages.Told(ask.number, 0, 0, True, "forgotten"))
            return
        wish = Wish(
            namespace=namespace, shard=shard, keys=messages.split_keys(ask.keys), parent=ask.parent, nbytes=ask.nbytes,
            deadline_s=ask.deadline_s, prefill_tokens_s=ask.prefill_tokens_s,
        )  # fmt: skip
        asked = self.asks[ask.number] = Asked(namespace.digest, num_keys)
        self._num_keys += num_keys
        self._server.asked += 1
        loop, number = self._loop, ask.number

        def tell(word: Word) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._tell, number, asked, word)

        try:
            asked.fetch = self._server.fetches.ask(wish, tell)
        except Exception as error:
            log_once("agent.ask", "the agent could not ask its tiers: %r", error, logger=logger, exc_info=True)
            self._tell(number, asked, Word(done=True, cause="error"))

    def _seek(self, seek: messages.Seek) -> None:
        place = self._places.get(seek.place)
        if place is None:
            raise Junk(f"Seek at place {seek.place}: expected a known place")
        (namespace, shard), loop, number, keys = place, self._loop, seek.number, messages.split_keys(seek.keys)
        self._num_seeks += 1
        if self._num_seeks > MAX_SEEKS or self._server.is_forgotten(namespace.digest):
            self._found(number, bytes(len(keys)), True)
            return

        def tell(found: Sequence[bool], done: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._found, number, bytes(found), done)

        try:
            self._server.fetches.seek(SpaceName(namespace.digest, shard), keys, seek.nbytes, tell)
        except Exception as error:
            log_once("agent.seek", "the agent could not ask its tiers: %r", error, logger=logger, exc_info=True)
            self._found(number, bytes(len(keys)), True)

    def _found(self, number: int, found: bytes, done: bool) -> None:
        self._num_seeks -= done
        self.send(messages.Found(number, found, done))

    def _which(self, which: messages.Which) -> None:
        place = self._places.get(which.place)
        if place is None:
            raise Junk(f"Which at place {which.place}: expected a known place")
        namespace, loop = place[0], self._loop

        def tell(shards: Sequence[Shard], done: bool) -> None:
            bounds = [(one.layer_start, one.layer_stop, one.head_start, one.head_stop) for one in shards]
            answer = messages.Shards(which.place, bounds[: messages.MAX_SHARDS], done)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.send, answer)

        self._server.fetches.shards(namespace, tell)

    def _tell(self, number: int, asked: Asked, word: Word) -> None:
        if self.asks.get(number) is not asked:
            return
        asked.word, told = word, asked.told
        if word.done:
            del self.asks[number]
            self._num_keys -= asked.num_keys
        if word.done or word.settled or not word.coming:
            # Each word costs the engine's next lookup. That further pages have landed it sees in the pool.
            if word.done or told is None or (word.coming, word.settled) != (told.coming, told.settled):
                self._send_word(number, asked)
        elif not asked.gathers:
            asked.gathers = True
            self._loop.call_later(_GATHER_S, self._gathered, number, asked)

    def _gathered(self, number: int, asked: Asked) -> None:
        asked.gathers = False
        if self.asks.get(number) is asked and (asked.told is None or asked.told.coming != asked.word.coming):
            self._send_word(number, asked)

    def _send_word(self, number: int, asked: Asked) -> None:
        word = asked.told = asked.word
        self.send(messages.Told(number, word.coming, word.landed, word.done, word.cause, word.settled))

    def tick(self, now_s: float) -> None:
        waits_s = now_s - self._since_s
        if not self._welcome and waits_s > _HELLO_S:
            self._refuse("agent.junk", f"it has not said who it is for {_HELLO_S:g} s")
        elif self._frames.is_partial and waits_s > _FRAME_S:
            self._refuse("agent.junk", f"a message has begun and not ended for {_FRAME_S:g} s")
        else:
            if not self._frames.is_partial and self._welcome:
                self._since_s = now_s
            for number, asked in list(self.asks.items()):
                self._send_word(number, asked)

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _refuse(self, cause: str, reason: str) -> None:
        log_once(cause, "the agent hung up on a process of this user: %s", reason, logger=logger)
        self.send(messages.Refused(reason[:500]))
        self.hang_up()
        self._transport = None

    def send(self, message: messages.Outbound) -> None:
        transport = self._transport
        if transport is None:
            return
        transport.write(messages.frame(message))
        if transport.get_write_buffer_size() > _MAX_UNSENT_NBYTES:
            log_once("agent.unread", "the agent hung up on a process that does not read its answers", logger=logger)
            transport.abort()
            self._transport = None
