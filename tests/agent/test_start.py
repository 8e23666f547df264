"""How an agent comes to be: one and one only, what it inherits, and how soon it is started again."""

from __future__ import annotations

import os
import random
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from agent.processes import engine, is_alive, pid_of, ready_lines, report_of, users_of
from agent.stand_in import CAPACITY, configured, tiered, until
from long_form import LONG

from store_client import EmbeddedStore, Lookup
from store_client.agent import lock, start
from store_client.agent.tiered import TieredStore
from store_client.agent.visit import ask_to_stop
from store_client.testing import DEADLINE_S, PAGE_NBYTES, SHARD, chain, namespace, put_chain

KILLS = 100 if LONG else 3

pytestmark = pytest.mark.usefixtures("quick")


def test_the_first_store_starts_an_agent_that_inherits_nothing_and_outlives_it(pool, config, tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINES_TOKEN", "hunter2")
    monkeypatch.setenv("MOONCAKE_CONNECTOR_POOL", "/nowhere")
    monkeypatch.setenv("AWS_REGION", "somewhere")
    with open(tmp_path / "engines", "w") as engines:
        os.set_inheritable(engines.fileno(), True)
        with tiered(pool, config):
            pid = pid_of(pool)
    process = Path(f"/proc/{pid}")
    environ = dict(each.split(b"=", 1) for each in (process / "environ").read_bytes().split(b"\0") if each)
    assert b"ENGINES_TOKEN" not in environ and b"MOONCAKE_CONNECTOR_POOL" not in environ
    assert environ[b"AWS_REGION"] == b"somewhere"
    assert b"disk" not in (process / "cmdline").read_bytes()
    assert os.readlink(process / "cwd") == "/"
    assert os.getsid(pid) != os.getsid(0)
    assert os.getpid() not in ancestors(pid)
    opened = [os.readlink(entry) for entry in (process / "fd").iterdir() if entry.exists()]
    assert str(tmp_path / "engines") not in opened
    until(lambda: users_of(pool) == 0)


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def test_of_many_processes_that_start_one_at_once_exactly_one_does(pool, config, tmp_path):
    program = """
        print("here", flush=True)
        sys.stdin.readline()
        with tiered(pool, config):
            print(ask_report(pool)["pid"], flush=True)
            sys.stdin.readline()
    """
    EmbeddedStore(pool, CAPACITY).close()
    engines = [engine(pool, tmp_path, program) for _ in range(6)]
    processes = [each.__enter__() for each in engines]
    try:
        for process in processes:
            assert process.stdout.readline() == "here\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        pids = {int(process.stdout.readline()) for process in processes}
        assert len(pids) == 1 and ready_lines(pool) == 1
        until(lambda: users_of(pool) == len(processes))
    finally:
        for each in engines:
            each.__exit__(None, None, None)
    until(lambda: users_of(pool) == 0)


@pytest.mark.long
def test_an_engine_that_is_killed_while_it_starts_an_agent_leaves_room_for_the_next(pool, config, tmp_path):
    program = """
        print("here", flush=True)
        store = TieredStore(EmbeddedStore(pool, 16 << 20), config)
        time.sleep(600)
    """
    drawn = random.Random(14)
    for _ in range(KILLS):
        with engine(pool, tmp_path, program) as process:
            assert process.stdout.readline() == "here\n"
            time.sleep(drawn.uniform(0, 0.15))
            process.kill()
            process.wait(DEADLINE_S)
        with tiered(pool, config):
            pid = pid_of(pool)
        assert ask_to_stop(pool, DEADLINE_S)
        until(lambda pid=pid: not is_alive(pid))


def test_where_it_cannot_be_started_the_pool_serves_alone_with_one_line(pool, config, caplog):
    EmbeddedStore(pool, CAPACITY).close()
    (pool / "agent.lock").mkdir()
    with TieredStore(EmbeddedStore(pool, CAPACITY), config) as store:
        space = store.space(namespace(), SHARD, PAGE_NBYTES)
        until(lambda: [line for line in caplog.messages if "cannot be started" in line])
        put_chain(space, chain("a", 2))
        assert space.lookup(chain("a", 3)) == Lookup(2, unheard=True)
        assert store._client.failures["agent_lost"]
        (pool / "agent.lock").rmdir()
        until(lambda: store._client.ready)
    assert len([line for line in caplog.messages if "cannot be started" in line]) == 1


def test_an_embedded_agent_whose_thread_does_not_start_leaves_the_place_to_others(pool, config, monkeypatch):
    def refused(*_):
        raise RuntimeError("can't start new thread")

    EmbeddedStore(pool, CAPACITY).close()
    said = []
    starter = start.Starter(pool, msgspec.structs.replace(config, agent="embedded"), lambda *told: said.append(told))
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refused)
        assert starter.see_to_it()
    assert str(said[0][-1]) == "can't start new thread"
    lock.let_go(lock.hold(pool))
    starter._agent = SimpleNamespace(stop=said.append)  # one before, which has ended
    starter.close()


def test_why_an_agent_ends_before_it_serves_is_in_the_engines_log_as_well(pool, tmp_path, caplog):
    secret = tmp_path / "secret"
    secret.write_text("short")
    secret.chmod(0o600)
    (tmp_path / "shared").mkdir()
    tiers = [{"kind": "folder", "path": str(tmp_path / "shared")}]
    config = configured(pool, agent="auto", tiers=tiers, secret_file=str(secret))
    with TieredStore(EmbeddedStore(pool, CAPACITY), config) as store:
        until(lambda: [line for line in caplog.messages if "not served" in line and f"{secret} holds 5" in line])
        assert store._client.failures["agent_lost"]
        secret.write_text("long enough for a secret")
        until(lambda: report_of(pool))
    assert ask_to_stop(pool, DEADLINE_S)
    assert len([line for line in caplog.messages if "not served" in line]) == 1


def test_an_agent_that_crashes_at_each_start_is_started_ever_more_rarely(pool, config, monkeypatch):
    EmbeddedStore(pool, CAPACITY).close()
    now_s, starts = [1000.0], []
    monkeypatch.setattr(start, "_FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(start, "_LONGEST_PAUSE_S", 60.0)
    monkeypatch.setattr(start, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(start, "start_process", lambda *_: starts.append(now_s[0]))
    starter = start.Starter(pool, config, print)

    def an_hour() -> list[float]:
        starts.clear()
        for _ in range(2400):
            dying = lock.hold(pool) if starts and now_s[0] - starts[-1] < 4 else None
            assert starter.see_to_it()
            if dying is not None:
                lock.let_go(dying)
            now_s[0] += 1.5
        return [later - earlier for earlier, later in pairwise(starts)]

    pauses = an_hour()
    assert pauses[0] < 10 and min(pauses[-10:]) >= 60
    starter.lasted(3600.0)
    assert an_hour()[0] < 10, "one that did well is started again soon"
