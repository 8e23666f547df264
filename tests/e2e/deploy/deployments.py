"""Deployment files for a machine without a GPU, and `mooncake-connector up` run on them as a person runs it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from long_form import LONG

from e2e.client import HttpClient, ServerError
from e2e.process import ENVIRONMENTS, FORKS, free_port, small_environment
from e2e.sglang_server import STAND_INS
from models import checkpoint
from mooncake_connector.deploy.schema import PEER_PORT_OFFSET
from mooncake_connector.deploy.watch import Watch

__all__ = ["LIMIT_S", "Deployed", "Request", "Way", "row_of_ports"]

START_S, LIMIT_S = 600.0, 300.0
ROUTERS = ENVIRONMENTS / "routers"
SILENCE_DEADLINE_S = 60
_OFTEN = (
    "--health-check-interval-secs 2 --health-check-timeout-secs 60 --health-failure-threshold 3"
    " --health-success-threshold 1"
)
"""Tests ask instances that were away as soon as they are back, and are patient with those that are busy."""
_ENGINES = {
    "vllm": """\
flags: --served-model-name smollm2 --max-model-len 2048 --dtype float32 --enforce-eager --no-enable-prefix-caching
env:
  VLLM_CPU_KVCACHE_SPACE: 1
  VLLM_CPU_OMP_THREADS_BIND: nobind
  OMP_NUM_THREADS: 1
  OMP_WAIT_POLICY: PASSIVE
connector:
  prefix_reuse: false
""",
    "sglang": f"""\
flags: >-
  --served-model-name smollm2 --device cpu --attention-backend torch_native --dtype float32 --disable-cuda-graph
  --disable-overlap-schedule --max-total-tokens 4096 --sleep-on-idle
env:
  PYTHONPATH: {STAND_INS if LONG else f"{STAND_INS}:{FORKS}"}
  OMP_NUM_THREADS: 1
  OMP_WAIT_POLICY: PASSIVE
  TORCH_EXTENSIONS_DIR: {ENVIRONMENTS.parent / ".cache" / "torch_extensions"}
""",
}


@dataclass(frozen=True, slots=True)
class Way:
    """What is deployed; `router` is what the file says of it."""

    engine: str
    num_prefills: int
    router: str
    num_decodes: int = 1

    def __str__(self) -> str:
        router = self.router.replace("kind: ", "").replace(", order: ", "-")
        return f"{self.engine}-{self.num_prefills}P{self.num_decodes}D-{router}"

    @property
    def is_of_others(self) -> bool:
        """Whether the router is a package that has to be installed."""
        return "builtin" not in self.router

    def file(self, ports: dict[str, int], logs: Path) -> str:
        more = f", flags: {_OFTEN} --prometheus-port {free_port()}" if self.is_of_others else ""
        return f"""\
engine: {self.engine}
model: {checkpoint("smollm2")}
{_ENGINES[self.engine]}prefill: {{count: {self.num_prefills}, port: {ports["prefill"]}}}
decode: {{count: {self.num_decodes}, port: {ports["decode"]}}}
router: {{{self.router}, port: {ports["router"]}{more}}}
logs: {logs}
silence_deadline_s: {SILENCE_DEADLINE_S}
"""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the OpenAI API, and the text of its greedy answer."""

    path: str
    body: dict[str, Any]
    text: str


