"""The agent as a process: what it listens at, who uses it, and how it ends, in every way."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from agent.asking import free_port
from agent.processes import command, engine, environ_of, is_alive, pid_of, ready_lines, report_of, used_by_one
from agent.stand_in import configured, settled, tiered, until
from long_form import LONG
from typer.testing import CliRunner

from mooncake_connector.cli.main import app
from store_client import Lookup
from store_client.agent import process
from store_client.agent.process import KEPT_LOG_NBYTES, MAX_LOG_NBYTES, cut_log
from store_client.agent.visit import ask_report, ask_to_stop
from store_client.testing import DEADLINE_S, PAGE_NBYTES, SHARD, chain, namespace, put_chain

LISTENS = "0A"
"""The kernel's word for it."""
KILLS = 100 if LONG else 3

pytestmark = pytest.mark.usefixtures("quick")


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


def test_an_agent_survives_the_engine_that_started_it_however_that_ends(pool, config, tmp_path):
    with engine(pool, tmp_path, "with tiered(pool, config):\n    print('on', flush=True); time.sleep(600)") as process:
        assert process.stdout.readline() == "on\n"
        pid = pid_of(pool)
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    with tiered(pool, config):
        assert pid_of(pool) == pid and ready_lines(pool) == 1


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
