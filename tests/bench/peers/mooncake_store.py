"""Start a real Mooncake Store on this machine and measure it: a master and two client processes, TCP on the loopback.

Three settings, kept apart: the pages in another process's segment with the TCP connection pool off, the same with it
on, and the pages in the measuring process's own segment. Mooncake's checksums stay off, as is its default.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.peers import children
from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.measure import BenchError, Progress
from mooncake_connector.cli.bench.serve.engines import transfer_config
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
        processes.wait_until(lambda: children.accepts(port), process, log, _START_DEADLINE_S, "the Mooncake master")
        yield f"127.0.0.1:{port}"


def measure(install: Install, scale: Scale, progress: Progress) -> dict[str, dict[str, Any]]:
    """Seconds by figure for each setting. A setting that fails has its reason under ``error``, and what it got."""
    results: dict[str, dict[str, Any]] = {}
    for setting, pool, held in SETTINGS:
        progress(f"Mooncake Store: {setting}")
        try:
            results[setting] = _measure_one(install, scale, pool, held)
        except (BenchError, OSError) as error:
            results[setting] = {"error": str(error)}
        if "error" in results[setting]:
            progress(f"WARNING: Mooncake Store, {setting}: incomplete: {results[setting]['error']}")
    return results


def _measure_one(install: Install, scale: Scale, pool: str, held: bool) -> dict[str, Any]:
    segment = 2 * scale.data_nbytes + (64 << 20)
    with cluster(install, pool, segment if held else 0) as (address, env, folder):
        outcome = folder / "measure"
        sizes = {**asdict(scale), "segment_nbytes": 0 if held else segment, "outcome": str(outcome)}
        order = {"role": "measure", "master": address, **sizes}
        command = children.script(install.python, "mooncake_client", order)
        return children.run(command, outcome, deadline_s=_MEASURE_DEADLINE_S, env=env)


def tcp_settings(pool: str) -> dict[str, str]:
    """Environment of a client: TCP alone, its connection pool off ("0") or on ("1")."""
    return {"MC_FORCE_TCP": "1", "MC_TCP_ENABLE_CONNECTION_POOL": pool}


@contextlib.contextmanager
def cluster(install: Install, pool: str, held_nbytes: int) -> Iterator[tuple[str, dict[str, str], Path]]:
    """A master, and a process that offers it memory unless that is 0; its address, and environment and folder of a
    client. Raises BenchError."""
    env = tcp_settings(pool)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-bench-")))
        log = stack.enter_context(tempfile.TemporaryFile())
        address = stack.enter_context(master(install, log))
        if held_nbytes:
            stack.enter_context(_holder(install, address, held_nbytes, env, folder, log))
        yield address, env, folder


@contextlib.contextmanager
def _holder(
    install: Install, address: str, segment_nbytes: int, env: Mapping[str, str], folder: Path, log: Any
) -> Iterator[None]:
    outcome = folder / "hold"
    order = {"role": "hold", "master": address, "segment_nbytes": segment_nbytes, "outcome": str(outcome)}
    with processes.running(children.script(install.python, "mooncake_client", order), log, env) as process:
        processes.wait_until(outcome.exists, process, log, _START_DEADLINE_S, "the process that holds the segment")
        yield


IN_TREE = transfer_config("MooncakeStoreConnector", kv_connector_module_path="vllm_in_tree")
"""vLLM's own connector for the store; its module is in `children.SCRIPTS`."""


def vllm_settings(address: str, folder: Path, segment_nbytes: int) -> dict[str, str]:
    """The environment for `IN_TREE`, with the segment in vLLM's own process: its fastest setting."""
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": address,
        "protocol": "tcp",
        "global_segment_size": segment_nbytes,
        "local_buffer_size": 64 << 20,
    }
    (folder / "mooncake.json").write_text(json.dumps(settings))
    return {
        "MOONCAKE_CONFIG_PATH": str(folder / "mooncake.json"),
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1",
        "VLLM_HOST_IP": "127.0.0.1",
        "MC_FORCE_TCP": "1",
    }


def overlay(install: Install, folder: Path) -> Path:
    """A new folder with the peer's wheel alone, so that an engine's interpreter can import it without having it."""
    folder.mkdir()
    for found in (install.package, *install.package.parent.glob("mooncake_transfer_engine*.libs")):
        (folder / found.name).symlink_to(found)
    return folder
