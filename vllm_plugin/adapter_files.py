"""What the files of a LoRA adapter say, asked without waiting for a file system that answers nobody."""

from __future__ import annotations

import fnmatch
import os
import re
import time
from concurrent.futures import Future, wait
from pathlib import Path

from mooncake_connector.kv.identity.model import LORA_FILES
from mooncake_connector.threads import apart

Signature = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of every file of a folder that makes up an adapter."""

_FIRST_LOOK_S = 1.0
"""How long the first look at a folder is waited for: vLLM is about to read all of it from there."""
_LOOK_S = 0.2
"""Likewise a later one."""
_LATE_PAUSE_S = 30.0
"""After a look that took longer no further one is taken for so long."""
_LOCAL = frozenset(("ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "squashfs", "tmpfs", "xfs", "zfs"))
"""File systems that answer as long as the machine runs. A look at others has a thread, and takes four times as long."""
_IS_PART = re.compile("|".join(map(fnmatch.translate, LORA_FILES))).match
_MOUNTS = Path("/proc/self/mountinfo")
"""Format: proc_pid_mountinfo(5)."""


class AdapterFiles:
    """One thread at a time."""

    def __init__(self) -> None:
        self._local: dict[str, set[int]] = {}
        """Folder -> the devices that it is on, where all of it is on such file systems, and else none."""
        self._late: dict[str, tuple[Future[tuple[Signature, set[int]]], float]] = {}
        """Looks that took too long, and when to look again."""

    def signature(self, path: str) -> Signature | None:
        """Of the folder `path`; None where its file system does not say it in time. Raises OSError."""
        if known := self._local.get(path):
            signature, devices = read_files(path)
            if not devices <= known:  # a link that leads elsewhere now
                del self._local[path]
            return signature
        late = self._late.get(path)
        if late is not None and (not late[0].done() or time.monotonic() < late[1]):
            return None
        is_first = path not in self._local and all(look.done() for look, _ in self._late.values())
        look = apart(read_files, path)
        if wait([look], _FIRST_LOOK_S if is_first else _LOOK_S).not_done:
            self._late[path] = look, time.monotonic() + _LATE_PAUSE_S
            return None
        self._late.pop(path, None)
        signature, devices = look.result()
        if path not in self._local:
            self._local[path] = devices if devices <= _local_devices() else set()
        return signature


def read_files(path: str) -> tuple[Signature, set[int]]:
    """What the files of a folder say, and the numbers of the devices that it is on. Raises OSError."""
    with os.scandir(path) as entries:
        stats = [(entry.name, entry.stat()) for entry in entries if _IS_PART(entry.name) and entry.is_file()]
    signature = sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return tuple(signature), {os.stat(path).st_dev, *(stat.st_dev for _, stat in stats)}


def _local_devices() -> set[int]:
    devices = set[int]()
    for line in _MOUNTS.read_text().splitlines():
        mount, _, what = line.partition(" - ")
        if what.split(" ", 1)[0] in _LOCAL:
            major, minor = mount.split(" ", 3)[2].split(":")
            devices.add(os.makedev(int(major), int(minor)))
    return devices