class Deployed(HttpClient):
    """A deployment, started by `start`; a client of its router."""

    def __init__(self, way: Way, folder: Path, logs: Path) -> None:
        self.way = way
        counts = {"prefill": way.num_prefills, "decode": way.num_decodes, "router": 1}
        self.ports = {role: row_of_ports(count) for role, count in counts.items()}
        super().__init__("127.0.0.1", self.ports["router"], timeout_s=LIMIT_S)
        self._file, self._output = folder / "deployment.yaml", folder / "output"
        self._file.write_text(way.file(self.ports, logs))
        self._command = ENVIRONMENTS / way.engine / "bin" / "mooncake-connector"
        self._environment = small_environment()
        self._environment["PATH"] += os.pathsep + str(ROUTERS / "bin")
        self._up: subprocess.Popen[bytes] | None = None

    def check(self) -> subprocess.CompletedProcess[str]:
        command = [self._command, "up", self._file, "--check"]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=LIMIT_S)

    def start(self) -> None:
        """And wait until it says that it is ready."""
        with open(self._output, "wb") as output:
            self._up = subprocess.Popen(
                [self._command, "up", self._file], env=self._environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.wait_for("ready at ", within_s=START_S)

    def printed(self) -> str:
        return self._output.read_text()

    def wait_for(self, words: str, *, times: int = 1, within_s: float = LIMIT_S) -> None:
        """For `up` to print them."""

        def has_said() -> bool:
            said = self.printed().count(words) >= times
            assert said or self.up.poll() is None, f"up has ended:\n{self.printed()}"
            return said

        wait_until(has_said, lambda: f"{words!r} in\n{self.printed()}", within_s)

    @property
    def up(self) -> subprocess.Popen[bytes]:
        assert self._up is not None, "it is not started"
        return self._up

    def processes(self) -> list[psutil.Process]:
        """All that came of `up`; whatever loses its parent below it stays below it."""
        return psutil.Process(self.up.pid).children(recursive=True)

    def decode_server(self, number: int = 0) -> psutil.Process:
        """The engine's first process, below its keeper."""
        port = str(self.ports["decode"] + number)
        return next(one for one in self.processes() if port in (line := one.cmdline()) and "-m" in line[:3])

    def wait_until_moved(self, role: str, nbytes: int) -> None:
        """For all instances of a role to have sent or fetched as much KV in all, and each some, as `up` shows it."""
        count = self.way.num_prefills if role == "prefill" else self.way.num_decodes
        urls = [f"http://127.0.0.1:{self.ports[role] + number}" for number in range(count)]
        watches = [Watch(url, self.way.engine) for url in urls]

        def moved() -> list[int]:
            return [figures.moved_nbytes if (figures := one.latest.figures) else 0 for one in watches]

        try:
            wait_until(lambda: all(moved()) and sum(moved()) >= nbytes, lambda: f"{nbytes} of {moved()} moved", LIMIT_S)
        finally:
            for one in watches:
                one.close()

    def answer(self, request: Request) -> str:
        """The text of the answer, streamed or not."""
        connection = self._send("POST", request.path, request.body)
        if not request.body.get("stream"):
            (choice,) = json.loads(self._read(connection))["choices"]
            return str(choice["text"] if "text" in choice else choice["message"]["content"])
        choices = [choice for event in self._events(connection) for choice in event["choices"]]
        return "".join(one["text"] if "text" in one else one["delta"].get("content") or "" for one in choices)

    def wait_until_it_answers(self, request: Request) -> str:
        """Routers need a while to see that an instance is back."""
        found: list[str] = []

        def has_answered() -> bool:
            with suppress(ServerError, OSError, http.client.HTTPException):
                found.append(self.answer(request))
            return bool(found)

        wait_until(has_answered, lambda: f"an answer\n{self.printed()}", LIMIT_S)
        return found[0]

    def stop(self) -> int:
        """Ctrl-C; the exit status."""
        if self.up.poll() is None:
            self.up.send_signal(signal.SIGINT)
        return self.up.wait(LIMIT_S)


def wait_until(holds: Callable[[], bool], what: Callable[[], str], within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what()}"
        time.sleep(0.5)


def row_of_ports(count: int) -> int:
    """The first of free ports in a row. What decode instances look for is further up, below Linux's own as well."""
    while (first := free_port()) + PEER_PORT_OFFSET + count > 32768 or not _are_free(first, count):
        pass
    return first


def _are_free(first: int, count: int) -> bool:
    with suppress(OSError):
        for port in range(first, first + count):
            for one in (port, port + PEER_PORT_OFFSET):
                socket.create_server(("127.0.0.1", one)).close()
        return True
    return False
