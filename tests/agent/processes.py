"""Processes of agents and of engines that use them: started, looked at, and gone at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agent.stand_in import CAPACITY, until

from mooncake_connector.errors import PoolError
from store_client.agent.visit import ask_report

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


def environ_of(tmp_path: Path) -> dict[str, str]:
    tiers = f'[{{"kind": "disk", "path": "{tmp_path}/disk", "capacity": "64MiB"}}]'
    return {"MOONCAKE_CONNECTOR_TIERS": tiers, "MOONCAKE_CONNECTOR_CAPACITY": str(CAPACITY)}


def command(pool: Path, tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    environ = {**os.environ, **environ_of(tmp_path)}
    return subprocess.Popen(
        [sys.executable, "-m", "mooncake_connector.cli.main", "agent", "--pool", str(pool), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=tmp_path,
    )  # fmt: skip
