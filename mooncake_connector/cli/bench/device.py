"""`bench device`: pages between a real pool and paged KV on a GPU, beside plain copies and a model's own work."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_connector.cli.bench.machine import check_room, describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import BenchError, Progress
from mooncake_connector.cli.bench.report import Report, Row
from store_client import EmbeddedStore, Store
from transfer.transports.base import Unavailable
from transfer.transports.cuda.driver import system_driver

if TYPE_CHECKING:
    from vllm_plugin.device.bench.measure import Figures

DEVICE = 0
_SPARE_NBYTES = 256 << 20


@dataclass(frozen=True)
class Scale:
    """How much a run does.

    Args:
        num_tokens: of each model's request in the pool.
        hit_tokens: prompts whose hit is held against their prefill.
    """

    num_tokens: int = 65536
    hit_tokens: tuple[int, ...] = (8192, 32768)
    rounds: int = 5
    num_steps: int = 300


QUICK = Scale(num_tokens=2048, hit_tokens=(2048,), rounds=1, num_steps=20)


def run(folder: Path, scale: Scale, progress: Progress) -> Report:
    """Measure each model with a temporary pool in `folder`. Raises BenchError where that is not possible."""
    try:
        system_driver()
    except Unavailable as error:
        raise BenchError(
            f"no GPU here, so nothing was measured ({error}): run this on a machine with an NVIDIA GPU, in the "
            "environment of an engine"
        ) from None
    try:
        from vllm_plugin.device.bench import measure
        from vllm_plugin.device.bench.models import MODELS
    except ImportError as error:
        raise BenchError(
            f"{error.name} is not installed here: run this in the environment of an engine, which has torch and Triton"
        ) from error
    check_room(folder, max(pool_nbytes(model.token_nbytes, scale) for model in MODELS))
    device = measure.use(DEVICE)
    machine = describe_machine(folder) | measure.describe(device)
    versions = describe_versions() | {name: metadata.version(name) for name in ("torch", "triton")}
    rows: list[Row] = []
    for model in MODELS:
        with _pool(folder, pool_nbytes(model.token_nbytes, scale)) as store:
            found = measure.measure(
                model,
                store,
                device,
                num_tokens=scale.num_tokens,
                hit_tokens=scale.hit_tokens,
                rounds=scale.rounds,
                num_steps=scale.num_steps,
                progress=partial(_say_of, model.name, progress),
            )
        rows += rows_of(model.name, found)
    return Report(machine, versions, rows)


@contextlib.contextmanager
def _pool(folder: Path, capacity: int) -> Iterator[Store]:
    """A pool of its own, gone afterwards."""
    prefix = "mooncake-connector-bench-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as name, EmbeddedStore(name, capacity) as store:
        yield store


def _say_of(model: str, progress: Progress, what: str) -> None:
    progress(f"{model}: {what}")


def pool_nbytes(token_nbytes: int, scale: Scale) -> int:
    """Room for what is loaded, and for twice as much that is saved beside it."""
    return 3 * scale.num_tokens * token_nbytes + _SPARE_NBYTES


def rows_of(model: str, found: Figures) -> list[Row]:
    """The figures of one model."""
    rows = [
        Row(f"{model}: load", found.load / 1e9, "GB/s", found.limits.up / 1e9),
        Row(f"{model}: save", found.save / 1e9, "GB/s", found.limits.down / 1e9),
        Row(f"{model}: both at once", found.both / 1e9, "GB/s", found.limits.both / 1e9),
    ]
    for hit in found.hits:
        rows.append(Row(f"{model}: hit of {hit.num_tokens:,} tokens", hit.load_s * 1e3, "ms", hit.prefill_s * 1e3))
    return [
        *rows,
        Row(f"{model}: p99 of a decode step beside saves", found.step_beside_ms, "ms", found.step_alone_ms),
        Row(f"{model}: saved meanwhile", found.save_beside / 1e9, "GB/s"),
        Row(f"{model}: processor for a GiB loaded", found.load_cpu_s * 1e3, "ms"),
        Row(f"{model}: processor for a GiB saved", found.save_cpu_s * 1e3, "ms"),
        Row(f"{model}: loaded bytes that were checked", found.checked_nbytes / 2**30, "GiB"),
        Row(f"{model}: page-locked memory of the pool", found.locked_nbytes / 2**30, "GiB"),
    ]
