"""The client of the agent: one for each pool in a process. Nobody who asks ever waits for it.

Whoever asks sends it himself, if that can be done at once (`mouth`), or else leaves it to a thread. Lookups read the
answers (`ears`), and another thread notices the agent's death: all asks have failed at once then, and it is reached,
and started, again with back-off. After a fork the child's copy is dead.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias

from mooncake_connector import __version__
from mooncake_connector.config.schema import Config
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import KEY_NBYTES
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, kind_of, log_once
from store_client.agent import messages, sockets
from store_client.agent.asked import Asked
from store_client.agent.ears import Ears, until_lost
from store_client.agent.messages import Frames, Junk
from store_client.agent.mouth import Mouth
from store_client.agent.patience import Patience
from store_client.agent.places import Elsewhere, Places
from store_client.agent.sought import Sought
from store_client.agent.start import Starter
from store_client.agent.visit import hear

_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5)
"""Before the agent is reached for again; the last one over and over."""
_REFUSED_S = 60.0
_WELCOME_S = 5.0
_HOUSEKEEPING_S = 1.0
_KEPT_S = 5.0
"""An ask that has ended serves further lookups for so long, then the same pages are asked for again."""
_MAX_WAITING = 256
_AT_ONCE_KEYS = 256
"""An ask of more takes the thread's time and not a step's."""
_MAX_IN_FLIGHT = 1000
_MAX_SOUGHT = 200
_SOUGHT_S = 30.0
_SILENT_S = 3.0
_CLOSE_S = 5.0
_GONE = "pages that were being fetched are recomputed: the agent is gone"

_Item: TypeAlias = Asked | Sought | Elsewhere | messages.Forget

logger = get_logger(__name__)


class Client:
    """Use `client_of`."""

    def __init__(self, pool: Path, config: Config) -> None:
        self.pool = pool
        self.users = 0
        self.ready = False
        """Whether an agent is connected: only then anything is asked."""
        self.patience = Patience()
        self.failures: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
        self._num_taken = 0
        self._taking = threading.Lock()
        self._awaits_s = 0.0
        """When the first ask was made that nothing was heard since of any; 0 where there is none."""
        self._outbox: SimpleQueue[_Item | socket.socket | None] = SimpleQueue()
        """What could not be sent at once. A socket: that connection is lost. None: there is something to do."""
        self._in_flight: dict[int, Asked] = {}
        self._kept: list[Asked] = []
        self._sought: dict[int, Sought] = {}
        """Under way."""
        self._places = Places()
        self._numbers = 0
        self._ears: Ears | None = None
        self._mouth: Mouth | None = None
        """Numbers, `_in_flight`, `_kept` and what the agent calls places belong to who has its turn to speak."""
        self._closed = False
        self._starter = Starter(pool, config, partial(self._fail, "agent_lost"))
        self._thread = threading.Thread(target=self._run, name="mooncake-connector-agent", daemon=True)
        self._thread.start()

    def ask(self, asked: Asked) -> None:
        """Have it sent; returns at once. What cannot be sent has ended."""
        if not self.ready or len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._refuse(asked)
            return
        if len(asked.keys) > _AT_ONCE_KEYS or not self._say_at_once(asked):
            self._leave_to_thread(asked)

    def seek(self, sought: Sought) -> None:
        """Have it sent; returns at once. What cannot be sent has ended, with nothing found."""
        if not self.ready or len(self._in_flight) >= _MAX_IN_FLIGHT or len(self._sought) >= _MAX_SOUGHT:
            self._refuse(sought)
        elif not self._say_at_once(sought):
            self._leave_to_thread(sought)

    def _say_at_once(self, item: Asked | Sought) -> bool:
        """False where others are to speak first, or the agent has not read what was said before."""
        mouth = self._mouth
        if mouth is None or not self._outbox.empty() or not mouth.turn.acquire(blocking=False):
            return False
        try:
            if mouth.closed or len(mouth.unsent):  # without len, mypy takes it to be empty from here on
                return False
            self._say_question(item, mouth.say_at_once)
            if mouth.unsent:
                self._outbox.put(None)
        except Exception as error:
            mouth.hang_up()
            self._fail("agent_error", "no page is fetched, the client of the agent failed: %r", error)
        finally:
            mouth.turn.release()
        return True

    def _leave_to_thread(self, item: Asked | Sought) -> None:
        waiting = self._outbox.qsize()
        if waiting >= _MAX_WAITING:  # by far: whatever else is in it
            waiting -= self._places.queued
        if waiting >= _MAX_WAITING:
            self._refuse(item)
        else:
            self._outbox.put(item)

    def _refuse(self, item: Asked | Sought) -> None:
        self.failures["agent_busy" if self.ready else "agent_lost"] += 1
        item.leave()

    def _say(self, item: _Item | None, mouth: Mouth) -> None:
        """By the thread, when it has its turn. None: what was said before and is not out."""
        if item is None:
            mouth.say(b"")
        elif isinstance(item, Elsewhere):
            mouth.say(self._places.which(item))
        elif isinstance(item, messages.Forget):
            mouth.say(messages.frame(item))
        else:
            self._say_question(item, mouth.say)

    def _say_question(self, item: Asked | Sought, say: Callable[[bytes], None]) -> None:
        asked = False
        try:
            if words := self._words(item):
                say(words)
                item.enter()
                asked = True
        finally:
            if not asked:  # also by the caller's mistake, which reading these pages will tell
                item.leave()

    def shards_elsewhere(self, namespace: Namespace) -> list[Shard]:
        """Of which shards the tiers have pages, as far as the agent has said; what is asked for is kept up to date."""
        if self._places.wonders:
            self.listen()
        known = self._places.elsewhere(namespace)
        if self.ready and not known.queued and known.is_due(time.monotonic()):
            known.queued = True  # until it is sent, or the connection is lost: once is enough
            self._outbox.put(known)
        return known.shards

    def listen(self) -> None:
        """Take in what the agent has said by now. Waits for nothing."""
        ears = self._ears
        if ears is None or not (self._in_flight or self._sought or self._places.wonders):
            return
        try:
            for word in ears.words():
                if isinstance(word, messages.Told):
                    self._told(word)
                elif isinstance(word, messages.Found):
                    self._found(word)
                elif isinstance(word, messages.Shards):
                    self._places.heard(word)
        except Junk as error:
            said = "the connection to the agent broke: %s"
            log_once(f"agent.broke:{kind_of(str(error))}", said, error, logger=logger)
            ears.hang_up()

    def await_word(self) -> None:
        """Wait until the agent has said something, as `Ears.wait`, where it was asked anything."""
        ears = self._ears
        if ears is not None and (self._in_flight or self._sought):
            ears.wait()

    def forget(self) -> None:
        """Tell the agent that there are new marks; one that is not there now finds them when it comes."""
        if self.ready:
            self._outbox.put(messages.Forget())

    def take_failures(self) -> Counter[str]:
        """`failures` since the last call, whoever made it."""
        if sum(self.failures.values()) == self._num_taken:  # each step of an engine asks; no thread comes between
            return Counter()
        with self._taking:
            taken, self._taken = self._taken, self.failures.copy()
            self._num_taken = self._taken.total()
            return self._taken - taken

    def is_silent(self, now_s: float) -> bool:
        """Whether the agent is there and does not answer: it is stopped, or its machine is overloaded."""
        return bool(self._awaits_s) and now_s - self._awaits_s > _SILENT_S

    def close(self) -> None:
        self.ready, self._closed = False, True
        self._outbox.put(None)
        self._thread.join(_CLOSE_S)

    def abandon_in_child(self) -> None:
        self.ready, self._closed = False, True

    def _run(self) -> None:
        tries = 0
        while not self._closed:
            pause_s, lasted_s = 0.0, 0.0
            try:
                connection = self._connect()
                if isinstance(connection, socket.socket):
                    began_s = time.monotonic()
                    self._talk(connection)
                    lasted_s = time.monotonic() - began_s
                    self._starter.lasted(lasted_s)
                else:
                    pause_s = connection
            except Exception as error:
                self._fail("agent_error", "no page is fetched, the client of the agent failed: %r", error)
            tries = 0 if lasted_s > _PAUSES_S[-1] else tries + 1
            self._wait(pause_s or _PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
        self._starter.close()

    def _wait(self, pause_s: float) -> None:
        until_s = time.monotonic() + pause_s
        while not self._closed and (left_s := until_s - time.monotonic()) > 0:
            with contextlib.suppress(Empty):
                item = self._outbox.get(timeout=left_s)
                if isinstance(item, Asked | Sought):  # from just before the connection was lost
                    item.leave()

    def _connect(self) -> socket.socket | float:
        """A connection on which the agent has said Welcome; or else a pause in seconds, 0 for the usual one."""
        try:
            connection = sockets.connect(self.pool, _WELCOME_S)
        except sockets.Stranger as error:
            self._fail("agent_refused", "no page is fetched: %s", error)
            return _REFUSED_S
        except OSError as error:
            if not self._closed and not self._starter.see_to_it():
                self._fail("agent_lost", f"no page is fetched: no agent listens in {self.pool}: %s", error)
            return 0.0
        try:
            connection.sendall(messages.frame(messages.Hello(messages.VERSION, __version__)))
            answer = hear(connection, Frames())
            if isinstance(answer, messages.Welcome) and answer.version == messages.VERSION:
                return connection
            reason = answer.reason if isinstance(answer, messages.Refused) else f"it answers {type(answer).__name__}"
            self._fail("agent_refused", "no page is fetched: the agent refuses this process: %s", reason)
            pause_s = _REFUSED_S
        except (OSError, Junk) as error:
            self._fail("agent_silent", "no page is fetched: the agent does not answer: %s", error)
            pause_s = 0.0
        sockets.close(connection)
        return pause_s

    def _talk(self, connection: socket.socket) -> None:
        """Send what is asked until the connection is lost, or this client is closed."""
        mouth, ears = Mouth(connection), Ears(connection)
        wondering = self._places.begin()
        self._awaits_s = 0.0
        connection.settimeout(None)
        watch = threading.Thread(
            target=self._watch, args=(connection,), name="mooncake-connector-agent-watch", daemon=True
        )
        watch.start()
        self._ears = ears
        cleaned_s = time.monotonic()
        try:
            for known in wondering:
                self._say(known, mouth)
            self._say(messages.Forget(), mouth)  # there may be marks from while it was not connected
            self._mouth = mouth
            self.ready = True
            while not self._closed:
                with contextlib.suppress(Empty):
                    item = self._outbox.get(timeout=_HOUSEKEEPING_S)
                    if item is connection:
                        self._fail("agent_lost", _GONE)
                        break
                    if not isinstance(item, socket.socket):  # of a connection before
                        with mouth.turn:
                            self._say(item, mouth)
                self.listen()
                if time.monotonic() - cleaned_s > _HOUSEKEEPING_S:
                    cleaned_s = time.monotonic()
                    with mouth.turn:
                        self._clean(mouth, cleaned_s)
        except ConnectionError:
            self._fail("agent_lost", _GONE)
        except OSError as error:
            self._fail("agent_silent", "no page is fetched: the agent does not read: %s", error)
        finally:
            self.ready = False
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            self._ears = None
            ears.close()
            watch.join(_CLOSE_S)
            with mouth.turn:
                self._mouth, mouth.closed = None, True
                sockets.close(connection)
                self._in_flight.clear()
                for asked in self._kept:
                    asked.leave()
                self._kept.clear()
            for sought in list(self._sought.values()):  # a lookup that listens may take one out just now
                sought.leave()
            self._sought.clear()

    def _words(self, item: Asked | Sought) -> bytes:
        """The frames that ask it; none where its keys cannot be. From now on the agent's answers to it are taken."""
        parent = None
        if isinstance(item, Asked):
            item.keys, parent = item.keys[: messages.MAX_KEYS], item.parent or None
        keys, first = b"".join(item.keys), item.keys[0]
        if len(first) != KEY_NBYTES or len(keys) != KEY_NBYTES * len(item.keys) or len(parent or first) != KEY_NBYTES:
            return b""
        place, parts = self._places.number(item.namespace, item.shard)
        self._numbers = number = item.number = self._numbers + 1
        if isinstance(item, Sought):
            self._sought[number] = item
            return parts + messages.frame(messages.Seek(number, place, keys, item.nbytes))
        self._in_flight[number] = item
        self._kept.append(item)
        self._awaits_s = self._awaits_s or time.monotonic()
        ask = messages.Ask(number, place, keys, parent, item.nbytes, item.deadline_s, item.prefill_tokens_s)
        return parts + messages.frame(ask)

    def _watch(self, connection: socket.socket) -> None:
        try:
            until_lost(connection)
        finally:
            self.ready = False
            self._outbox.put(connection)

    def _told(self, told: messages.Told) -> None:
        self._awaits_s = 0.0
        asked = self._in_flight.get(told.number)
        if asked is None or not (asked.heard_s or told.coming or told.settled or told.done):
            return  # that the agent lives says nothing of the pages: its first word on them is still to come
        if asked.prefill_tokens_s and not asked.settled and (told.settled or told.done):
            self.patience.heard(len(asked.keys), min(told.coming, len(asked.keys)))
        asked.heard_s = time.monotonic()
        landed = min(told.landed, len(asked.keys))
        if landed > asked.landed:
            asked.landed_s = asked.heard_s
        asked.coming, asked.landed = min(told.coming, len(asked.keys)), landed
        asked.settled = told.settled
        if told.done:
            asked.done = True
            self._in_flight.pop(told.number, None)
        asked.said += 1  # last: a lookup in between looks again

    def _found(self, found: messages.Found) -> None:
        self._awaits_s = 0.0
        sought = self._sought.get(found.number)
        if sought is not None and len(found.found) == len(sought.keys):
            sought.heard([bool(here) for here in found.found], done=found.done)
            if found.done:
                self._sought.pop(found.number, None)

    def _clean(self, mouth: Mouth, now_s: float) -> None:
        """Forget asks that have ended, and those that ought to have."""
        kept = []
        for asked in self._kept:
            ended_s = asked.heard_s if asked.done else asked.asked_s + asked.deadline_s
            if now_s - ended_s < _KEPT_S:
                kept.append(asked)
                continue
            if self._in_flight.pop(asked.number, None) is not None:
                self.failures["agent_late"] += 1
                mouth.say(messages.frame(messages.Cancel(asked.number)))
            asked.leave()
        self._kept = kept
        for number, sought in list(self._sought.items()):
            if now_s - sought.asked_s > _SOUGHT_S:
                self.failures["agent_late"] += 1
                sought.leave()
                self._sought.pop(number, None)

    def _fail(self, cause: str, message: str, *args: object) -> None:
        self.failures[cause] += 1
        log_once(f"{cause}:{kind_of(str(args[-1]) if args else '')}", message, *args, logger=logger)
