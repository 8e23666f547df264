"""What a process that opens a pool writes about itself, for whoever asks later who uses the pool.

A pid means something in its own namespace only, so the namespace is written down with it. Nobody's life is judged by
this: that is for the lock on the file (`locks.Owners`).
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

_MAX_NBYTES = 4096
_MAX_COMMAND = 400
_SECRET = re.compile(r"(?:^|[-_.])(?:api[-_]?key|key|token|secret|password|passwd|credentials?|auth)$", re.IGNORECASE)
_SECRET_IN_JSON = re.compile(r'("[^"]*(?:key|token|secret|passw)[^"]*"\s*:\s*)"[^"]*"', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PoolUser:
    """A process that has the pool open."""

    pid: int | None
    """Its number in its own namespace; None where it left no description (an older version, a full file system)."""
    here: bool
    """Whether `pid` is a number of the reader's own namespace. Else the process runs in another container."""
    host: str
    since_s: float
    """Seconds since it opened the pool."""
    command: str
    """Its command line, without what looks like a secret."""


def introduce(fd: int) -> None:
    """Write a description of this process into the file `fd`; where that fails, there is none."""
    text = json.dumps(
        {
            "pid": os.getpid(),
            "namespace": _namespace(),
            "host": socket.gethostname(),
            "since": time.time(),
            "command": _command(os.getpid()),
        }
    )
    try:
        os.pwrite(fd, text.encode("utf-8", "backslashreplace")[:_MAX_NBYTES], 0)
    except OSError:
        return


def read_user(fd: int) -> PoolUser:
    """The process whose file `fd` is."""
    try:
        found = json.loads(os.pread(fd, _MAX_NBYTES, 0).rstrip(b"\0"))
        pid, since = int(found["pid"]), float(found["since"])
        host, command = str(found["host"])[:256], str(found["command"])[:_MAX_COMMAND]
        here = found["namespace"] == _namespace() != ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return PoolUser(None, False, "", max(0.0, time.time() - os.fstat(fd).st_mtime), "")
    return PoolUser(pid, here, host, max(0.0, time.time() - since), (_command(pid) if here else "") or command)


def _namespace() -> str:
    try:
        return f"{os.readlink('/proc/self/ns/pid')} of {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return ""


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").removesuffix("\0").split("\0")
    except OSError:
        return ""
    shown: list[str] = []
    hide = asked = False
    for word in words:
        name, equals, _ = word.partition("=")
        hide = asked or (hide and not word.startswith("-"))  # an option may take several: `--api-key ONE TWO`
        if hide:
            shown.append("***")
        elif equals and _SECRET.search(name):
            shown.append(f"{name}=***")
        else:
            shown.append(_SECRET_IN_JSON.sub(r'\1"***"', word))
        asked = not equals and word.startswith("-") and bool(_SECRET.search(word))
    return " ".join(shown).strip()[:_MAX_COMMAND]
