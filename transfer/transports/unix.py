"""Unix sockets in the abstract namespace: how processes of one user reach each other on one host, and nobody else.

Abstract names know no permissions and leave no files behind. So both sides ask the kernel whose process is at the other
end, as the connecting side must: any user may take a name. A name is seen by the processes of one network namespace,
as of one pod, whatever file systems they see.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

from transfer.transports.base import Unavailable

_PEER = struct.Struct("=iII")
_FULL_S = 0.01
"""Between attempts to get into a full backlog: unlike TCP, the kernel does not wait for room."""
_FIRST_PORT, _LAST_PORT = 1024, 65535
_ATTEMPTS = 100
_ALL_USERS = 1 << 32
_NOBODY = 65534


class OtherUser(Unavailable):
    """The process at the other end belongs to another user, or nobody can say to whom."""


def port_name(port: int) -> bytes:
    """The name that stands for a port of this user. Two users may have the same port."""
    return f"\0mooncake-connector/{os.geteuid()}/{port}".encode()


def listen_at_port(port: int, backlog: int) -> tuple[socket.socket, int]:
    """A listening socket that stands for `port`, 0 for any that is free, and its number. Raises OSError."""
    for attempt in range(_ATTEMPTS):
        number = port or _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT + 1)
        try:
            return listen_at(port_name(number), backlog), number
        except OSError as error:
            if port or error.errno != errno.EADDRINUSE or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError


def listen_at(name: bytes, backlog: int) -> socket.socket:
    """Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def reach(connection: socket.socket, name: bytes, deadline_at: float) -> None:
    """Connect a socket with a timeout to a process of this user. Raises OSError, OtherUser."""
    while True:
        try:
            connection.connect(name)
            break
        except BlockingIOError:
            if time.monotonic() > deadline_at:
                raise
            time.sleep(_FULL_S)
    check_user(connection)


async def dial(name: bytes) -> socket.socket:
    """The same for an event loop; whoever calls has the deadline. Raises OSError, OtherUser."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        while True:
            with suppress(BlockingIOError):
                connection.connect(name)
                break
            await asyncio.sleep(_FULL_S)
        check_user(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def credentials(connection: socket.socket) -> tuple[int, int]:
    """(PID, user) of the process at the other end, as seen from here; PID 0 where it is not visible from here.

    They are those of the moment in which it began to listen or connected, whatever it has become since.
    """
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, user, _ = _PEER.unpack(data)
    return pid, user


def check_user(connection: socket.socket) -> None:
    """Raise OtherUser unless the other end belongs to this user."""
    _, user = credentials(connection)
    if user != os.geteuid():
        raise OtherUser(f"the other end belongs to user {user}, this process to {os.geteuid()}")
    if user == _unknown_user() and not _knows_every_user():
        raise OtherUser(
            f"the other end belongs to user {user}, which in this user namespace stands for every user it does not "
            "know: run as another user, or set transfer_hosts and secret_file on both sides"
        )


def _unknown_user() -> int:
    """What the kernel says for a user that this namespace has no number for."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return _NOBODY


def _knows_every_user() -> bool:
    """Whether every user of the machine has a number here, so that none is taken for another."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        return sum(int(line.split()[2]) for line in lines) >= _ALL_USERS - 1
    except (OSError, ValueError, IndexError):
        return False
