"""Reads the secret that all instances of a deployment share. It is in no message and in no log."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mooncake_connector.errors import ConfigError

MIN_SECRET_NBYTES = 16
MAX_SECRET_NBYTES = 4096


def read_secret(path: Path, field: str = "secret_file") -> bytes:
    """The content of the file that the configuration names in `field`, without white space around it.

    Raises ConfigError for a file that is missing or no file, that others than its owner may read or change, whose owner
    is neither this user nor root, or that holds too little or too much.
    """
    try:
        # A pipe would block without O_NONBLOCK until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_private(path, field, os.fstat(descriptor))
            data = os.read(descriptor, MAX_SECRET_NBYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        seen = f"cannot be read: {error.strerror}"
        raise _refusal(path, field, seen, "create it, readable by its owner alone") from None
    if len(data) > MAX_SECRET_NBYTES:
        seen = f"holds more than {MAX_SECRET_NBYTES} bytes"
        raise _refusal(path, field, seen, "name a file that holds the secret alone")
    secret = data.strip()
    if len(secret) < MIN_SECRET_NBYTES:
        raise _refusal(
            path,
            field,
            f"holds {len(secret)} bytes without white space around them: expected at least {MIN_SECRET_NBYTES}",
            f"make one that nobody can guess: (umask 077; openssl rand -hex 32 > {path})",
        )
    return secret


def _check_private(path: Path, field: str, status: os.stat_result) -> None:
    mode = status.st_mode
    if not stat.S_ISREG(mode):
        raise _refusal(path, field, "is no regular file", "name a file that holds the secret")
    if mode & 0o077:
        seen = f"has mode {stat.S_IMODE(mode):04o}: group or others may use it"
        raise _refusal(path, field, seen, f"allow its owner alone: chmod 600 {path}")
    if status.st_uid not in (0, os.geteuid()):
        seen = f"belongs to user {status.st_uid}, this process to {os.geteuid()}: its owner may change it"
        raise _refusal(path, field, seen, f"make it this user's or root's: chown {os.geteuid()} {path}")


def _refusal(path: Path, field: str, seen: str, remedy: str) -> ConfigError:
    return ConfigError(f"{field} {path} {seen}; {remedy}")
