"""The agent's socket: who is let in, what is refused, how much is taken, and what is left of a peer that is gone."""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from agent.stand_in import CAPACITY, Running, StandIn, configured, running, tiered, until
from causes import forget_causes

from mooncake_connector import __version__
from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore
from store_client.agent import lock, messages, server, sockets, visit
from store_client.agent.client import Client
from store_client.agent.messages import Ask, Cancel, Frames, Hello, Inbound, Junk, Place, Query, Report, Told, frame
from store_client.agent.visit import ask_report, ask_to_forget, ask_to_stop
from store_client.agent.wish import Word
from store_client.embedded.folder import remove_data
from store_client.testing import DEADLINE_S, SHARD, chain, namespace

BOUNDS = (SHARD.layer_start, SHARD.layer_stop, SHARD.head_start, SHARD.head_stop)
PLACE = Place(1, namespace().to_dict(), BOUNDS)


@pytest.fixture(autouse=True)
def causes() -> None:
    forget_causes()


def ask(number: int, keys: list[bytes], place: int = 1) -> Ask:
    return Ask(number, place, b"".join(keys), None, 4096, 30.0, None)


class Visitor:
    """A connection whose bytes the test writes itself."""

    def __init__(self, pool: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(str(pool / "agent.sock"))
        self._frames = Frames()

    def send(self, *parts: bytes | messages.Message) -> None:
        self.socket.sendall(b"".join(part if isinstance(part, bytes) else frame(part) for part in parts))

    def hear(self) -> Any:
        """The next message, None where the agent has hung up."""
        while (body := self._frames.take()) is None:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._frames.feed(data)
        return messages.read_outbound(body)

    def told(self, number: int, word: Word) -> None:
        """The agent says this of an Ask, sooner or later; it repeats itself."""
        while (said := self.hear()) != Told(number, word.coming, word.landed, word.done, word.cause, word.settled):
            assert said is not None

    def is_refused(self) -> str:
        """Why: and then the agent hangs up."""
        while not isinstance(said := self.hear(), messages.Refused):
            assert said is not None, "the agent hung up without a word"
        assert self.hear() is None
        return said.reason


def met(pool: Path) -> Visitor:
    visitor = Visitor(pool)
    visitor.send(Hello(messages.VERSION, __version__))
    assert visitor.hear() == messages.Welcome(messages.VERSION, __version__)
    return visitor


def lives(agent: Running, pool: Path) -> bool:
    """Another peer is served as ever."""
    known = len(agent.fetches.asked)
    visitor = met(pool)
    visitor.send(PLACE, ask(1, chain("lives", 2)))
    until(lambda: len(agent.fetches.asked) == known + 1)
    visitor.socket.close()
    return True


def test_the_socket_is_this_users_alone(pool):
    with running(pool):
        assert stat.S_IMODE(os.stat(pool / "agent.sock").st_mode) == 0o600
        assert stat.S_IMODE(os.stat(pool).st_mode) == 0o700


def test_a_chain_is_asked_for_and_each_word_is_passed_on(pool):
    with running(pool) as agent:
        visitor = met(pool)
        visitor.send(PLACE, ask(5, chain("a", 3)))
        asked = until(lambda: agent.fetches.asked)[0]
        assert list(asked.wish.keys) == chain("a", 3) and asked.wish.namespace == namespace()
        for word in (Word(2), Word(2, 1), Word(2, 2, True, "absent")):
            asked.tell(word)
            visitor.told(5, word)
        visitor.send(ask(5, chain("b", 1)))  # its number is free again
        until(lambda: len(agent.fetches.asked) == 2)


def test_how_an_ask_stands_is_repeated_as_a_sign_of_life(pool):
    with running(pool) as agent:
        visitor = met(pool)
        visitor.send(PLACE, ask(5, chain("a", 3)))
        until(lambda: agent.fetches.asked)[0].tell(Word(1))
        for _ in range(3):
            visitor.told(5, Word(1))


def test_an_ask_that_is_cancelled_or_whose_process_is_gone_is_cancelled_behind_the_socket(pool):
    with running(pool) as agent:
        visitor = met(pool)
        visitor.send(PLACE, ask(1, chain("a", 3)), ask(2, chain("b", 3)))
        until(lambda: len(agent.fetches.asked) == 2)
        visitor.send(Cancel(1), Cancel(77))
        until(lambda: agent.fetches.asked[0].cancelled)
        assert not agent.fetches.asked[1].cancelled
        visitor.socket.close()
        until(lambda: agent.fetches.asked[1].cancelled)
        assert lives(agent, pool)


def huge() -> bytes:
    return struct.pack("<I", messages.MAX_FRAME_NBYTES + 1)


def named(**changes: Any) -> Place:
    return Place(1, {**namespace().to_dict(), **changes}, BOUNDS)


BEFORE_HELLO = {
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "empty frame": struct.pack("<I", 0),
    "large frame": struct.pack("<I", messages.MAX_HELLO_NBYTES + 1),
    "no map": struct.pack("<I", 1) + b"\xc1",
    "another message": frame(Query()),
    "deep": struct.pack("<I", 1000) + b"\x91" * 1000,
}
AFTER_HELLO: dict[str, list[bytes | Inbound]] = {
    "huge frame": [huge()],
    "random": [struct.pack("<I", 64) + bytes(range(64))],
    "a second Hello": [struct.pack("<I", 2) + b"\x80\x80"],
    "an unknown place": [ask(1, chain("a", 1), place=9)],
    "shards of an unknown place": [messages.Which(9)],
    "a number twice": [PLACE, ask(1, chain("a", 1)), ask(1, chain("a", 1))],
    "half a key": [PLACE, Ask(1, 1, b"x" * 48, None, 4096, 1.0, None)],
    "no key": [PLACE, Ask(1, 1, b"", None, 4096, 1.0, None)],
    "a short parent": [PLACE, Ask(1, 1, chain("a", 1)[0], b"x", 4096, 1.0, None)],
    "no bytes": [PLACE, Ask(1, 1, chain("a", 1)[0], None, 0, 1.0, None)],
    "no time": [PLACE, Ask(1, 1, chain("a", 1)[0], None, 4096, float("nan"), None)],
    "an unknown field": [named(colour="red")],
    "a negative count": [named(num_layers=-1)],
    "an empty shard": [Place(1, namespace().to_dict(), (0, 0, 0, 1))],
    "too many places": [Place(number, namespace().to_dict(), BOUNDS) for number in range(1100)],
}


@pytest.mark.parametrize("junk", BEFORE_HELLO.values(), ids=BEFORE_HELLO)
def test_who_does_not_say_hello_is_refused_with_one_line(pool, caplog, junk):
    with running(pool) as agent:
        for _ in range(3):
            visitor = Visitor(pool)
            visitor.send(junk)
            assert visitor.is_refused()
        assert len([line for line in caplog.messages if "hung up" in line]) == 1
        assert lives(agent, pool)


@pytest.mark.parametrize("junk", AFTER_HELLO.values(), ids=AFTER_HELLO)
def test_junk_ends_the_connection_it_came_on_and_no_other(pool, caplog, junk):
    with running(pool) as agent, tiered(pool) as store:
        visitor = met(pool)
        with suppress(ConnectionError):  # it hangs up while the rest is being sent
            visitor.send(*junk)
        assert visitor.is_refused()
        assert store._client.ready
        assert lives(agent, pool)
        assert len([line for line in caplog.messages if "hung up" in line]) == 1


def test_another_version_is_refused_by_both_sides_with_one_line_that_says_what_to_do(pool, caplog, monkeypatch):
    with running(pool) as agent:
        visitor = Visitor(pool)
        visitor.send(Hello(messages.VERSION + 1, "9.9"))
        assert "9.9" in (reason := visitor.is_refused()) and "agent --stop" in reason
        assert lives(agent, pool)
        with monkeypatch.context() as changed:
            changed.setattr("store_client.agent.client.messages.Hello", lambda version, package: Hello(99, package))
            client = Client(pool, configured(pool))
            until(lambda: client.failures["agent_refused"])
            assert not client.ready
            client.close()
    assert len([line for line in caplog.messages if "refuses this process" in line]) == 1


def test_who_says_nothing_or_half_of_it_is_hung_up_on(pool, monkeypatch):
    monkeypatch.setattr(server, "_HELLO_S", 0.0)
    monkeypatch.setattr(server, "_FRAME_S", 0.0)
    with running(pool) as agent:
        slow = met(pool)
        slow.send(frame(ask(1, chain("a", 3)))[:-1])
        assert "not ended" in slow.is_refused()
        assert "has not said" in Visitor(pool).is_refused()
        monkeypatch.undo()
        assert lives(agent, pool)


def test_no_more_is_taken_than_there_is_room_for(pool, monkeypatch):
    monkeypatch.setattr(server, "MAX_ASKS", 4)
    monkeypatch.setattr(server, "MAX_ASKED_KEYS", 8)
    with running(pool) as agent:
        visitor = met(pool)
        visitor.send(PLACE, *(ask(number, chain(f"{number}", 1)) for number in range(4)), ask(9, chain("x", 1)))
        visitor.told(9, Word(done=True, cause="busy"))
        other = met(pool)
        other.send(PLACE, ask(1, chain("a", 9)))
        other.told(1, Word(done=True, cause="busy"))
        until(lambda: len(agent.fetches.asked) == 4)
        agent.fetches.asked[0].tell(Word(done=True))
        visitor.told(0, Word(done=True))
        visitor.send(ask(10, chain("y", 1)))
        until(lambda: len(agent.fetches.asked) == 5)


def test_no_more_connections_are_taken_than_there_is_room_for(pool, monkeypatch):
    monkeypatch.setattr(server, "MAX_PEERS", 3)
    with running(pool) as agent:
        kept = [met(pool) for _ in range(3)]
        assert "connected already" in Visitor(pool).is_refused()
        kept.pop().socket.close()
        until(lambda: agent.agent._report()["users"] == 2)
        assert lives(agent, pool)


def test_pages_that_land_wake_nobody_who_knows_that_they_come(pool):
    with running(pool) as agent:
        visitor = met(pool)
        visitor.send(PLACE, ask(1, chain("a", 3)))
        asked = until(lambda: agent.fetches.asked)[0]
        for _ in range(300):
            for landed in range(3):
                asked.tell(Word(3, landed, settled=True))
        asked.tell(Word(3, 3, True, settled=True))
        words = [visitor.hear()]
        while not words[-1].done:
            words.append(visitor.hear())
        assert words[0].coming == words[-1].landed == 3 and len(words) < 300


def test_a_peer_that_does_not_read_is_hung_up_on(pool, monkeypatch):
    monkeypatch.setattr(server, "_MAX_UNSENT_NBYTES", 4096)
    with running(pool) as agent:
        visitor = met(pool)
        visitor.send(PLACE, ask(1, chain("a", 3)))
        asked = until(lambda: agent.fetches.asked)[0]

        def talk() -> bool:
            for number in range(1000):
                asked.tell(Word(number % 2, settled=True, cause="x" * 60))
            return asked.cancelled

        until(talk)
        assert lives(agent, pool)


def test_a_fault_behind_the_socket_ends_the_ask_alone(pool, caplog):
    def broken(asked: Any) -> None:
        raise RuntimeError("defect")

    with running(pool, StandIn(broken)):
        visitor = met(pool)
        visitor.send(PLACE, ask(1, chain("a", 3)))
        visitor.told(1, Word(done=True, cause="error"))
        visitor.send(ask(2, chain("b", 3)))
        visitor.told(2, Word(done=True, cause="error"))
    assert len([line for line in caplog.messages if "defect" in line]) == 1


def test_a_stranger_is_refused_on_both_sides(pool, monkeypatch, caplog):
    with running(pool):
        monkeypatch.setattr(sockets.os, "geteuid", lambda: 12345)
        monkeypatch.setattr(sockets, "_ROOT", 54321)
        with pytest.raises(sockets.Stranger, match="12345"):
            sockets.connect(pool, 1.0)
        assert Visitor(pool).hear() is None
    assert any("was refused" in line for line in caplog.messages)


def test_the_socket_is_made_again_where_it_was_removed_and_who_is_connected_stays(pool):
    with running(pool) as agent, tiered(pool) as store:
        (pool / "agent.sock").unlink()
        until(lambda: (pool / "agent.sock").exists())
        assert store._client.ready
        assert lives(agent, pool)


def test_an_agent_ends_whose_pool_is_made_anew_in_its_folder(pool):
    with running(pool) as agent:
        remove_data(pool)
        (pool / "pool.json").unlink()
        EmbeddedStore(pool, CAPACITY).close()
        until(lambda: agent.is_over)
        assert "removed or replaced" in str(agent.reason)


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_an_agent_ends_whose_pool_folder_was(pool, how):
    with running(pool) as agent:
        pool.rename(pool.with_name("old"))
        if how == "replaced":
            pool.mkdir(mode=0o700)
            (pool / "agent.lock").touch()
        until(lambda: agent.is_over)
        assert "removed or replaced" in str(agent.reason)


def test_a_pool_folder_with_a_long_name_has_an_agent_too(pool):
    long = pool / ("x" * 60) / ("y" * 60)
    long.parent.mkdir(parents=True, mode=0o700)
    with running(long) as agent, tiered(long):
        until(lambda: agent.agent._report()["users"] == 1)


def test_a_person_is_told_how_it_is_and_can_end_it(pool, monkeypatch):
    assert ask_report(pool) is None and not ask_to_stop(pool, DEADLINE_S)
    with running(pool) as agent, tiered(pool):
        monkeypatch.setattr(time, "time", lambda: 0.0)  # a clock that is set back
        report = ask_report(pool)
        assert report is not None and report["uptime_s"] >= 0
        assert (report["pid"], report["users"], report["version"]) == (os.getpid(), 1, __version__)
        (tier,) = report["tiers"]
        told = [tier[name] for name in ("title", "fetched_pages", "errors", "write", "share")]
        assert told == ["played", 7, {"timeout": 2}, "all", False]
        assert ask_to_stop(pool, DEADLINE_S)
        until(lambda: agent.is_over)
        assert agent.fetches.closed
        assert ask_report(pool) is None


def test_a_person_reaches_an_agent_of_another_version_and_says_nothing_else_to_it(pool, monkeypatch):
    with running(pool) as agent:
        visitor = Visitor(pool)
        visitor.send(Hello(messages.VERSION + 1, "9.9", person=True), PLACE)
        assert visitor.hear() == messages.Welcome(messages.VERSION, __version__)
        assert "Place from a command line" in visitor.is_refused()
        asked = []
        monkeypatch.setattr(agent.agent._server, "forget", lambda: asked.append(True))
        with monkeypatch.context() as changed:
            changed.setattr(visit.messages, "Hello", lambda _, package, person: Hello(99, package, person))
            report = ask_report(pool)
            assert report is not None and (report["users"], report["version"]) == (0, __version__)
            assert ask_to_forget(pool)
            until(lambda: asked)
            assert ask_to_stop(pool, DEADLINE_S)
        until(lambda: agent.is_over)


def test_a_report_is_one_frame_even_to_who_asks_often(pool):
    with running(pool):
        visitor = met(pool)
        visitor.send(*[Query()] * 50)
        assert all(isinstance(visitor.hear(), Report) for _ in range(50))


def test_frames_come_whole_however_they_are_cut():
    whole = b"".join(frame(ask(number, chain("a", number + 1))) for number in range(5))
    for size in (1, 3, 64, len(whole)):
        frames, found = Frames(), []
        for at in range(0, len(whole), size):
            frames.feed(whole[at : at + size])
            while (body := frames.take()) is not None:
                found.append(messages.read_inbound(body))
        assert found == [ask(number, chain("a", number + 1)) for number in range(5)] and not frames.is_partial
    frames = Frames(limit=10)
    frames.feed(struct.pack("<I", 11))
    with pytest.raises(Junk, match="11 bytes"):
        frames.take()


def test_a_report_that_cannot_be_made_is_answered_and_the_next_one_is_as_well(pool, monkeypatch):
    with running(pool) as agent:
        monkeypatch.setattr(agent.fetches, "stats", lambda: 1 / 0)
        for _ in range(2):
            with pytest.raises(PoolError, match="it cannot report: ZeroDivisionError"):
                ask_report(pool)
        monkeypatch.undo()
        assert ask_report(pool) is not None


def test_what_a_child_must_not_keep_is_listed_from_its_first_moment_to_its_last(pool, monkeypatch):
    EmbeddedStore(pool, CAPACITY).close()
    before, seen = set(sockets._kept), []

    def fail(*_: object) -> None:
        seen.append(sockets._kept - before)
        raise OSError("in between")

    for module, name, make in (
        (lock.fcntl, "flock", lambda: lock.hold(pool)),
        (sockets, "_address", lambda: sockets.listen(pool)),
        (sockets, "_address", lambda: sockets.connect(pool, DEADLINE_S)),
    ):
        with monkeypatch.context() as patched, pytest.raises(OSError, match="in between"):
            patched.setattr(module, name, fail)
            make()
    assert [len(kept) for kept in seen] == [1, 1, 1]
    assert sockets._kept == before
