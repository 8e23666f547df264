"""Through which files of ours a page goes, from a request to the stored page or to the other instance: a count.

    .venvs/vllm/bin/python tests/tools/files_passed.py

Runs one test of tests/vllm for each way, with vLLM's own scheduler and our connector, and lists the files of which a
function or method was called between the first request and the end of the last, in any thread. Start-up is left out,
and what is only imported. A file counts once, however small its part.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

PACKAGES = ("mooncake_connector", "store_client", "transfer", "vllm_plugin", "sglang_backend")
WAYS = {
    "from a request to a stored page, and back": (
        "test_reuse.py::test_another_engine_loads_what_the_first_one_computed[v1]", "harness", "Engine", "check"),
    "from one layer to the other instance": (
        "test_pd.py::test_decode_goes_on_with_what_prefill_computed[layer-concurrent-v1]", "pd", "Pair", "ask"),
}  # fmt: skip


class Recorder:
    """Notes whose functions are called while a request is under way."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._is_on = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self._is_on and event == "call":
            self.files.add(frame.f_code.co_filename)

    def during(self, kind: Any, name: str) -> None:
        """Record in each call of the method `name`."""
        original = getattr(kind, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self._is_on = True
            try:
                return original(*args, **kwargs)
            finally:
                self._is_on = False

        setattr(kind, name, recorded)


def files_of(test: str, module: str, kind: str, method: str) -> list[str]:
    recorder = Recorder()

    class Plugin:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            recorder.during(getattr(sys.modules[module], kind), method)

        def pytest_runtest_setup(self, item: pytest.Item) -> None:
            threading.setprofile(recorder)
            sys.setprofile(recorder)

        def pytest_runtest_teardown(self, item: pytest.Item) -> None:
            threading.setprofile(None)  # type: ignore[arg-type]
            sys.setprofile(None)

    where = Path(__file__).parents[1] / "vllm"
    if pytest.main(["-q", "-p", "no:cacheprovider", str(where / test)], plugins=[Plugin()]) != 0:
        raise SystemExit(f"{test} failed, so nothing was counted")
    found = {"/".join(parts[i:]) for file in recorder.files for parts in [Path(file).parts]
             for i, part in enumerate(parts) if part in PACKAGES and "site-packages" not in parts[i + 1 :]}  # fmt: skip
    return sorted(found)


def main() -> None:
    for way, where in WAYS.items():
        files = files_of(*where)
        print(f"\n{way}: {len(files)} files")
        print("\n".join(f"    {file}" for file in files))


if __name__ == "__main__":
    main()
