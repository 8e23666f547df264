"""The agent as a process: how it comes to be one and one only, what it inherits, and how it ends, in every way."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent.asking import free_port
from agent.stand_in import CAPACITY, configured, settled, tiered, until
from causes import forget_causes
from long_form import LONG
from typer.testing import CliRunner

from mooncake_connector.cli.main import app
from mooncake_connector.config.schema import Config
from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore, Lookup
from store_client.agent import lock, process, start
from store_client.agent.process import KEPT_LOG_NBYTES, MAX_LOG_NBYTES, cut_log
from store_client.agent.tiered import TieredStore
from store_client.agent.visit import ask_report, ask_to_stop
from store_client.testing import DEADLINE_S, PAGE_NBYTES, SHARD, chain, namespace, put_chain

LISTENS = "0A"
"""The kernel's word for it."""
KILLS = 100 if LONG else 3
ENGINE = """
import os, sys, time
from pathlib import Path
from agent.stand_in import configured, tiered, until
from store_client import EmbeddedStore
from store_client.agent.tiered import TieredStore
from store_client.agent.visit import ask_report
pool, disk, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
config = configured(pool, agent=mode, tiers=[{"kind": "disk", "path": disk, "capacity": "64MiB"}])
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process does not put off starting an agent again."""
    forget_causes()
    monkeypatch.setattr(start, "_FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(start, "_LONGEST_PAUSE_S", 0.1)


@pytest.fixture
def config(pool: Path, tmp_path: Path) -> Iterator[Config]:
    tiers = [{"kind": "disk", "path": str(tmp_path / "disk"), "capacity": "64MiB"}]
    yield configured(pool, agent="auto", tiers=tiers)
    with suppress(Exception):
        ask_to_stop(pool, DEADLINE_S)


def report_of(pool: Path) -> dict[str, Any] | None:
    """None also for an agent that dies while it is asked."""
    with suppress(PoolError):
        return ask_report(pool)
    return None


def pid_of(pool: Path) -> int:
    return int(until(lambda: report_of(pool), "no agent listens")["pid"])


def users_of(pool: Path) -> int:
    return int(until(lambda: report_of(pool), "no agent listens")["users"])


def used_by_one(pool: Path, killed: int) -> int:
    """The number of an agent, another one than was killed, to which one process is connected."""

    def look() -> int:
        report = report_of(pool)
        return report["pid"] if report and report["users"] == 1 and report["pid"] != killed else 0

    return int(until(look, "no agent is there again"))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ready_lines(pool: Path) -> int:
    return (pool / "agent.log").read_text().count("is ready")


@contextmanager
def engine(pool: Path, tmp_path: Path, program: str, mode: str = "auto") -> Iterator[subprocess.Popen[str]]:
    """A process that uses the pool; killed at the end."""
    source = ENGINE + textwrap.dedent(program)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", source, str(pool), str(tmp_path / "disk"), mode],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


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


@pytest.mark.usefixtures("config")  # which ends the agent
@pytest.mark.parametrize("is_asked_for", [False, True])
def test_neither_agent_nor_engine_listens_at_a_tcp_port_that_was_not_asked_for(pool, tmp_path, is_asked_for):
    ports = {free_port()} if is_asked_for else set()
    program = f"""
    tiers = [{{"kind": "disk", "path": disk, "capacity": "64MiB"}}]
    config = configured(pool, agent=mode, tiers=tiers, agent_http_port={next(iter(ports), 0)})
    with tiered(pool, config):
        print("ready", flush=True)
        sys.stdin.read()
    """
    with engine(pool, tmp_path, program) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        agent = pid_of(pool)
        until(lambda: listens_at(agent) >= ports)
        assert (listens_at(agent), listens_at(process.pid)) == (ports, set())


def listens_at(pid: int) -> set[int]:
    """TCP ports, by the process's own sockets."""
    process, found = Path(f"/proc/{pid}"), set()
    sockets = {os.readlink(entry) for entry in (process / "fd").iterdir() if os.path.lexists(entry)}
    for table in ("tcp", "tcp6"):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in sockets:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def session_of(pid: int) -> tuple[str, int]:
    """Name and niceness of the group that the kernel has for the process's session."""
    name, _, niceness = (Path(f"/proc/{pid}/autogroup").read_text()).split()
    return name, int(niceness)


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="NOT TESTED: this kernel does not weigh sessions")
def test_the_session_of_an_agent_gives_way_and_no_engines_does(pool, config, tmp_path):
    own = session_of(os.getpid())
    with tiered(pool, config):
        started = session_of(pid_of(pool))
        assert started[0] != own[0] and started[1] == process._SESSIONS_NICENESS
    assert ask_to_stop(pool, DEADLINE_S)
    foreground = command(pool, tmp_path, "--foreground")
    try:
        until(lambda: (pool / "agent.sock").exists() and ask_report(pool))
        assert session_of(foreground.pid) == own, "whoever runs it has others in that session"
    finally:
        foreground.terminate()
        foreground.communicate(timeout=DEADLINE_S)


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


