"""A worker whose device path is real but for the device: the driver is a stand-in, the kernel runs in an interpreter.

"Device memory" is the processor's, so the pretended model runner finds there what loads left. What is given to a stream
is done when the stream is waited for and not before, as late as a device may be: what is published, given back or freed
before its stream has come to an end is found wrong by the model runner, or refused by the stand-in.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from harness import PATIENCE_S
from simulated.cuda_driver import Library

import vllm_plugin.device
import vllm_plugin.kv_memory
from transfer.transports.cuda.driver import Driver
from vllm_plugin.device.page_locks import PageLocks


def interpreted_kernel() -> Any:
    """The modules of the kernels, decorated for Triton's interpreter."""
    names = [f"vllm_plugin.device.{name}" for name in ("kernel", "digests")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        kernel, digests = map(importlib.import_module, names)
        for name in names:
            patch.delitem(sys.modules, name)
    kernel.digests = digests
    return kernel


class StandIn:
    """The device of all workers of a test.

    Args:
        library: the driver's, with its faults and counts.
        launched: launches of the kernel, each whether into blocks, and how many runs.
    """

    def __init__(self, kernel: Any) -> None:
        self.library = Library()
        self.launched: list[tuple[bool, int]] = []
        self.idle = False
        """Whether the kernel does nothing."""
        self.starts: int | None = None
        """So many more launches, then one that Triton refuses; None: all."""
        self.undigested: set[int] = set()
        """Sizes of pages that it does not digest."""
        self.prepared_digests = 0
        """How often their kernels were compiled."""
        self.waits = threading.Event()
        """Set when somebody waits for what is held."""
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._held: bool | None = None
        self._kernel, self._interpreter = kernel, threading.Lock()  # which is for one thread at a time
        self._locks = PageLocks(Driver(self.library), 0)

    def hold(self, *, into_blocks: bool) -> None:
        """Let the next kernel that goes this way not begin until `release`."""
        self._held = into_blocks
        self._goes_on.clear()

    def release(self) -> None:
        self._held = None
        self._goes_on.set()

    def locks_for(self, where: Any) -> PageLocks:
        return self._locks

    def prepare(self, permutation: Any, *, into_blocks: bool) -> Any:
        start = self._kernel.prepare(permutation, into_blocks=into_blocks)

        def queue(runs: int, num_runs: int, layers: int, stream: int) -> None:
            def launch() -> int:
                if self._held == into_blocks:
                    self.waits.set()
                    assert self._goes_on.wait(PATIENCE_S)
                self.launched.append((into_blocks, num_runs))
                if not self.idle:
                    with self._interpreter:
                        start(runs, num_runs, layers, 0)
                return 0

            if self.starts is not None:
                self.starts -= 1
                if self.starts < 0:
                    self.starts = None
                    raise RuntimeError("Triton Error [CUDA]: out of memory")
            self.library.launch(stream, launch)

        return queue

    def prepare_digests(self) -> Any:
        start = self._kernel.digests.prepare()
        self.prepared_digests += 1

        def queue(*arguments: int) -> None:
            *numbers, stream = arguments

            def launch() -> int:
                with self._interpreter:
                    start(*numbers, 0)
                return 0

            self.library.launch(stream, launch)

        return queue

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm_plugin.kv_memory, "locks_for", self.locks_for)
        real = self._kernel.digests
        digests = SimpleNamespace(
            prepare=self.prepare_digests,
            constants=real.constants,
            can_digest=lambda nbytes: nbytes not in self.undigested and real.can_digest(nbytes),
            sums_nbytes=real.sums_nbytes,
        )
        for name, module in (("kernel", SimpleNamespace(prepare=self.prepare)), ("digests", digests)):
            monkeypatch.setitem(sys.modules, f"vllm_plugin.device.{name}", module)
            monkeypatch.setattr(vllm_plugin.device, name, module, raising=False)
