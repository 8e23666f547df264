"""One run of `make bench NAME=hicache`: which processes measure what, and where the temporary pools lie.

SGLang runs in processes of its own (`hicache_child`): one that fills our pool and stays; one that measures memcpy, our
backend on those pages, and SGLang's file backend; and one for each setting of the Mooncake Store.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.peers import children, hicache_rows, mooncake_store
from bench.peers.hicache_rows import CANONICAL, FILE, MOONCAKE, OURS, Figures, HicacheScale
from bench.peers.report import Comparison
from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.machine import check_room, describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import BenchError, Progress

QUICK = HicacheScale(num_pages=32, lookup_keys=64, rounds=1)  # SGLang's page_head pool needs a page for each layer

_START_DEADLINE_S = 300.0
_MEASURE_DEADLINE_S = 1200.0
_SGLANG_TESTS = Path(__file__).parents[2] / "sglang"
"""Where the children find SGLang's host pools, as the tests of our backend have them."""
_PROBE = "import importlib.metadata as m, sglang_backend, lmdb, xxhash; print(m.version('sglang'))"


def run(
    folder: Path, scale: HicacheScale, *, sglang: Path, peers: Collection[str], peer_python: str, progress: Progress
) -> Comparison:
    """Measure our backend and ``peers`` (names from `hicache_rows`) with the SGLang of the interpreter ``sglang``.

    Raises BenchError where our backend cannot be measured; a peer that cannot is left out with a warning.
    """
    check_room(folder, 3 * scale.data_nbytes + (256 << 20))
    machine, versions = describe_machine(folder), describe_versions()
    versions["sglang"] = children.engine_version(sglang, "SGLang", _PROBE)
    install = mooncake_store.locate_or_warn(peer_python, progress) if MOONCAKE in peers else None
    versions["mooncake"] = install.version if install else None
    with tempfile.TemporaryDirectory(prefix="mooncake-connector-bench-", dir=folder) as name:
        figures = _measure_ours(Path(name), scale, sglang, FILE in peers, progress)
    mooncake = _measure_mooncake(install, scale, sglang, progress) if install else {}
    return Comparison(machine, versions, hicache_rows.rows(figures, mooncake, scale))


def _measure_ours(folder: Path, scale: HicacheScale, sglang: Path, with_file: bool, progress: Progress) -> Figures:
    ours = {OURS: _our_backend(folder / "pool", scale)}
    file = {FILE: _backend("file", {"file_storage_path": str(folder / "file")}, [CANONICAL])} if with_file else {}
    progress("SGLang: another process fills our pool")
    with _filled(ours, scale, sglang, folder):
        progress("SGLang: our backend" + (" and its own file backend" if with_file else ""))
        found = _run_child({**ours, **file}, scale, sglang, folder / "measure", {})
    if "error" in found:
        raise BenchError(f"our backend could not be measured: {found['error']}")
    return hicache_rows.figures_of(found)


def _our_backend(pool: Path, scale: HicacheScale) -> dict[str, Any]:
    config = {
        "backend_name": "mooncake_connector",
        "module_path": "sglang_backend.hicache",
        "class_name": "MooncakeConnectorStorage",
        "interface_v1": 1,
        "model_id": "bench",
        "pool": str(pool),
        "capacity": scale.data_nbytes * 3 // 2 + (64 << 20),
        "load_deadline_s": 600,  # speed is measured here, not patience
        "save_deadline_s": 600,
    }
    return _backend("dynamic", config, list(scale.layouts), filled=True)


def _measure_mooncake(
    install: mooncake_store.Install, scale: HicacheScale, sglang: Path, progress: Progress
) -> dict[str, Figures]:
    """Figures for each setting; those that could not be measured are missing, with a warning."""
    results: dict[str, Figures] = {}
    for setting, pool, held in mooncake_store.SETTINGS:
        progress(f"SGLang: its Mooncake backend, {setting}")
        segment = scale.data_nbytes * 3 // 2 + (64 << 20)
        with contextlib.ExitStack() as stack:
            try:
                cluster = mooncake_store.cluster(install, pool, segment if held else 0)
                address, env, folder = stack.enter_context(cluster)
            except BenchError as error:
                progress(f"WARNING: {MOONCAKE}, {setting}: not measured: {error}")
                continue
            env |= children.path(mooncake_store.overlay(install, folder / "wheel"), _SGLANG_TESTS)
            config = {
                "master_server_address": address,
                "metadata_server": "P2PHANDSHAKE",
                "local_hostname": "127.0.0.1",
                "protocol": "tcp",
                "global_segment_size": 0 if held else segment,
            }
            backends = {MOONCAKE: _backend("mooncake", config, [CANONICAL])}
            found = _run_child(backends, scale, sglang, folder / "measure", env)
            if "error" in found:
                progress(f"WARNING: {MOONCAKE}, {setting}: incomplete: {found['error']}")
            results[setting] = hicache_rows.figures_of(found)
    return results


def _backend(name: str, config: dict[str, Any], layouts: list[str], *, filled: bool = False) -> dict[str, Any]:
    return {"backend": name, "config": config, "layouts": layouts, "filled": filled}


@contextlib.contextmanager
def _filled(backends: Mapping[str, Any], scale: HicacheScale, sglang: Path, folder: Path) -> Iterator[None]:
    """A process that has written all pages into ``backends``, and still has them open."""
    outcome = folder / "hold"
    with tempfile.TemporaryFile() as log:
        command = _command("hold", backends, scale, sglang, outcome)
        with processes.running(command, log, children.path(_SGLANG_TESTS)) as process:
            processes.wait_until(outcome.exists, process, log, _START_DEADLINE_S, "the process that fills the pool")
            yield


def _run_child(
    backends: Mapping[str, Any], scale: HicacheScale, sglang: Path, outcome: Path, env: Mapping[str, str]
) -> dict[str, Any]:
    command = _command("measure", backends, scale, sglang, outcome)
    # SGLang prefers this variable to the folder in its configuration.
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "", **children.path(_SGLANG_TESTS), **env}
    return children.run(command, outcome, deadline_s=_MEASURE_DEADLINE_S, env=env)


def _command(role: str, backends: Mapping[str, Any], scale: HicacheScale, sglang: Path, outcome: Path) -> list[str]:
    order = {"role": role, "scale": asdict(scale), "backends": backends, "outcome": str(outcome)}
    return children.module(sglang, "hicache_child", order)
