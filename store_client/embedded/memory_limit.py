"""The memory that control groups leave this process, such as a container's limit. What a pool holds in shared memory
counts for the group of the process that secured it, and of a group beyond its limit the kernel kills a process.

Formats: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

_KEPT_FREE = 10
"""One part in so many of a limit is left to what else the processes of a group need."""
_NO_LIMIT = 1 << 60
"""Version 1 says it in numbers from here on."""
_TMPFS = 0x01021994

_Files: TypeAlias = tuple[tuple[tuple[str, str], ...], tuple[str, ...]]
"""Of a group: each limit with what is used of it, and what of that is cached files, by the names in memory.stat."""
_FILES_V2: _Files = (
    (("memory.max", "memory.current"), ("memory.high", "memory.current")),
    ("active_file", "inactive_file"),
)
_FILES_V1: _Files = (
    (
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),  # with what is swapped out, which stays used
    ),
    ("total_active_file", "total_inactive_file"),
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.statfs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]


def is_in_memory(file: int | Path) -> bool:
    """Whether it is in shared memory. Elsewhere the kernel writes its pages to a disk."""
    answer = (ctypes.c_long * 32)()
    failed = _libc.fstatfs(file, answer) if isinstance(file, int) else _libc.statfs(os.fsencode(file), answer)
    return not failed and answer[0] == _TMPFS


def left_for(file: int | Path) -> int | None:
    """As `memory_left`, of what a file there may take: None as well where that is not in memory."""
    return memory_left() if is_in_memory(file) else None


def memory_left(said: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process may still take of the tightest of its groups, 0 where it should take none; None where no
    group has a limit. Cached files count as free: the kernel lets go of them before it kills.

    Args:
        said: what the kernel says of this process's groups.
        mounted: where groups are mounted.
    """
    lefts = [left for group, files in _groups(said, mounted) if (left := _left(group, *files)) is not None]
    return max(0, min(lefts)) if lefts else None


def _groups(said: Path, mounted: Path) -> Iterator[tuple[Path, _Files]]:
    """Each group with those it is in. In a container the names may be the host's: then only the root is there."""
    try:
        lines = os.fsdecode(said.read_bytes()).splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            root, files = (mounted / "unified" if (mounted / "unified").is_dir() else mounted), _FILES_V2
        elif "memory" in controllers.split(","):
            root, files = mounted / "memory", _FILES_V1
        else:
            continue
        inside = Path(name.lstrip("/"))
        for group in () if ".." in inside.parts else (inside, *inside.parents):
            if group != Path():
                yield root / group, files
        yield root, files


def _left(group: Path, limits: tuple[tuple[str, str], ...], cached: tuple[str, ...]) -> int | None:
    lefts = []
    for name, usage in limits:
        limit = _number(group / name)
        if limit is not None and limit < _NO_LIMIT and (used := _number(group / usage)) is not None:
            lefts.append(limit - limit // _KEPT_FREE - used)
    if not lefts:
        return None
    try:
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = sum(int(fields.get(name, 0)) for name in cached)
    except (OSError, ValueError):
        files = 0
    return min(lefts) + files


def _number(file: Path) -> int | None:
    """None where there is no such file, or it says that there is none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
