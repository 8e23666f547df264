"""Which machine and which versions a report speaks of."""

from __future__ import annotations

import os
import platform
import tempfile
from importlib import metadata
from pathlib import Path

from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.sizes import human_nbytes

_PACKAGES = ("mooncake-connector", "numpy", "lmdb", "xxhash", "msgspec")


def describe_machine(pool_parent: Path) -> dict[str, str | int | float | None]:
    """CPU, cores this process may use, memory (GiB), load at the start, and the file system the pool lies on."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
        "pool_folder": str(pool_parent),
        "pool_file_system": _file_system(pool_parent),
    }


def describe_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that the figures depend on; None where one is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def default_folder() -> Path:
    """Shared memory, as a pool uses by default; else the temporary folder."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def check_room(folder: Path, needed: int, or_else: str = "use --quick") -> None:
    """Raise BenchError unless ``folder`` is there and has ``needed`` bytes free; ``or_else`` makes it less."""
    if folder.exists() and not folder.is_dir():
        raise BenchError(f"--folder {folder} is no folder; name an existing one")
    try:
        info = os.statvfs(folder)
    except OSError as error:
        raise BenchError(f"--folder {folder} cannot be used: {error.strerror}; name an existing folder") from error
    free = info.f_bavail * info.f_frsize
    if free < needed:
        raise BenchError(
            f"--folder {folder} has {human_nbytes(free)} free, the benchmark's pools need {human_nbytes(needed)}: "
            f"name another folder, or {or_else}"
        )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _file_system(folder: Path) -> str | None:
    best: tuple[str, str | None] = ("", None)
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return None
    resolved = str(folder.resolve())
    for line in mounts:
        _, mount, kind, *_ = line.split()
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]
