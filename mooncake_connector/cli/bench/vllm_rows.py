"""The rows that need vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mooncake_connector.cli.bench.mooncake_peer import Install
from mooncake_connector.cli.bench.report import Row


@dataclass(frozen=True)
class Engine:
    """A vLLM environment and the model to serve in it."""

    python: Path
    model: Path


def version(engine: Engine) -> str | None:
    return None


def measure(engine: Engine, peer: Install | None, folder: Path, progress: Callable[[str], None]) -> list[Row]:
    return []
