"""Engines on hosts of their own that share a folder (the fixture `host`), and what their agents say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Engine

from store_client.agent.visit import ask_report

Host = Callable[..., Engine]


def shared_folder(path: Path) -> dict[str, Any]:
    """The settings of an engine whose pool has this folder behind it, and an agent in its process."""
    secret = path.parent / "secret"
    secret.write_bytes(b"0123456789abcdef" * 2)
    secret.chmod(0o600)
    path.mkdir(mode=0o700, exist_ok=True)
    tiers = [{"kind": "folder", "path": str(path), "timeout_s": 60.0}]
    return {"tiers": tiers, "agent": "embedded", "secret_file": str(secret), "lookup_wait_s": 60.0}


def client(engine: Engine) -> Any:
    """Of the agent, in the scheduler's process."""
    return engine.prefix._store.store._inner._client


def report(engine: Engine) -> dict[str, Any]:
    """What the agent of an engine's pool says of the folder."""
    said = ask_report(client(engine).pool)
    assert said is not None
    (tier,) = said["tiers"]
    return dict(tier)
