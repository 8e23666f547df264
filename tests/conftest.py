"""What all tests share: they run against the installed wheel, and never see the working tree's packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mooncake_connector", "store_client", "vllm_plugin")

collect_ignore: list[str] = []
if importlib.util.find_spec("torch") is None:
    collect_ignore += ["vllm", "e2e"]  # they need the engine: .venvs/vllm has it
    # `tests` is on sys.path, so `import vllm` would find the folder tests/vllm where the engine is not installed.
    sys.modules["vllm"] = None  # type: ignore[assignment]


def pytest_sessionstart() -> None:
    """Refuse to test the source tree: a file that the wheel forgets would go unnoticed."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin is None:
            raise pytest.UsageError(f"{name} is not installed here; `make setup` builds the wheel and installs it")
        if origin.parent.parent == ROOT:
            raise pytest.UsageError(f"{name} comes from the working tree ({origin}); use `make test-fast`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under tests/vllm and tests/e2e needs the engine."""
    for item in items:
        if {"vllm", "e2e"} & set(item.path.relative_to(ROOT / "tests").parts[:1]):
            item.add_marker(pytest.mark.engine)
