"""The connectors that `bench serve` starts vLLM with: ours, and those in vLLM's tree that keep a cache.

Each gets as much memory as ours, and otherwise its own defaults. What a connector needs beside vLLM (a server of its
own, files) is started here and ends with it. Connectors that only hand a request from prefill to decode are no
caches and are left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import vllm_plugin
from mooncake_connector.cli.bench import mooncake_peer, processes
from mooncake_connector.cli.bench.measure import BenchError

ALONE = "vLLM alone"
OURS = "mooncake-connector"

_SERVER_START_S = 120.0
_CHILDREN = Path(vllm_plugin.__file__).parent / "bench"


@dataclass(frozen=True)
class Place:
    """Where and how large a connector's cache may be."""

    python: Path
    folder: Path
    capacity_nbytes: int
    stack: contextlib.ExitStack
    """Ends what was started for the connector."""

    def log(self) -> IO[bytes]:
        return self.stack.enter_context(contextlib.closing(tempfile.TemporaryFile()))


@dataclass(frozen=True)
class Setup:
    """What vLLM is started with: `--kv-transfer-config` and environment."""

    transfer: dict[str, Any] | None = None
    env: dict[str, str] = field(default_factory=dict)


def _transfer(name: str, config: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    found = {"kv_connector": name, "kv_role": "kv_both", "kv_load_failure_policy": "recompute", **more}
    return {**found, "kv_connector_extra_config": config} if config else found


def _ours(place: Place) -> Setup:
    config = {"pool": str(place.folder / "pool"), "capacity": place.capacity_nbytes}
    return Setup(_transfer("MooncakeKVConnector", config))


def _offloading(name: str) -> Callable[[Place], Setup]:
    return lambda place: Setup(_transfer(name, {"cpu_bytes_to_use": place.capacity_nbytes}))


def _example(place: Place) -> Setup:
    return Setup(_transfer("ExampleConnector", {"shared_storage_path": str(place.folder / "files")}))


def _lmcache(place: Place) -> Setup:
    gib = place.capacity_nbytes / (1 << 30)
    env = {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{gib:.3f}", **_QUIET_LMCACHE}
    return Setup(_transfer("LMCacheConnectorV1"), env)


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
    try:
        processes.wait_until(lambda: processes.accepts(port), process, _SERVER_START_S, "LMCache's server")
    except BenchError as error:
        raise BenchError(f"{error}: {processes.last_lines(log)}") from error
    config = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    return Setup(_transfer("LMCacheMPConnector", config), _QUIET_LMCACHE)


_QUIET_LMCACHE = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "PYTHONHASHSEED": "0",
}


def _mooncake_store(place: Place) -> Setup:
    """The segment lies in vLLM's own process, its fastest setting."""
    install = mooncake_peer.locate(str(place.python))
    log = place.log()
    address = place.stack.enter_context(mooncake_peer.master(install, log))
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": address,
        "protocol": "tcp",
        "global_segment_size": place.capacity_nbytes,
        "local_buffer_size": 64 << 20,
    }
    path = place.folder / "mooncake.json"
    path.write_text(json.dumps(settings))
    env = {
        "MOONCAKE_CONFIG_PATH": str(path),
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1",
        "VLLM_HOST_IP": "127.0.0.1",
        "MC_FORCE_TCP": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_CHILDREN), os.environ.get("PYTHONPATH")))),
    }
    return Setup(_transfer("MooncakeStoreConnector", kv_connector_module_path="vllm_in_tree"), env)


OWN: dict[str, Callable[[Place], Setup]] = {ALONE: lambda place: Setup(), OURS: _ours}

PEERS: dict[str, Callable[[Place], Setup]] = {
    "OffloadingConnector": _offloading("OffloadingConnector"),
    "SimpleCPUOffloadConnector": _offloading("SimpleCPUOffloadConnector"),
    "ExampleConnector": _example,
    "LMCacheConnectorV1": _lmcache,
    "LMCacheMPConnector": _lmcache_server,
    "MooncakeStoreConnector": _mooncake_store,
    "FlexKVConnectorV1": lambda place: Setup(_transfer("FlexKVConnectorV1")),
    "HF3FSKVConnector": lambda place: Setup(_transfer("HF3FSKVConnector")),
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
