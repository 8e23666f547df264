"""What a process that starts an agent tells it, over a pipe: settings hold what no list of processes should show."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mooncake_connector.config.schema import Config
from mooncake_connector.config.tiers import Tiers
from mooncake_connector.config.values import IpAddress, Nbytes

_MAX_NBYTES = 48 << 10
"""So that they fit into a pipe (64 KiB), and nobody waits for whoever reads them."""
_TOLD_S = 60.0
_FIELDS = (
    "eviction", "tiers", "agent", "agent_idle_s", "agent_metrics_port", "agent_http_port", "agent_http_host",
    "agent_http_token_file", "secret_file", "log_level",
)  # fmt: skip


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Args:
    pool: the folder.
    lock: number of the open file that is the agent's lock.
    idle_s: ends when nobody was connected for so long; None: only when told.
    config: what differs from the defaults, as in the engine's JSON.
    """

    pool: str
    lock: int
    idle_s: float | None
    config: dict[str, Any]


def dump_settings(pool: Path, lock: int, config: Config) -> bytes:
    """Raises ValueError for more than fits."""
    told = {name: value for name in _FIELDS if (value := getattr(config, name)) is not None}
    settings = Settings(str(pool), lock, config.agent_idle_s if config.agent == "auto" else None, told)
    text = msgspec.json.encode(settings, enc_hook=_plain)
    if len(text) > _MAX_NBYTES:
        raise ValueError(f"the agent's settings take {len(text)} bytes: expected at most {_MAX_NBYTES}")
    return text


def read_settings(fd: int) -> Settings:
    """All that comes until the other end is closed. Raises OSError, ValueError, msgspec.MsgspecError."""
    give_up_s = time.monotonic() + _TOLD_S
    text = b""
    while len(text) <= _MAX_NBYTES:
        readable, _, _ = select.select([fd], [], [], max(0.0, give_up_s - time.monotonic()))
        if not readable:
            raise TimeoutError(f"the settings did not come within {_TOLD_S:g} s")
        piece = os.read(fd, _MAX_NBYTES + 1)
        if not piece:
            break
        text += piece
    return msgspec.json.decode(text, type=Settings)


def _plain(value: Any) -> Any:
    if isinstance(value, Tiers):
        return list(value)
    if isinstance(value, IpAddress):
        return str(value)
    return int(value) if isinstance(value, Nbytes) else os.fspath(value)
