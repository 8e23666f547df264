"""A server as a subprocess: started, waited for, certainly gone at the end; and what servers of all engines need."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from e2e.forked import Forked, ForkServer
from e2e.network import ENTER

__all__ = [
    "ENVIRONMENTS",
    "FORKS",
    "ServerDied",
    "ServerProcess",
    "assert_no_complaints",
    "free_port",
    "pool_folder",
    "running",
    "small_environment",
]

ENVIRONMENTS = Path(__file__).resolve().parents[2] / ".venvs"  # one for each engine
FORKS = Path(__file__).parent / "forks"
"""What has to be on the PYTHONPATH of a server that is to fork its processes, which halves its start."""

START_DEADLINE_S = 600.0
STOP_DEADLINE_S = 30.0


class ServerDied(AssertionError):
    """The server ended, or did not answer in time; the message carries the end of its log."""


class ServerProcess:
    """One server on a port of `host`, in a process group of its own.

    `is_complaint` finds the lines of its log that report an error. `fork_server` starts it, if given: the command is
    `PYTHON -m MODULE` with arguments, in a network namespace where `ip netns exec NAME` is before it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        env: dict[str, str],
        log: Path,
        is_complaint: Callable[[str], bool],
        host: str = "127.0.0.1",
        fork_server: ForkServer | None = None,
    ) -> None:
        self.log = log
        self._fork_server = fork_server
        self._command, self._env, self._is_complaint = list(command), env, is_complaint
        self.url = f"http://{host}:{port}"
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._log_start = 0
        self._complaints: list[str] = []
        self._expected: set[str] = set()
        log.unlink(missing_ok=True)  # of an earlier run

    def start(self) -> None:
        """Launch the process; `wait_until_ready` tells when it answers."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._log_start = log.tell()
            if self._fork_server is not None:
                arguments = self._command.index("-m") + 2
                network = self._command[3] if self._command[:3] == [*ENTER] else None
                self._process = self._fork_server.start(self._command[arguments:], self._env, log, network)
                return
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=tempfile.gettempdir(),  # `-m` puts the working folder on the path: never the source tree
                start_new_session=True,
            )

    def wait_until_ready(
        self, *, deadline_s: float = START_DEADLINE_S, progress: Callable[[], None] | None = None
    ) -> None:
        """Wait for /health, calling `progress` about five times a second."""
        deadline = time.monotonic() + deadline_s
        while not self.is_healthy():
            self.check_alive()
            if time.monotonic() > deadline:
                raise ServerDied(f"no answer from /health within {deadline_s:g} s\n{self.log_tail()}")
            if progress is not None:
                progress()
            time.sleep(0.2)

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def check_alive(self) -> None:
        """Raise `ServerDied` if the process has ended."""
        status = None if self._process is None else self._process.poll()
        if status is not None:
            raise ServerDied(f"the server ended with status {status}\n{self.log_tail()}")

    def stop(self) -> None:
        """End the server as an operator does (SIGTERM), then kill whatever is left of its process group."""
        if self._process is None:
            return
        self._note_complaints()  # engines kill their own processes when they are told to stop, and log errors of it
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_DEADLINE_S)
        self._end_group()

    def kill(self) -> None:
        """SIGKILL to the whole process group: workers and engine core included, with no time to clean up."""
        if self._process is None:
            return
        self._note_complaints()
        self._end_group()

    def pause(self) -> None:
        """SIGSTOP to every process of the server."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def restart(self) -> None:
        """Start again after `kill`, on the same ports."""
        self.start()
        self.wait_until_ready()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def processes(self) -> list[psutil.Process]:
        """Every process of the server."""
        parent = psutil.Process(self.pid)
        return [parent, *parent.children(recursive=True)]

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        return f"--- end of {self.log} ---\n" + "\n".join(self.log_text().splitlines()[-lines:])

    def complaints(self) -> list[str]:
        """Log lines of all lives up to their ends that report an error: none are expected, whatever a test does."""
        return self._complaints

    @contextlib.contextmanager
    def provoked(self) -> Iterator[None]:
        """What the log complains of meanwhile is provoked."""
        self._note_complaints()
        yield
        self._log_start = self.log.stat().st_size

    def expect(self, *texts: str) -> None:
        """From now on lines of the log with one of these are no complaints: a test provokes them."""
        self._expected.update(texts)

    def _note_complaints(self) -> None:
        if not self.log.exists():  # whoever removed it does not keep the server running
            return
        lines = self.log.read_bytes()[self._log_start :].decode(errors="replace").splitlines()
        complaints = filter(self._is_complaint, lines)
        self._complaints += [line for line in complaints if not any(text in line for text in self._expected)]

    def _end_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None


def assert_no_complaints(servers: Iterable[ServerProcess]) -> None:
    """What has stopped has logged no error."""
    complaints = [complaint for server in servers for complaint in server.complaints()]
    assert not complaints, "the servers logged errors:\n" + "\n".join(complaints[:20])


AnyServer = TypeVar("AnyServer", bound=ServerProcess)


@contextlib.contextmanager
def running(server: AnyServer) -> Iterator[AnyServer]:
    """Start `server`, wait for it, and stop it at the end however the block ends."""
    server.start()
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def pool_folder() -> Iterator[Path]:
    """A path in /dev/shm for a pool that does not exist yet; removed with all it holds at the end."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="mooncake-connector-test-", dir=parent) as folder:
        yield Path(folder) / "pool"


def free_port() -> int:
    """A port that stays free until its server listens: below those that Linux hands out to whoever asks for any."""
    while True:
        port = random.SystemRandom().randrange(10000, 32768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def small_environment() -> dict[str, str]:
    """This process's environment without what would change a server, and with what keeps it offline."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith(("VLLM_", "SGLANG_", "MOONCAKE_CONNECTOR_"))
    }
    return {**inherited, "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