def test_an_agent_survives_the_engine_that_started_it_however_that_ends(pool, config, tmp_path):
    with engine(pool, tmp_path, "with tiered(pool, config):\n    print('on', flush=True); time.sleep(600)") as process:
        assert process.stdout.readline() == "on\n"
        pid = pid_of(pool)
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    with tiered(pool, config):
        assert pid_of(pool) == pid and ready_lines(pool) == 1


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


@pytest.mark.long
def test_agents_are_killed_while_they_are_asked_and_nothing_but_their_pages_is_lost(pool, config):
    """Every lookup answers what the pool has, and each time an agent is there again."""
    drawn = random.Random(3)
    with tiered(pool, config) as store:
        space = store.space(namespace(), SHARD, PAGE_NBYTES)
        there = chain("there", 4)
        put_chain(space, there)
        killed, pid = 0, 0
        while killed < KILLS:
            pid = used_by_one(pool, pid)
            for number in range(drawn.randrange(1, 60)):
                assert space.lookup([*there, *chain(f"{killed}/{number}", 3)]).pages == 4
            os.kill(pid, signal.SIGKILL)
            killed += 1
            for number in range(drawn.randrange(1, 60)):
                assert space.lookup([*there, *chain(f"{killed}/{number}", 3)]).pages == 4
        assert used_by_one(pool, pid)
        assert store.stats().failures["agent_lost"] >= KILLS
        settled(space, [*there, *chain("last", 3)], Lookup(4))


def test_a_stopped_agent_delays_nothing_and_answers_again_once_it_goes_on(pool, config):
    with tiered(pool, config) as store:
        space = store.space(namespace(), SHARD, PAGE_NBYTES)
        pid = pid_of(pool)
        os.kill(pid, signal.SIGSTOP)
        try:
            put_chain(space, chain("a", 4))
            assert space.lookup(chain("a", 4)) == Lookup(4)
            for number in range(300):
                assert space.lookup(chain(f"stopped {number}", 8)).pages == 0
            until(lambda: space.lookup(chain("x", 3)) == Lookup(0, unheard=True))
        finally:
            os.kill(pid, signal.SIGCONT)
        asked = until(lambda: report_of(pool))["asked"]

        def is_asked() -> bool:
            space.lookup(chain(f"{time.monotonic()}", 3))
            return until(lambda: report_of(pool))["asked"] > asked

        until(is_asked)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order_and_the_next_one_takes_its_place(pool, config, number):
    with tiered(pool, config) as store:
        pid = pid_of(pool)
        os.kill(pid, number)
        until(lambda: not is_alive(pid))
        until(lambda: store._client.ready)
        assert pid_of(pool) != pid
    assert f"ends: signal {number.name}" in (pool / "agent.log").read_text()


def test_it_ends_when_nobody_has_been_connected_for_long_and_not_before(pool, tmp_path):
    tiers = [{"kind": "disk", "path": str(tmp_path / "disk"), "capacity": "64MiB"}]
    config = configured(pool, agent="auto", tiers=tiers, agent_idle_s=1)
    with tiered(pool, config):
        pid = pid_of(pool)
        time.sleep(2.5)
        assert is_alive(pid)
    until(lambda: not is_alive(pid))
    assert "no engine was connected for 1 s" in (pool / "agent.log").read_text()


def test_an_agent_ends_with_its_pool(pool, config):
    with tiered(pool, config):
        pid = pid_of(pool)
    pool.rename(pool.with_name("away"))
    until(lambda: not is_alive(pid))


def test_destroying_a_pool_leaves_nothing_of_its_agent(pool, config):
    with tiered(pool, config) as store:
        pid = pid_of(pool)
        store.clear()
    (pool / "agent.forget.all").touch()
    (pool / f"agent.forget.{'0' * 64}.0123456789abcdef").touch()
    done = CliRunner().invoke(app, ["store", "destroy", "--pool", str(pool), "--yes"])
    assert done.exit_code == 0 and not pool.exists(), done.output
    until(lambda: not is_alive(pid))
    assert not pool.exists()


def test_a_pool_that_is_made_anew_while_it_is_open_gets_an_agent_of_its_own(pool, config):
    with tiered(pool, config) as store:
        space = store.space(namespace(), SHARD, PAGE_NBYTES)
        old = pid_of(pool)
        pool.rename(pool.with_name("away"))
        until(lambda: space.lookup(chain("a", 3)) and (pool / "pool.json").exists())
        assert used_by_one(pool, old) != old
        until(lambda: not is_alive(old))
        put_chain(space, chain("a", 2))
        settled(space, chain("a", 3), Lookup(2))


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


