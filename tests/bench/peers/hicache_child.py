"""The processes of `make bench NAME=hicache` that use SGLang; run by the interpreter that has SGLang and this project.

Run as ``python -m bench.peers.hicache_child ORDER``, one JSON object (see `main`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from host_pools import axes, mha

from bench.peers.hicache_rows import (
    CANONICAL,
    EXISTS,
    GET,
    LOOKUP,
    MEMCPY,
    SET,
    Geometry,
    HicacheScale,
)
from bench.peers.scripts.outcome import write_outcome
from bench.peers.sglang_calls import Attached
from mooncake_connector.cli.bench.measure import BenchError, Task, best_seconds
from mooncake_connector.cli.bench.store import content, memcpy_task, page_keys


def main(order: dict[str, Any]) -> None:
    """``order``: role, scale (fields of `HicacheScale`), outcome (path of the JSON file to write), and ``backends``:
    for each name its ``backend`` and ``config`` (see `Attached`), ``layouts``, and ``filled``.

    ``hold`` writes all pages into all backends, says so, and waits until its input ends. ``measure`` writes
    ``figures``: seconds as ``[operation, geometry, layout, name of the backend or memcpy, seconds]``; backends that are
    ``filled`` have the pages of ``hold``.
    """
    geometries = tuple(Geometry(**values) for values in order["scale"].pop("geometries"))
    scale = HicacheScale(**order["scale"], geometries=geometries)
    figures: list[tuple[str, str, str, str, float]] = []
    if order["role"] == "hold":
        hold(scale, order["backends"])
    else:
        for operation, geometry, layout, seconds in measure(scale, order["backends"]):
            figures += [(operation, geometry, layout, name, value) for name, value in seconds.items()]
            write_outcome(order["outcome"], {"figures": figures})
    write_outcome(order["outcome"], {"figures": figures, "ready": True})
    if order["role"] == "hold":
        sys.stdin.read()


def hold(scale: HicacheScale, backends: Mapping[str, Any]) -> None:
    """Write the pages of all geometries, from host pools in the canonical layout."""
    for geometry in (*scale.geometries, LOOKUP):
        with HostPages(scale, geometry, CANONICAL, backends) as pages:
            for name in pages.attached:
                pages.write(name)


def measure(scale: HicacheScale, backends: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Mapping[str, float]]]:
    """Operation, geometry, layout, and best seconds by name. All reads come first: the writes remove what is there."""
    layouts = [layout for layout in scale.layouts if any(layout in values["layouts"] for values in backends.values())]
    for operation, run in ((GET, reads), (SET, writes)):
        for geometry in scale.geometries:
            for layout in layouts:
                with HostPages(scale, geometry, layout, backends) as pages:
                    yield operation, geometry.name, layout, run(scale, pages)
    with HostPages(scale, LOOKUP, CANONICAL, backends) as pages:
        yield EXISTS, LOOKUP.name, CANONICAL, lookups(scale, pages)


def reads(scale: HicacheScale, pages: HostPages) -> dict[str, float]:
    """Best seconds to read all pages into the pool, and of memcpy."""
    for name in pages.absent:
        pages.write(name)
    for name in pages.attached:
        pages.check(name)
    tasks = {name: Task(partial(pages.read, name)) for name in pages.attached}
    return best_seconds({MEMCPY: pages.memcpy(), **tasks}, scale.rounds)


def writes(scale: HicacheScale, pages: HostPages) -> dict[str, float]:
    """Best seconds to write all pages of the pool, none of which is there, and of memcpy."""
    tasks = {name: Task(partial(pages.write, name), backend.forget) for name, backend in pages.attached.items()}
    seconds = best_seconds({MEMCPY: pages.memcpy(), **tasks}, scale.rounds)
    for name in pages.attached:
        pages.check(name)
    return seconds


def lookups(scale: HicacheScale, pages: HostPages) -> dict[str, float]:
    """Best seconds to look all keys up, all present."""
    for name in pages.attached:
        pages.write(name)
    return best_seconds({name: Task(partial(pages.find, name)) for name in pages.attached}, 3 * scale.rounds)


class HostPages:
    """A host pool with one page for each key, and the backends that take its layout."""

    def __init__(self, scale: HicacheScale, geometry: Geometry, layout: str, backends: Mapping[str, Any]) -> None:
        count = scale.lookup_keys if geometry == LOOKUP else scale.num_pages
        pool = mha(
            layout, layers=(0, geometry.num_layers), heads=geometry.num_heads, dim=geometry.head_dim,
            page_tokens=scale.page_tokens, pages=count,
        )  # fmt: skip
        self.attached = {
            name: Attached(values["backend"], dict(values["config"]), pool, geometry.name)
            for name, values in backends.items()
            if layout in values["layouts"]
        }
        self.absent = {name for name in self.attached if not backends[name]["filled"]}
        self._keys = [key.hex() for key in page_keys(count, geometry.name)]
        self._page_nbytes = scale.page_nbytes(geometry)
        self._content = content(count * self._page_nbytes)
        self._memory = axes(pool)
        self._expected = self._content.view(np.uint16).reshape(self._memory.shape)
        self._memory[:] = self._expected
        self._scratch = np.zeros_like(self._content)

    def __enter__(self) -> HostPages:
        return self

    def __exit__(self, *_: object) -> None:
        for backend in self.attached.values():
            backend.close()

    def read(self, name: str) -> None:
        """Read all pages into the pool."""
        self._expect_all(self.attached[name].get(self._keys), f"{name} read")

    def write(self, name: str) -> None:
        """Write all pages of the pool."""
        if not self.attached[name].set(self._keys):
            raise BenchError(f"{name} did not write all of {len(self._keys)} pages")

    def find(self, name: str) -> None:
        """Look all keys up."""
        self._expect_all(self.attached[name].exists(self._keys), f"{name} found")

    def check(self, name: str) -> None:
        """Raise BenchError unless a read brings the content back into the emptied pool."""
        self._memory[:] = 0
        self.read(name)
        if not np.array_equal(self._memory, self._expected):
            raise BenchError(f"{name} returned other bytes than were written: its figures mean nothing")

    def memcpy(self) -> Task:
        """Copy as many bytes from private memory to private memory."""
        return memcpy_task(self._content, self._scratch, self._page_nbytes)

    def _expect_all(self, found: int, what: str) -> None:
        if found != len(self._keys):
            raise BenchError(f"{what} {found} of {len(self._keys)} pages that are there")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
