"""Short visits to a running agent: what a person's command asks of it, and the first words of every connection."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from mooncake_connector import __version__
from mooncake_connector.errors import PoolError
from store_client.agent import messages, sockets
from store_client.agent.messages import Frames, Junk

_ANSWER_S = 10.0


def ask_report(pool: Path) -> dict[str, Any] | None:
    """The state of the agent of this pool, plain values; None where none listens. Raises PoolError for one that does
    not answer or refuses."""
    with _visit(pool) as (connection, frames):
        if connection is None:
            return None
        connection.sendall(messages.frame(messages.Query()))
        answer = hear(connection, frames)
    if isinstance(answer, messages.Refused):
        raise PoolError(f"the agent of pool {pool} refuses: {answer.reason}")
    if not isinstance(answer, messages.Report):
        raise PoolError(f"the agent of pool {pool} answers {type(answer).__name__} where a report is due")
    report: dict[str, Any] = msgspec.json.decode(answer.text, type=dict[str, Any])
    return report


def ask_to_stop(pool: Path, deadline_s: float) -> bool:
    """Have the agent end, and wait until it has; False where none listens. Raises PoolError where it does not."""
    with _visit(pool) as (connection, _):
        if connection is None:
            return False
        connection.sendall(messages.frame(messages.Stop()))
        connection.settimeout(deadline_s)
        try:
            while connection.recv(1 << 16):
                pass
        except TimeoutError:
            raise PoolError(
                f"the agent of pool {pool} has not ended within {deadline_s:g} s: end its process by its number, which "
                "`mooncake-connector agent --status` or `store stats` shows"
            ) from None
    return True


def ask_to_forget(pool: Path) -> bool:
    """Have the agent look for marks of namespaces that the tiers shall forget; False where none listens."""
    with _visit(pool) as (connection, _):
        if connection is None:
            return False
        connection.sendall(messages.frame(messages.Forget()))
    return True


@contextmanager
def _visit(pool: Path) -> Iterator[tuple[socket.socket | None, Frames]]:
    frames = Frames()
    try:
        connection = sockets.connect(pool, _ANSWER_S)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        yield None, frames
        return
    except (OSError, sockets.Stranger) as error:
        raise PoolError(f"the agent of pool {pool} cannot be reached: {error}") from None
    try:
        connection.sendall(messages.frame(messages.Hello(messages.VERSION, __version__, person=True)))
        answer = hear(connection, frames)
        if isinstance(answer, messages.Refused):
            raise PoolError(f"the agent of pool {pool} refuses: {answer.reason}")
        yield connection, frames
    except (OSError, Junk) as error:
        raise PoolError(
            f"the agent of pool {pool} does not answer: {error or type(error).__name__}; its process may be stopped"
        ) from None
    finally:
        sockets.close(connection)


def hear(connection: socket.socket, frames: Frames) -> messages.Outbound:
    """The next message that comes, within some seconds. Raises OSError, Junk."""
    give_up_s = time.monotonic() + _ANSWER_S
    while (body := frames.take()) is None:
        if time.monotonic() > give_up_s:
            raise TimeoutError("it takes too long")
        data = connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError("it hung up")
        frames.feed(data)
    return messages.read_outbound(body)
