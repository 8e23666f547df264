"""Takes in the events of registered instances: a subscription each, in one thread of their own.

Numbers that were missed are asked for at the publisher's replay endpoint, which has the last 10,000 batches or so. What
cannot be had is not known, and then nothing is claimed (`stream`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

from mooncake_connector.log import get_logger, log_once, printable
from store_client.agent.index.events import MAX_BATCH_NBYTES, Batch, Junk, read_batch
from store_client.agent.index.held import Held
from store_client.agent.index.index import Instance
from store_client.agent.index.stream import Stream

REPLAY_S = 5.0
"""For the next batch of a replay to come."""
REPLAYS_S = 60.0
"""For a whole replay, and after one that was late until the next."""
AGAIN_S = 1.0
"""From one connection to the next at least."""
HEARTBEAT_MS, SILENCE_MS = 5_000, 30_000
_AWAITED = 20_000
"""Batches that wait to be taken in; more are lost, which shows in their numbers."""
_IN_A_ROW = 32
_CLOSE_S = 5.0
_END = b"\xff" * 8
_MISSING = "events are not taken in: %s; pip install 'mooncake-connector[index]'"

logger = get_logger(__name__)


class Feeds:
    def __init__(self, held: Held) -> None:
        self.counts: Counter[str] = Counter()
        self._held = held
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._following: dict[Instance, asyncio.Task[None]] = {}
        """In the thread of the loop alone."""

    def follow(self, instance: Instance) -> str:
        """Begin to take in its events; a remark for people where that is not possible. Returns at once."""
        if not instance.registered.endpoint:
            return ""
        try:
            import zmq.asyncio  # noqa: F401 - not needed where no engine publishes
        except ImportError as error:
            log_once("index.zmq", _MISSING, error, logger=logger)
            return _MISSING % error
        try:
            loop = self._running()
        except RuntimeError as error:
            log_once("index.thread", "events are not taken in: %s", error, logger=logger)
            return f"events are not taken in: {error}"
        loop.call_soon_threadsafe(self._begin, instance)
        return ""

    def unfollow(self, instance: Instance) -> None:
        """Returns at once; the blocks of the instance are forgotten soon."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end, instance)

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(_CLOSE_S)

    def _running(self) -> asyncio.AbstractEventLoop:
        """Raises RuntimeError where no thread can be started."""
        if self._loop is None:
            loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._run, args=(loop,), name="mooncake-connector-events", daemon=True
            )
            self._thread.start()
            self._loop = loop
        return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            for task in self._following.values():
                task.cancel()
            if self._following:
                loop.run_until_complete(asyncio.wait(self._following.values(), timeout=_CLOSE_S))
        finally:
            loop.close()

    def _begin(self, instance: Instance) -> None:
        self._following[instance] = asyncio.ensure_future(self._follow(instance))

    def _end(self, instance: Instance) -> None:
        if task := self._following.pop(instance, None):
            task.cancel()

    async def _follow(self, instance: Instance) -> None:
        """One connection after the other; with each ends what was known by it."""
        registered = instance.registered
        # What lies behind is looked up where it is; what else an engine has on the host is its own.
        ignored = frozenset({"DISK"} | ({"CPU"} if registered.type.lower() == "vllm" else set()))
        stream = Stream(instance, self._held, ignored if instance.here else frozenset(), self.counts)
        follower = _Follower(stream, registered.replay_endpoint, self.counts, registered.name)
        try:
            while True:
                since_s = time.monotonic()
                try:
                    await self._connected(instance, follower)
                except Exception as error:
                    self.counts["failed_subscriptions"] += 1
                    said = "events of %s are not taken in: %r"
                    log_once("index.feed", said, registered.name, error, logger=logger)
                finally:
                    stream.drop()
                await asyncio.sleep(max(0.0, since_s + AGAIN_S - time.monotonic()))
        finally:
            stream.close()

    async def _connected(self, instance: Instance, follower: _Follower) -> None:
        """Take in what comes until the connection is lost. Raises what libzmq does for an endpoint that cannot be."""
        import zmq
        import zmq.asyncio

        registered = instance.registered
        subscriber = zmq.asyncio.Context.instance().socket(zmq.SUB)
        watching: list[asyncio.Task[None]] = []
        try:
            _bound(subscriber)
            subscriber.set(zmq.RCVHWM, _AWAITED)
            # A host that is gone closes no connection.
            subscriber.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            subscriber.set(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
            subscriber.set(zmq.SUBSCRIBE, registered.topic.encode())
            monitor = subscriber.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            subscriber.connect(registered.endpoint.replace("*", "127.0.0.1"))
            watching = [
                asyncio.create_task(follower.watch(monitor)), asyncio.create_task(follower.hear_all(subscriber)),
            ]  # fmt: skip
            done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            subscriber.disable_monitor()
            subscriber.close(0)


def _bound(socket: Any) -> None:
    import zmq

    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, 1)
    socket.set(zmq.MAXMSGSIZE, MAX_BATCH_NBYTES)


