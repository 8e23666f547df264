"""What all tests share: they run against the installed wheel, and never see the working tree's packages."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from long_form import examples

# Property tests judge results, never how long a busy machine takes for one. Each run draws other examples.
settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=examples(100)
)
settings.load_profile("unhurried")

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mooncake_connector", "store_client", "transfer", "vllm_plugin", "sglang_backend")
# Folder of tests, and the engine that must be installed beside them. Those of e2e start servers in every environment.
ENGINE_OF = {"vllm": "vllm", "sglang": "sglang", "e2e": "vllm"}

collect_ignore: list[str] = []
for folder, engine in ENGINE_OF.items():
    spec = importlib.util.find_spec(engine)
    if spec is None or spec.origin is None:
        collect_ignore.append(folder)
        # `tests` is on sys.path, so `import vllm` would find the folder tests/vllm where the engine is not installed.
        sys.modules[engine] = None  # type: ignore[assignment]


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
    """Everything in those folders needs an engine, and what takes examples takes more in the long form."""
    for item in items:
        if ENGINE_OF.keys() & set(item.path.relative_to(ROOT / "tests").parts[:1]):
            item.add_marker(pytest.mark.engine)
        if is_hypothesis_test(getattr(item, "function", None)):
            item.add_marker(pytest.mark.long)


@pytest.fixture
def pool() -> Iterator[Path]:
    """Name of a pool folder in shared memory that does not exist yet."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="mooncake-connector-test-"))
    yield folder / "pool"
    shutil.rmtree(folder, ignore_errors=True)