def test_an_embedded_agent_is_one_processes_and_the_next_ones_when_that_is_killed(pool, tmp_path):
    program = """
        with tiered(pool, config):
            print(until(lambda: ask_report(pool))["pid"], os.getpid(), flush=True)
            sys.stdin.readline()
    """
    with (
        engine(pool, tmp_path, program, "embedded") as first,
        engine(pool, tmp_path, program, "embedded") as second,
    ):
        said = [list(map(int, process.stdout.readline().split())) for process in (first, second)]
        holder = said[0][0]
        assert said[1][0] == holder and holder in (said[0][1], said[1][1])
        kept, killed = (second, first) if holder == first.pid else (first, second)
        assert not (pool / "agent.log").exists()
        killed.kill()
        killed.wait(DEADLINE_S)
        until(lambda: pid_of(pool) == kept.pid)


def environ_of(tmp_path: Path) -> dict[str, str]:
    tiers = f'[{{"kind": "disk", "path": "{tmp_path}/disk", "capacity": "64MiB"}}]'
    return {"MOONCAKE_CONNECTOR_TIERS": tiers, "MOONCAKE_CONNECTOR_CAPACITY": str(CAPACITY)}


def command(pool: Path, tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    environ = {**os.environ, **environ_of(tmp_path)}
    return subprocess.Popen(
        [sys.executable, "-m", "mooncake_connector.cli.main", "agent", "--pool", str(pool), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=tmp_path,
    )  # fmt: skip


def test_the_command_line_runs_one_in_the_foreground_for_a_pool_that_is_not_there_yet(pool, tmp_path, config):
    foreground = command(pool, tmp_path, "--foreground")
    try:
        until(lambda: (pool / "agent.sock").exists() and ask_report(pool))
        with tiered(pool, configured(pool)):  # `agent: external`
            assert pid_of(pool) == foreground.pid
            second = command(pool, tmp_path, "--foreground")
            assert "has an agent already" in second.communicate(timeout=DEADLINE_S)[1] and second.returncode == 1
    finally:
        foreground.terminate()
        _, said = foreground.communicate(timeout=DEADLINE_S)
    assert foreground.returncode == 0 and "ends: signal SIGTERM" in said


def test_the_command_line_starts_shows_and_stops_one(pool, tmp_path, config):
    environ = environ_of(tmp_path)

    def said(*arguments: str, command: tuple[str, ...] = ("agent",)) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*command, "--pool", str(pool), *arguments], env=environ)
        return done.exit_code, done.output

    assert said("--status") == (1, f"error: no agent runs for pool {pool}\n")
    code, text = said()
    pid = pid_of(pool)
    assert code == 0 and f"process {pid}" in text and re.search(r"^disk +works +all ", text, re.MULTILINE)
    assert said()[0] == 0 and pid_of(pool) == pid
    assert json.loads(said("--status", "--json")[1])["pid"] == pid
    assert f"Tiers, by the agent (pid {pid}" in said(command=("store", "stats"))[1]
    assert json.loads(said("--json", command=("store", "stats"))[1])["agent"]["tiers"][0]["title"] == "disk"
    assert said("--stop") == (0, "the agent has ended\n")
    until(lambda: not is_alive(pid))
    assert said("--stop") == (0, f"no agent runs for pool {pool}\n")
    assert said("--status", "--stop")[0] == 2


def test_without_tiers_there_is_nothing_to_run(pool):
    done = CliRunner().invoke(app, ["agent", "--foreground"], env={"MOONCAKE_CONNECTOR_POOL": str(pool)})
    assert done.exit_code == 1 and "no tiers are configured" in done.output and not pool.exists()


def test_its_log_stays_small_and_keeps_its_end(tmp_path):
    log = tmp_path / "log"
    with open(log, "ab+", buffering=0) as file:
        file.write(b"x" * MAX_LOG_NBYTES)
        cut_log(file.fileno())
        assert log.stat().st_size == MAX_LOG_NBYTES
        file.write(b"the end")
        cut_log(file.fileno())
        file.write(b", and more")
    assert log.stat().st_size == KEPT_LOG_NBYTES + len(b", and more")
    assert log.read_bytes().endswith(b"xthe end, and more")


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


def test_an_agent_of_which_a_tier_hangs_at_the_end_is_gone_all_the_same(pool, tmp_path):
    program = """
        from functools import partial
        from agent.stand_in import StandIn
        from store_client.agent import lock, process

        class Hanging(StandIn):
            def close(self):
                print("closing", flush=True)
                time.sleep(1000)

        EmbeddedStore(pool, 16 << 20).close()
        process._ENDED_S = 0.1
        process.Agent = partial(process.Agent, open_fetches=lambda *_: Hanging())
        process.serve(pool, config, lock.hold(pool), idle_s=0.0)
    """
    with engine(pool, tmp_path, program) as agent:
        assert agent.stdout.readline() == "closing\n"
        assert agent.wait(DEADLINE_S) == process.EXIT_FAILED
