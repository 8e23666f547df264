"""The NIXL wheel of another Python, for vLLM's NixlConnector in an environment that does not have it."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mooncake_connector.cli.bench.measure import BenchError

_PROBE_LIMIT_S = 60.0
_INSTALL = "install it there with `pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1`, or name another --peer-python"


@contextlib.contextmanager
def overlay(python: str) -> Iterator[tuple[Path, str]]:
    """A folder with the wheel that `python` has, to be put on an engine's path, and its version. Raises BenchError."""
    probe = (
        "import importlib.metadata as m, pathlib, nixl\n"
        "print(pathlib.Path(nixl.__file__).parent.parent); print(m.version('nixl'))"
    )
    try:
        done = subprocess.run([python, "-c", probe], capture_output=True, text=True, timeout=_PROBE_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"cannot run the peer's Python {python}: {error}") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BenchError(f"{python} cannot import NIXL ({reason}): {_INSTALL}")
    packages, version = done.stdout.strip().splitlines()[-2:]
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder:
        for found in Path(packages).glob("*nixl*"):
            (Path(folder) / found.name).symlink_to(found)
        yield Path(folder), version
