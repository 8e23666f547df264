"""Whether servers have grown under load: the memory, descriptors and threads of each of their processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from e2e.process import ServerProcess

__all__ = ["Size", "assert_not_grown", "sizes"]

MOST_NEW_DESCRIPTORS = 4  # HTTP connections that are just being closed, and the like


class Size(NamedTuple):
    """Of a process; bytes of memory that no file has, also those that it shares with who forked it until it writes."""

    nbytes: int
    descriptors: int
    threads: int


def sizes(server: ServerProcess) -> dict[int, Size]:
    """Of each process of the server, by its number."""
    return {process.pid: _measure(process) for process in server.processes()}


def assert_not_grown(
    servers: Sequence[ServerProcess],
    before: Sequence[dict[int, Size]],
    after: Sequence[dict[int, Size]],
    *,
    most_nbytes: int,
    summary: str,
    report: Path,
) -> None:
    """No process has more threads, more than a few descriptors or `most_nbytes` more; `report` gets all figures."""
    tables = [_table(*figures) for figures in zip(servers, before, after, strict=True)]
    report.write_text(f"{summary}\n\n{''.join(tables)}")
    for old, new in zip(before, after, strict=True):
        assert new.keys() == old.keys(), "other processes than before"
        for pid, size in new.items():
            name = psutil.Process(pid).name()
            assert size.threads <= old[pid].threads, f"{name} has {size.threads} threads, {old[pid].threads} before"
            assert size.descriptors <= old[pid].descriptors + MOST_NEW_DESCRIPTORS, (
                f"{name} has {size.descriptors} files"
            )
            grown = size.nbytes - old[pid].nbytes
            assert grown <= most_nbytes, f"{name} grew by {grown} bytes to {size.nbytes}"


def _measure(process: psutil.Process) -> Size:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
    return Size(kib << 10, process.num_fds(), process.num_threads())


def _table(server: ServerProcess, before: dict[int, Size], after: dict[int, Size]) -> str:
    """One server's lines."""
    lines = (
        f"| {server.log.stem} {psutil.Process(pid).name()} "
        f"| {old.nbytes / 2**20:.1f} {(new.nbytes - old.nbytes) / 2**20:+.1f} MB "
        f"| {old.descriptors} {new.descriptors - old.descriptors:+} files "
        f"| {old.threads} {new.threads - old.threads:+} threads |\n"
        for (pid, old), new in zip(before.items(), after.values(), strict=False)
    )
    return "".join(lines)
