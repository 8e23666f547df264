"""In place of Triton's driver: kernels are compiled for an H100, and then only noted."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import triton


class Loaded:
    """In place of Triton's driver, for an H100: notes what is loaded, and what Triton's launcher launches."""

    def __init__(self) -> None:
        from triton.backends.nvidia import driver

        self.loaded: list[str] = []
        self.launched: list[tuple[Any, ...]] = []
        self.launcher_cls = driver.CudaLauncher
        self.utils = SimpleNamespace(
            load_binary=self._load,
            launch=lambda *arguments: self.launched.append(arguments),
            get_device_properties=lambda device: {"max_shared_mem": 228 << 10},
            build_signature_metadata=tuple,
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def _load(self, name: str, binary: bytes, *rest: Any) -> tuple[Any, ...]:
        assert binary[:4] == b"\x7fELF"
        self.loaded.append(name)
        return 1, 77, 32, 0, 1024


@contextmanager
def loaded_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loaded]:
    """What is loaded and launched meanwhile."""
    from triton.backends.nvidia import driver

    stand_in = Loaded()
    monkeypatch.setattr(triton.runtime.driver, "_active", stand_in)
    monkeypatch.setattr(driver, "PyKernelArg", lambda nested_tuple, type: (nested_tuple, type), raising=False)
    monkeypatch.setattr(driver, "ARG_TUPLE", 2, raising=False)
    yield stand_in
    loaded = [one for one in gc.get_objects() if type(one) is triton.compiler.CompiledKernel]
    assert loaded
    for one in loaded:  # it outlives a test in Triton's caches, and would be unloaded by a driver that nobody has
        one.module = None
