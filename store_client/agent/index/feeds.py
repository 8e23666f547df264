"""Takes in the events of registered instances: a subscription each, in one thread of their own.

Numbers that were missed are asked for at the publisher's replay endpoint, which has the last 10,000 batches or so. What
cannot be had is not known, and then nothing is claimed (`stream`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from mooncake_connector.log import get_logger, log_once, printable
from store_client.agent.index.events import Batch, Junk, read_batch
from store_client.agent.index.held import Held
from store_client.agent.index.index import Instance
from store_client.agent.index.stream import Stream

REPLAY_S = 5.0
"""For the next batch of a replay to come."""
_AWAITED = 100_000
"""Batches that wait to be taken in; more are lost, which shows in their numbers."""
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
        self._following[instance] = asyncio.ensure_future(self._contained(instance, self._follow(instance)))

    def _end(self, instance: Instance) -> None:
        if task := self._following.pop(instance, None):
            task.cancel()

    async def _contained(self, instance: Instance, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.counts["failed_subscriptions"] += 1
            name = instance.registered.name
            log_once(f"index.feed:{name}", "events of %s are not taken in: %r", name, error, logger=logger)

    async def _follow(self, instance: Instance) -> None:
        import zmq
        import zmq.asyncio

        registered = instance.registered
        # What lies behind is looked up where it is; what else an engine has on the host is its own.
        ignored = frozenset({"DISK"} | ({"CPU"} if registered.type.lower() == "vllm" else set()))
        stream = Stream(instance, self._held, ignored if instance.here else frozenset(), self.counts)
        context = zmq.asyncio.Context.instance()
        subscriber = context.socket(zmq.SUB)
        subscriber.set(zmq.LINGER, 0)
        subscriber.set(zmq.RCVHWM, _AWAITED)
        subscriber.set(zmq.IPV6, 1)
        subscriber.set(zmq.SUBSCRIBE, registered.topic.encode())
        monitor = subscriber.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        follower = _Follower(stream, registered.replay_endpoint, self.counts, registered.name)
        watching = asyncio.ensure_future(follower.watch(monitor))
        try:
            subscriber.connect(registered.endpoint.replace("*", "127.0.0.1"))
            while True:
                await follower.hear(await subscriber.recv_multipart())
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await watching
            subscriber.disable_monitor()
            subscriber.close(0)
            stream.close()


class _Follower:
    """What comes from one publisher's sockets, in order."""

    def __init__(self, stream: Stream, replay_endpoint: str, counts: Counter[str], name: str) -> None:
        self._stream, self._replay_endpoint, self._counts, self._name = stream, replay_endpoint, counts, name
        self._lock = asyncio.Lock()

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
        """What is known ends with the connection, and begins with what the publisher has kept."""
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        while True:
            message: Any = await recv_monitor_message(monitor)
            async with self._lock:
                if message["event"] == zmq.EVENT_DISCONNECTED:
                    self._counts["disconnects"] += 1
                    self._stream.drop()
                elif self._replay_endpoint:
                    self._stream.drop()
                    await self._replay(0)

    async def _replay(self, first: int) -> None:
        """Take in what the publisher has from a number on, as far as it follows on what is known."""
        if not self._replay_endpoint:
            return
        import zmq
        import zmq.asyncio

        asking = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        asking.set(zmq.LINGER, 0)
        asking.set(zmq.RCVHWM, 0)
        asking.set(zmq.IPV6, 1)
        try:
            asking.connect(self._replay_endpoint.replace("*", "127.0.0.1"))
            await asking.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                frames = (await asyncio.wait_for(asking.recv_multipart(), REPLAY_S))[1:]
                if len(frames) == 3 and frames[1] == _END:
                    break
                number, batch = _read(frames)
                if number < self._stream.expected:
                    continue
                if self._stream.order(number, batch) == "gap":  # what was before is not kept any more
                    self._stream.begin_at(number)
                self._stream.take(number, batch)
                self._counts["replayed_batches"] += 1
        except asyncio.TimeoutError:
            self._counts["failed_replays"] += 1
            said = "%s did not replay its events within %g s"
            log_once(f"index.replay:{self._name}", said, self._name, REPLAY_S, logger=logger)
        except Junk as error:
            self._junk(error)
        finally:
            asking.close(0)

    def _junk(self, error: Junk) -> None:
        self._counts["junk"] += 1
        said = "what %s publishes is no KV events: %s"
        log_once(f"index.junk:{self._name}", said, self._name, printable(str(error)), logger=logger)


def _read(frames: list[bytes]) -> tuple[int, Batch]:
    if len(frames) != 3 or len(frames[1]) != 8:
        raise Junk(f"{len(frames)} frames: expected topic, number and batch")
    return int.from_bytes(frames[1], "big"), read_batch(frames[2])