class _Follower:
    """What comes from one publisher's sockets, in order."""

    def __init__(self, stream: Stream, replay_endpoint: str, counts: Counter[str], name: str) -> None:
        self._stream, self._replay_endpoint, self._counts, self._name = stream, replay_endpoint, counts, name
        self._lock = asyncio.Lock()
        self._no_replay_before_s = 0.0

    async def hear_all(self, subscriber: Any) -> None:
        while True:
            for _ in range(_IN_A_ROW):
                await self.hear(await subscriber.recv_multipart())
            await asyncio.sleep(0)  # what is there already is received without a pause, and others wait

    async def hear(self, frames: list[bytes]) -> None:
        try:
            number, batch = _read(frames)
        except Junk as error:
            self._junk(error)
            return
        async with self._lock:
            what = self._stream.order(number, batch)
            if what in ("gap", "restarted"):
                if self._stream.is_known:
                    self._counts["gaps" if what == "gap" else "restarts"] += 1
                if what == "restarted":
                    self._stream.drop()
                await self._replay(self._stream.expected)
                what = self._stream.order(number, batch)
            if what == "gap":  # what is between was not replayed
                self._stream.begin_at(number)
                what = "next"
            if what == "next":
                self._stream.take(number, batch)

    async def watch(self, monitor: Any) -> None:
        """Until the connection is lost; what is known begins with what the publisher has kept."""
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        while True:
            message: Any = await recv_monitor_message(monitor)
            if message["event"] == zmq.EVENT_DISCONNECTED:
                self._counts["disconnects"] += 1
                return
            async with self._lock:
                if self._replay_endpoint:
                    self._stream.drop()
                    await self._replay(0)

    async def _replay(self, first: int) -> None:
        """Take in what the publisher has from a number on, as far as it follows on what is known."""
        if not self._replay_endpoint or time.monotonic() < self._no_replay_before_s:
            return
        try:
            await self._replayed(first, time.monotonic() + REPLAYS_S)
        except asyncio.TimeoutError:
            self._counts["failed_replays"] += 1
            self._no_replay_before_s = time.monotonic() + REPLAYS_S
            said = "%s did not replay its events in time"
            log_once("index.replay", said, self._name, logger=logger)
        except Junk as error:
            self._junk(error)

    async def _replayed(self, first: int, until_s: float) -> None:
        """Raises TimeoutError and Junk. Without asyncio.wait_for, which before Python 3.12 may lose a cancellation."""
        import zmq
        import zmq.asyncio

        asking = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        try:
            _bound(asking)
            asking.set(zmq.RCVHWM, _AWAITED)
            asking.connect(self._replay_endpoint.replace("*", "127.0.0.1"))
            await asking.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                await asyncio.sleep(0)
                left_s = min(REPLAY_S, until_s - time.monotonic())
                if left_s <= 0 or not await asking.poll(max(1, round(left_s * 1e3))):
                    raise asyncio.TimeoutError
                frames = (await asking.recv_multipart())[1:]
                if len(frames) == 3 and frames[1] == _END:
                    return
                number, batch = _read(frames)
                if number < self._stream.expected:
                    continue
                if self._stream.order(number, batch) == "gap":  # what was before is not kept any more
                    self._stream.begin_at(number)
                self._stream.take(number, batch)
                self._counts["replayed_batches"] += 1
        finally:
            asking.close(0)

    def _junk(self, error: Junk) -> None:
        self._counts["junk"] += 1
        said = "what %s publishes is no KV events: %s"
        log_once("index.junk", said, self._name, printable(str(error)), logger=logger)


def _read(frames: list[bytes]) -> tuple[int, Batch]:
    if len(frames) != 3 or len(frames[1]) != 8 or frames[1][0] & 0x80:  # numbers are signed
        raise Junk(f"{len(frames)} frames: expected topic, number and batch")
    return int.from_bytes(frames[1], "big"), read_batch(frames[2])
