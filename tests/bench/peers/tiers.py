"""`make bench NAME=tiers`: what a tier costs beside the same bytes moved without us, and what it costs an engine.

The limits are fio (direct I/O, as many requests at once) for a disk, plain files for a shared folder, and a bare client
of Mooncake's for a cluster, where PEERS names it.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.peers import vllm, vllm_tiers
from bench.peers.report import Comparison, Goal, Row, row
from bench.tiers import disk, engine, folder
from bench.tiers.measure import Rates, Scale
from mooncake_connector.cli.bench.machine import check_room, describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import Progress

PEERS = ("mooncake",)
QUICK = Scale(nbytes=32 << 20, rounds=1, pages=(1 << 20,))
_GOALS = {"disk": 0.8, "folder": 0.8, "mooncake": 0.9}
_CLUSTER_NBYTES = 512 << 20


def run(
    where: Path, memory: Path, scale: Scale, peers: Collection[str], vllm_engine: vllm.Engine | None, progress: Progress
) -> Comparison:
    """Measure in temporary folders of `where`, on the file system that is to be measured, and pools in `memory`."""
    check_room(where, 2 * scale.nbytes + (256 << 20))
    machine, versions = describe_machine(where), describe_versions()
    found: list[Rates] = []
    if shutil.which("fio"):
        progress("a disk, beside fio")
        found += disk.measure(where, scale, progress)
    else:
        progress("WARNING: no rows of a disk: there is no fio here (apt-get install fio)")
    progress("a shared folder, beside plain files")
    found += folder.measure(where, scale, progress)
    if "mooncake" in peers:
        from bench.tiers import mooncake

        progress("a Mooncake cluster on this machine, beside a bare client")
        smaller = replace(scale, nbytes=min(scale.nbytes, _CLUSTER_NBYTES))
        found += mooncake.measure(memory, smaller, progress)
    rows = [_row(rates) for rates in found]
    progress("what an engine's process spends, and waits")
    rows += engine_rows(engine.measure(memory, quick=scale is QUICK))
    if vllm_engine is not None and "mooncake" in peers:
        versions["vllm"] = vllm.version(vllm_engine)
        rows += vllm_tiers.measure(
            vllm_engine, memory, vllm_tiers.QUICK if scale is QUICK else vllm_tiers.Scale(), progress
        )
    return Comparison(machine, versions, rows)


def _row(rates: Rates) -> Row:
    """Rounds are in turn, so the ratio of a round says more than that of two medians."""
    kind, limit = rates.what.split(",")[0], statistics.median(rates.other) / 1e9
    return row(rates.what, rates.ratio * limit, "GB/s", limit=limit, goal=Goal(at_least_of_limit=_GOALS[kind]))


def engine_rows(found: engine.Figures) -> list[Row]:
    """Of one process that asks, as an engine does."""
    p50, p99 = (partial(engine.percentile, percent=percent) for percent in (50, 99))
    new = "first lookup of a prompt that nobody has, 16 pages"
    read = "read of a page of 1 MiB while others are fetched, p99"
    plainly = f"{read}: a plain program reads and hashes instead"
    page = "CPU time of an engine's process for a page that is fetched (limit: one that is here)"
    return [
        row(f"{page}, 16 pages a prompt", found.page_us, "us", limit=found.here_us, goal=Goal(at_most=20)),
        row(f"{page}, 64 pages a prompt", found.long_page_us, "us", limit=found.long_here_us, goal=Goal(at_most=20)),
        row(f"{new}, p50", p50(found.miss), "us", limit=p50(found.plain_miss)),
        row(f"{new}, p99", p99(found.miss), "us", limit=p99(found.plain_miss), goal=Goal(at_most=2000)),
        row(read, p99(found.beside), "us", limit=p99(found.alone), goal=Goal(at_most=1.2 * p99(found.alone))),
        row(plainly, p99(found.beside_plain), "us", limit=p99(found.alone)),
    ]
