"""One run of `bench store`: what is measured, and in which order."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from mooncake_connector.cli.bench import embedded, index, mooncake_peer, store_rows, vllm_rows
from mooncake_connector.cli.bench.machine import check_room, describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import Scale
from mooncake_connector.cli.bench.report import Report

Progress = Callable[[str], None]

QUICK = Scale(num_pages=16, prefix_keys=256, small_index=1_000, large_index=20_000, rounds=2)


def run(
    folder: Path, scale: Scale, *, peer_python: str | None, vllm: vllm_rows.Engine | None, progress: Progress
) -> Report:
    """Measure everything that was asked for. Raises BenchError where the store itself cannot be measured.

    ``peer_python`` None leaves the peer out, as does an interpreter without the wheel (with a warning).
    """
    check_room(folder, 3 * scale.data_nbytes + 300 * scale.large_index + (256 << 20))
    machine, versions = describe_machine(folder), describe_versions()
    if vllm:
        versions["vllm"] = vllm_rows.version(vllm)
    with tempfile.TemporaryDirectory(prefix="mooncake-connector-bench-", dir=folder) as name:
        temporary = Path(name)
        progress("the embedded store and memcpy")
        with embedded.pool_of_another_process(temporary, scale) as space:
            data = embedded.measure_data(space, scale)
            progress("lookups, and a bare LMDB")
            lookups = embedded.measure_lookups(space, temporary, scale)
        growth, nbytes_per_page = index.measure(temporary, scale, progress)
    install = mooncake_peer.locate_or_warn(peer_python, progress) if peer_python else None
    peer = mooncake_peer.measure(install, scale, progress) if install else {}
    versions["mooncake"] = install.version if install else None
    rows = [
        *store_rows.data_rows(data, peer, scale),
        *store_rows.lookup_rows(lookups, peer, scale),
        *store_rows.index_rows(growth, nbytes_per_page, scale),
    ]
    if vllm:
        rows += vllm_rows.measure(vllm, install, folder, progress)
    else:
        progress("no --vllm-python and --model: the two vLLM rows are left out")
    rows += store_rows.peer_rows(peer, scale, data[embedded.MEMCPY])
    return Report(machine, versions, rows)
