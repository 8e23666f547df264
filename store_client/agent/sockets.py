"""The agent's socket in the pool's folder: made, reached, and open to this user and root alone.

Sockets and files that a forked child must not keep open are listed here: a copy in a child would hide that the process
they belong to has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from mooncake_connector.errors import MooncakeConnectorError
from store_client.embedded.folder import AGENT_SOCKET

_PEER = struct.Struct("3i")
_LONGEST_NAME = 100
"""Bytes of a path that fit into a socket's address (108) for certain."""
_BACKLOG = 128
_ROOT = 0

_kept: set[int] = set()


class Stranger(MooncakeConnectorError):
    """The other end belongs to another user."""


def listen(pool: Path) -> socket.socket:
    """A listening socket in the pool's folder, in place of what is there: whoever calls holds the agent's lock.

    Raises OSError.
    """
    listener = _socket()
    try:
        with _address(pool) as address:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(pool / AGENT_SOCKET)
            listener.bind(address)
        os.chmod(pool / AGENT_SOCKET, 0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        close(listener)
        raise
    return listener


def connect(pool: Path, timeout_s: float) -> socket.socket:
    """A connection to the agent of the pool, whose calls take `timeout_s` at most. Raises OSError, Stranger."""
    connection = _socket()
    try:
        connection.settimeout(timeout_s)
        with _address(pool) as address:
            connection.connect(address)
        check_user(connection)
    except BaseException:
        close(connection)
        raise
    return connection


def check_user(connection: socket.socket) -> int:
    """The process at the other end, 0 where it is not visible. Raises Stranger unless this user or root runs it."""
    pid, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user not in (os.geteuid(), _ROOT):
        raise Stranger(f"process {pid} of user {user} is at the other end, this process runs as {os.geteuid()}")
    return int(pid)


def _socket() -> socket.socket:
    """A new one, which children are kept from before it is of any use to them; for `close`."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    keep_from_children(made.fileno())
    return made


@contextlib.contextmanager
def _address(pool: Path) -> Iterator[str]:
    path = os.fspath(pool / AGENT_SOCKET)
    if len(os.fsencode(path)) <= _LONGEST_NAME:
        yield path
        return
    folder = os.open(pool, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{AGENT_SOCKET}"
    finally:
        os.close(folder)


def keep_from_children(fd: int) -> int:
    """Have forked children let go of it, without a word to the other end; until `release`."""
    _kept.add(fd)
    return fd


def release(fd: int) -> None:
    """To be called before it is closed: its number may be another file's at once."""
    _kept.discard(fd)


def close(connection: socket.socket) -> None:
    """Close a socket that children were kept from."""
    release(connection.fileno())
    connection.close()


def _after_fork_in_child() -> None:
    """In the place of each is put an empty file, since objects of the parent's still own the number."""
    if not _kept:
        return
    with contextlib.suppress(OSError):
        empty = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in _kept:
            os.dup2(empty, fd, inheritable=False)
        os.close(empty)
    _kept.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
