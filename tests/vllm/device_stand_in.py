"""A worker whose device path is real but for the device: the driver is a stand-in, and so may the kernels be.

Triton's interpreter runs the kernels themselves, in milliseconds for each page. Where a test is about what comes before
and after them, numpy and xxhash do the same work: that they do is what `test_device_kernel`, `test_device_digests` and
the tests of the pipe that have the interpreter show.

"Device memory" is the processor's, so the pretended model runner finds there what loads left. What is given to a stream
is done when the stream is waited for and not before, as late as a device may be: what is published, given back or freed
before its stream has come to an end is found wrong by the model runner, or refused by the stand-in.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from harness import PATIENCE_S
from simulated.cuda_driver import Library

import vllm_plugin.device
import vllm_plugin.kv_memory
from transfer.transports.cuda.driver import Driver
from vllm_plugin.device.page_locks import PageLocks
from vllm_plugin.device.permutation import Permutation


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


def kernels_by_numpy() -> Any:
    """In place of the modules of the kernels: what they are asked for, done by the processor."""
    from vllm_plugin.device import digests

    own = SimpleNamespace(
        prepare=lambda: _digest,
        constants=digests.constants,
        can_digest=digests.can_digest,
        sums_nbytes=digests.sums_nbytes,
    )
    return SimpleNamespace(prepare=_prepare, digests=own)


def _memory(address: int, dtype: type[np.generic], *shape: int, strides: tuple[int, ...] | None = None) -> Any:
    itemsize = np.dtype(dtype).itemsize
    if strides is None:
        strides = tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    nbytes = itemsize + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return np.ndarray(shape, dtype, (ctypes.c_uint8 * nbytes).from_address(address), strides=strides)


def _prepare(permutation: Permutation, *, into_blocks: bool) -> Callable[[int, int, int, int], None]:
    def start(runs: int, num_runs: int, layers: int, stream: int) -> None:
        if not num_runs:
            return
        addresses = _memory(layers, np.int64, permutation.num_layers).tolist()
        for page, page_token, count, block, block_token in _memory(runs, np.int64, 5, num_runs).T.tolist():
            for layer, address in enumerate(addresses):
                for one in permutation.segments:
                    shape = count, permutation.num_heads, one.nbytes
                    here = page + one.page_offset + layer * one.page_layer + page_token * one.page_token
                    there = address + one.block_offset + block * permutation.block_stride
                    there += block_token * one.block_token
                    in_page = _memory(here, np.uint8, *shape, strides=(one.page_token, one.page_head, 1))
                    in_block = _memory(there, np.uint8, *shape, strides=(one.block_token, permutation.head_stride, 1))
                    target, source = (in_block, in_page) if into_blocks else (in_page, in_block)
                    target[:] = source

    return start


def _digest(pages: int, num_pages: int, nbytes: int, sums_offset: int, table: int, digests: int, stream: int) -> None:
    for number, address in enumerate(_memory(pages, np.int64, num_pages).tolist()):
        digest = xxhash.xxh3_64_intdigest(_memory(address, np.uint8, nbytes).data)
        _memory(digests, np.uint64, num_pages)[number] = digest


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
