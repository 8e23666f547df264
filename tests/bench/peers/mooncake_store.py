"""Start a real Mooncake Store on this machine and measure it: a master and two client processes, TCP on the loopback.

Three settings, kept apart: the pages in another process's segment with the TCP connection pool off, the same with it
on, and the pages in the measuring process's own segment. Mooncake's checksums stay off, as is its default.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.peers import children
from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.measure import BenchError, Progress
from mooncake_connector.cli.bench.store import Scale

POOL_OFF = "other process, connection pool off"
POOL_ON = "other process, connection pool on"
OWN = "own segment"
BETWEEN = (POOL_OFF, POOL_ON)
SETTINGS = ((POOL_OFF, "0", True), (POOL_ON, "1", True), (OWN, "1", False))
"""Name, connection pool off or on, and whether the pages are in another process's segment."""

_START_DEADLINE_S = 60.0
_MEASURE_DEADLINE_S = 240.0
_LEASE_TTL_MS = 10_000
_INSTALL = (
    "Install it here, or in another environment named by --peer-python, with "
    "`pip install mooncake-transfer-engine-non-cuda==0.3.13.post1`; it also needs the system "
    "packages libibverbs1 libnuma1 librdmacm1 liburing2 libcurl4."
)


@dataclass(frozen=True)
class Install:
    """A Mooncake wheel that can be imported by ``python``."""

    python: str
    package: Path
    version: str


def locate(python: str) -> Install:
    """Raises BenchError that says what to install where ``python`` cannot import the wheel."""
    program = (
        "import importlib.metadata as m, mooncake, mooncake.store\n"
        "names = [d.name for d in m.distributions() if d.name.startswith('mooncake-transfer-engine')]\n"
        "print(list(mooncake.__path__)[0]); print(names[0] + ' ' + m.version(names[0]) if names else 'unknown')"
    )
    package, version = processes.printed_by(python, program, _INSTALL)[-2:]
    return Install(python, Path(package), version)


def locate_or_warn(python: str, progress: Progress) -> Install | None:
    """`locate`, or None and a warning that its rows will be missing."""
    try:
        return locate(python)
    except BenchError as error:
        progress(f"WARNING: no Mooncake rows in this report: {error}")
        return None


@contextlib.contextmanager
def master(install: Install, log: Any) -> Iterator[str]:
    """A running Mooncake master; gives its ``host:port``."""
    port, metrics_port = processes.free_ports(2)
    command = [
        str(install.package / "mooncake_master"),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics_port}",
        f"--default_kv_lease_ttl={_LEASE_TTL_MS}",
        "--logtostderr=true",
    ]
    with processes.running(command, log) as process:
        processes.wait_until(lambda: children.accepts(port), process, _START_DEADLINE_S, "the Mooncake master")
        yield f"127.0.0.1:{port}"


def measure(install: Install, scale: Scale, progress: Progress) -> dict[str, dict[str, Any]]:
    """Seconds by figure for each setting. A setting that fails has its reason under ``error``, and what it got."""
    results: dict[str, dict[str, Any]] = {}
    for setting, pool, held in SETTINGS:
        progress(f"Mooncake Store: {setting}")
        with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder, tempfile.TemporaryFile() as log:
            try:
                results[setting] = _measure_one(install, scale, pool, held, Path(folder), log)
            except (BenchError, OSError) as error:
                results[setting] = {"error": f"{error}: {processes.last_lines(log)}"}
        if "error" in results[setting]:
            progress(f"WARNING: Mooncake Store, {setting}: incomplete: {results[setting]['error']}")
    return results


def _measure_one(install: Install, scale: Scale, pool: str, held: bool, folder: Path, log: Any) -> dict[str, Any]:
    segment = 2 * scale.data_nbytes + (64 << 20)
    env = tcp_settings(pool)
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(master(install, log))
        if held:
            stack.enter_context(holder(install, address, segment, env, folder, log))
        outcome = folder / "measure"
        sizes = {**asdict(scale), "segment_nbytes": 0 if held else segment, "outcome": str(outcome)}
        order = {"role": "measure", "master": address, **sizes}
        command = children.script(install.python, "mooncake_client", order)
        return children.run(command, outcome, deadline_s=_MEASURE_DEADLINE_S, env=env)


def tcp_settings(pool: str) -> dict[str, str]:
    """Environment of a client: TCP alone, its connection pool off ("0") or on ("1")."""
    return {"MC_FORCE_TCP": "1", "MC_TCP_ENABLE_CONNECTION_POOL": pool}


@contextlib.contextmanager
def holder(
    install: Install, address: str, segment_nbytes: int, env: Mapping[str, str], folder: Path, log: Any
) -> Iterator[None]:
    """A process that offers its memory to the cluster of the master at ``address``."""
    outcome = folder / "hold"
    order = {"role": "hold", "master": address, "segment_nbytes": segment_nbytes, "outcome": str(outcome)}
    with processes.running(children.script(install.python, "mooncake_client", order), log, env) as process:
        processes.wait_until(outcome.exists, process, _START_DEADLINE_S, "the process that holds the segment")
        yield


def overlay(install: Install, folder: Path) -> Path:
    """A new folder with the peer's wheel alone, so that an engine's interpreter can import it without having it."""
    folder.mkdir()
    for found in (install.package, *install.package.parent.glob("mooncake_transfer_engine*.libs")):
        (folder / found.name).symlink_to(found)
    return folder
