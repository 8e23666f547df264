"""`make bench NAME=serve`: serving under cache pressure beside the connectors in vLLM's tree that keep a cache.

Each gets as much memory as ours, and otherwise its own defaults. What a connector needs beside vLLM (a server of its
own, files) is started here and ends with it. Connectors that only hand a request from prefill to decode are no
caches and are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench.peers import children, mooncake_store
from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.measure import Progress
from mooncake_connector.cli.bench.serve import compare
from mooncake_connector.cli.bench.serve.engines import OWN, Connectors, Place, Setup, transfer_config
from mooncake_connector.cli.bench.serve.report import Absent, ServeReport
from mooncake_connector.cli.bench.serve.workload import Workload

_SERVER_START_S = 120.0
_PROBE = """
import json, sys
from importlib import metadata, util
names = {d.name: d.version for d in metadata.distributions()}
print(json.dumps({"missing": [name for name in sys.argv[1:] if util.find_spec(name) is None], "versions": {
    "lmcache": names.get("lmcache"), "mooncake-transfer-engine": next(
        (names[name] for name in names if name.startswith("mooncake-transfer-engine")), None)}}))
"""


def run(
    python: Path, model: Path, dtype: str, work: Workload, peers: Sequence[str], folder: Path, limit_s: float,
    progress: Progress,
) -> ServeReport:  # fmt: skip
    """vLLM alone, ours, and `peers`; one whose module is missing is told as not measured."""
    found = json.loads(
        processes.printed_by(python, _PROBE, "it needs vLLM and mooncake-connector", *NEEDED.values())[-1]
    )
    absent = [
        Absent(name, f"its module {NEEDED[name]!r} is not installed in {python}")
        for name in peers
        if NEEDED.get(name) in found["missing"]
    ]
    left_out = {item.server for item in absent}
    connectors = {**OWN, **{name: PEERS[name] for name in peers if name not in left_out}}
    report = compare.run(python, model, dtype, work, connectors, folder, limit_s, progress)
    return msgspec.structs.replace(
        report, absent=[*absent, *report.absent], versions={**report.versions, **found["versions"]}
    )


def _offloading(name: str) -> Callable[[Place], Setup]:
    return lambda place: Setup(transfer_config(name, {"cpu_bytes_to_use": place.capacity_nbytes}))


def _example(place: Place) -> Setup:
    return Setup(transfer_config("ExampleConnector", {"shared_storage_path": str(place.folder / "files")}))


def _lmcache(place: Place) -> Setup:
    gib = place.capacity_nbytes / (1 << 30)
    env = {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{gib:.3f}", **_QUIET_LMCACHE}
    return Setup(transfer_config("LMCacheConnectorV1"), env)


def _lmcache_server(place: Place) -> Setup:
    port, http_port = processes.free_ports(2)
    log = place.log()
    size = f"{place.capacity_nbytes / (1 << 30):.3f}"
    command = [
        *(str(place.python), "-c", "import sys; from lmcache.cli.main import main; sys.exit(main())", "server"),
        *("--host", "127.0.0.1", "--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http_port)),
        *("--l1-size-gb", size, "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "auto"),  # its default is for GPUs alone: an engine on the CPU waits for ever
    ]
    process = place.stack.enter_context(processes.running(command, log, _QUIET_LMCACHE, cwd=place.folder))
    processes.wait_until(lambda: children.accepts(port), process, log, _SERVER_START_S, "LMCache's server")
    config = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    return Setup(transfer_config("LMCacheMPConnector", config), _QUIET_LMCACHE)


_QUIET_LMCACHE = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "PYTHONHASHSEED": "0",
}


def _mooncake_store(place: Place) -> Setup:
    install = mooncake_store.locate(str(place.python))
    address = place.stack.enter_context(mooncake_store.master(install, place.log()))
    env = mooncake_store.vllm_settings(address, place.folder, place.capacity_nbytes)
    return Setup(mooncake_store.IN_TREE, {**env, **children.path(children.SCRIPTS)})


PEERS: Connectors = {
    "OffloadingConnector": _offloading("OffloadingConnector"),
    "SimpleCPUOffloadConnector": _offloading("SimpleCPUOffloadConnector"),
    "ExampleConnector": _example,
    "LMCacheConnectorV1": _lmcache,
    "LMCacheMPConnector": _lmcache_server,
    "MooncakeStoreConnector": _mooncake_store,
    "FlexKVConnectorV1": lambda place: Setup(transfer_config("FlexKVConnectorV1")),
    "HF3FSKVConnector": lambda place: Setup(transfer_config("HF3FSKVConnector")),
}
"""In-tree connectors that keep a cache, by vLLM's name for them."""

NEEDED = {
    "LMCacheConnectorV1": "lmcache",
    "LMCacheMPConnector": "lmcache",
    "MooncakeStoreConnector": "mooncake",
    "FlexKVConnectorV1": "flexkv",
    "HF3FSKVConnector": "hf3fs_fuse",
}
"""Modules of others without which a connector need not be tried."""
