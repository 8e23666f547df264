"""Runs the processes of a deployment: starts, restarts within a bound, and stops them with none left.

It decides in `tick`, which never waits; what people are told goes to `say`, a line each.
"""

from __future__ import annotations

import enum
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from mooncake_connector.deploy import keeper
from mooncake_connector.deploy.commands import Command
from mooncake_connector.deploy.watch import Figures, Watch

MAX_RESTARTS, WELL_S = 3, 600.0
"""So many restarts of a process; the next death gives it up, unless it answered for so many seconds in between."""
BACKOFF_S = 2.0
"""Before the first restart; twice as long before each further one."""
STOP_S = 20.0
"""For a process to end by itself when it is told to, before it is killed."""
_SILENT_S = 30.0
_LAST_LINES = 15


class State(str, enum.Enum):
    """`SILENT`: it runs, and has not answered /health for a while; `ENDING`: it was killed for that."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    SILENT = "no answer"
    ENDING = "is ended"
    RESTARTING = "to be restarted"
    GIVEN_UP = "given up"
    STOPPED = "stopped"


RUNNING = (State.STARTING, State.READY, State.SILENT, State.ENDING)


@dataclass(slots=True)
class Process:
    """One process of the deployment, through all its lives."""

    command: Command
    log: Path
    watch: Watch
    state: State = State.WAITING
    since_s: float = 0.0
    keeper: subprocess.Popen[bytes] | None = None
    was_ready: bool = False
    deaths: int = 0
    """Since it was well for the last time."""
    _started_s: float = 0.0
    _answered_s: float = 0.0
    """When this life answered for the first time; before that, when it began, as `_heard_s`."""
    _heard_s: float = 0.0

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def figures(self) -> Figures | None:
        return self.watch.latest.figures if self.state in RUNNING and self._has_answered() else None

    def enter(self, state: State) -> None:
        self.state, self.since_s = state, time.monotonic()

    def start(self) -> None:
        """In a session of its own, so that a Ctrl-C in a terminal reaches `up` alone."""
        command = [sys.executable, "-I", keeper.__file__, str(STOP_S), *self.command.arguments]
        self.log.parent.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
        with open(self.log, "ab") as log:
            self.keeper = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, **self.command.env}, start_new_session=True,
            )  # fmt: skip
        self._started_s = self._answered_s = self._heard_s = time.monotonic()
        self.enter(State.STARTING)

    def has_ended(self) -> bool:
        return self.keeper is not None and self.keeper.poll() is not None

    def listen(self) -> None:
        """Take note of what it last answered. A router that lacks instances says so, and is none the worse."""
        answer = self.watch.latest
        is_router = self.command.role == "router" and self.state is not State.STARTING
        if self._has_answered() or (is_router and answer.status):
            self._heard_s = max(self._heard_s, answer.asked_s)
        if self._has_answered() and self.state is not State.READY:
            self.was_ready = True
            if self.state is State.STARTING:
                self._answered_s = self._heard_s
            self.enter(State.READY)
        elif self.state is State.READY and self.silent_s > _SILENT_S:
            self.enter(State.SILENT)

    @property
    def silent_s(self) -> float:
        """How long ago it last answered, or was started."""
        return time.monotonic() - self._heard_s

    @property
    def was_well(self) -> bool:
        """Whether its last life answered for long enough to forget the deaths before."""
        return self._heard_s - self._answered_s >= WELL_S

    def end(self) -> None:
        """Kill it, even where it has been stopped, its keeper included."""
        self.tell(signal.SIGCONT)
        self.tell(signal.SIGINT)
        self.enter(State.ENDING)

    def tell(self, number: signal.Signals) -> None:
        if self.keeper is not None and self.keeper.poll() is None:
            self.keeper.send_signal(number)

    def last_lines(self) -> list[str]:
        try:
            with open(self.log, "rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - (64 << 10)))
                return log.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        except OSError as error:
            return [f"it cannot be read: {error.strerror}"]

    def _has_answered(self) -> bool:
        answer = self.watch.latest
        return answer.healthy and answer.asked_s >= self._started_s


class Supervisor:
    """All processes of a deployment.

    Args:
        commands: instances first, the router last.
        needed: roles without which nothing can be answered: when the last process of one is given up, all is over.
        start_at_once: how many instances may start at the same time.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        *,
        engine: str,
        needed: Collection[str],
        logs: Path,
        start_at_once: int | None,
        start_deadline_s: float,
        silence_deadline_s: float,
        say: Callable[[str], None],
    ) -> None:
        keeper.become_reaper()
        logs.mkdir(parents=True, exist_ok=True)
        self._needed, self._at_once, self._say = needed, start_at_once, say
        self._start_deadline_s, self._silence_deadline_s = start_deadline_s, silence_deadline_s
        self.failure: str | None = None
        """Why it makes no sense to go on."""
        self.processes: list[Process] = []
        for command in commands:
            log = logs / f"{command.name}.log"
            log.write_bytes(b"")
            watch = Watch(command.url, engine if command.role != "router" else None, command.ready_path)
            self.processes.append(Process(command, log, watch))

    @property
    def is_ready(self) -> bool:
        """Whether everything has been ready once."""
        return all(process.was_ready for process in self.processes)

    def tick(self) -> None:
        """Look at every process, and do what has become due; raises OSError where nothing can be started."""
        for process in self.processes:
            if process.state in RUNNING:
                self._look_at(process)
        instances = [one for one in self.processes if one.command.role != "router"]
        starting = sum(one.state is State.STARTING for one in instances)
        for process in instances:
            if self._is_due(process) and starting < (self._at_once or len(instances)):
                self._start(process)
                starting += 1
        if all(one.was_ready for one in instances):
            for router in self.processes:
                if router.command.role == "router" and self._is_due(router):
                    self._start(router)

    def stop(self, hurry: Callable[[], bool]) -> None:
        """Stop everything, the router first to hear of it; once `hurry` says so, at once."""
        for process in reversed(self.processes):
            process.watch.close()
            process.tell(signal.SIGTERM)
        keepers = [process.keeper for process in self.processes if process.keeper is not None]
        deadline_s, hurried = time.monotonic() + STOP_S + 15, False
        while any(one.poll() is None for one in keepers) and time.monotonic() < deadline_s:
            if hurry() and not hurried:
                hurried = True
                for process in self.processes:
                    process.tell(signal.SIGINT)
            time.sleep(0.05)
        keeper.sweep()
        for process in self.processes:
            if process.state is not State.GIVEN_UP:
                process.enter(State.STOPPED)

    def _is_due(self, process: Process) -> bool:
        if process.state is State.RESTARTING:
            return time.monotonic() >= process.since_s + BACKOFF_S * 2 ** (process.deaths - 1)
        return process.state is State.WAITING

    def _start(self, process: Process) -> None:
        process.start()
        again = f" again (restart {process.deaths} of {MAX_RESTARTS})" if process.deaths else ""
        self._say(f"{process.name} is started{again}, its log is {process.log}")

    def _look_at(self, process: Process) -> None:
        if process.has_ended():
            self._died(process)
            return
        if process.state is State.ENDING:
            return
        before, since_s = process.state, process.since_s
        process.listen()
        if process.state is not before:
            after = f" after {process.since_s - since_s:.0f} s" if before is State.STARTING else ""
            self._say(f"{process.name} {'is ready' if process.state is State.READY else 'does not answer'}{after}")
        is_starting = process.state is State.STARTING
        deadline_s = self._start_deadline_s if is_starting else self._silence_deadline_s
        if process.silent_s > deadline_s:
            asked = process.command.ready_path if is_starting else "/health"
            self._say(f"{process.name} has not answered {asked} within {deadline_s:g} s: it is ended")
            process.end()

    def _died(self, process: Process) -> None:
        assert process.keeper is not None and process.keeper.stdin is not None
        status = process.keeper.returncode
        process.keeper.stdin.close()
        if status < 0:  # the keeper itself was killed, and what it kept has fallen to us
            keeper.sweep({one.keeper.pid for one in self.processes if one.keeper and one.keeper.returncode is None})
        ended = f"{process.name} has ended with status {status if status >= 0 else 128 - status}"
        if not process.was_ready:
            lines = "\n".join(f"    {line}" for line in process.last_lines())
            self._give_up(process, f"{ended} before it was ready; the end of {process.log}:\n{lines}")
            return
        process.deaths = 1 if process.was_well else process.deaths + 1
        if process.deaths > MAX_RESTARTS:
            times = f"{process.deaths} times and never was well for {WELL_S:.0f} s in between"
            self._give_up(process, f"{ended}, {times}; see {process.log}")
            return
        process.enter(State.RESTARTING)
        self._say(f"{ended}, and will be restarted; see {process.log}")

    def _give_up(self, process: Process, reason: str) -> None:
        process.enter(State.GIVEN_UP)
        role = process.command.role
        left = [one for one in self.processes if one.command.role == role and one.state is not State.GIVEN_UP]
        if not self.is_ready or (role in self._needed and not left):
            self.failure = self.failure or reason
        else:
            self._say(f"{reason}: it is given up, others go on")
