"""Servers that are forked end with the tests that asked for them, however these end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from simulated.waiting import wait_for

TESTS = Path(__file__).resolve().parents[1]
ASKS = """
import os, signal, sys
from e2e.forked import ForkServer
servers = ForkServer(sys.executable, "http.server", ["http.server"])
with open(sys.argv[1], "wb") as log:
    one, other = (servers.start(["0"], dict(os.environ), log) for _ in range(2))
one.terminate()
assert one.wait(60) == -signal.SIGTERM and other.poll() is None
print(other.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def has_ended(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_server_ends_with_whoever_asked_for_it_and_was_killed(tmp_path: Path) -> None:
    asked = subprocess.run(
        [sys.executable, "-c", ASKS, tmp_path / "log"],
        env={"PYTHONPATH": str(TESTS)}, stdout=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    pid = asked.stdout.strip()
    assert pid.isdigit(), (tmp_path / "log").read_text()
    wait_for(lambda: has_ended(pid))
