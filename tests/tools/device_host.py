"""What the host does for each page that a device loads or saves, over a stand-in for the driver and the kernels.

    PYTHONPATH=tests .venvs/vllm/bin/python tests/tools/device_host.py [rounds] [GB/s of the link]

Jobs are those of a worker of vLLM, the pool is a real one in /dev/shm, and nothing of a page is ever touched: calls of
the driver cost next to nothing. First the processor time of the jobs' thread for each page, then what a link that is
modelled beside them would have had to do of the time: copies take their turns on it, each way by itself, a stream's
work is done in order, and a kernel takes what it takes on an H200.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import vllm_plugin.device
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.kv.page import PageFormat
from store_client import EmbeddedStore
from store_client.jobs import Job
from store_client.sharded import ShardView
from transfer.transports.cuda.driver import Driver
from vllm_plugin.blocks import KVBlocks
from vllm_plugin.device.opening import Device
from vllm_plugin.device.page_locks import PageLocks
from vllm_plugin.messages import LoadJob, SaveJob
from vllm_plugin.prefix.saver import DeviceSave
from vllm_plugin.prefix.worker import BlockLoad

PAGE_TOKENS, BLOCK_TOKENS, HEAD_DIM = 64, 16, 128
LAYERS_AND_HEADS = {256 << 10: (8, 1), 1 << 20: (32, 1), 8 << 20: (32, 8)}
"""Of pages of bf16, by size: of Llama-3-8B with TP 1 and TP 8, and one rank of four layers' worth of it."""
JOB_NBYTES, POOL_NBYTES, SLAB_NBYTES = 1 << 30, 5 << 30, 128 << 20
_CHAIN_S, _LAUNCH_S, _MEMORY_RATE = 0.21e-3 / (8 << 20), 5e-6, 1.5e12
"""Of a digest's chain for each byte of a page, as measured on an H200; of a kernel that does nothing; and bytes that a
kernel reads and writes there in a second, about."""


class Library:
    """Has the driver's functions as attributes. `rate`: bytes a second of a link, each way; None: copies take none."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self._memory: list[Any] = []
        self._numbers = iter(range(1, 1 << 20))
        self._slab = 1 << 44
        self._links: dict[bool, float] = defaultdict(float)
        self._streams: dict[int, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = 1
        return 0

    def cuMemAlloc_v2(self, out: Any, nbytes: int) -> int:
        out._obj.value, self._slab = self._slab, self._slab + nbytes
        return 0

    def cuMemHostAlloc(self, out: Any, nbytes: int, flags: int) -> int:
        self._memory.append(np.zeros(nbytes, dtype=np.uint8))
        out._obj.value = self._memory[-1].ctypes.data
        return 0

    def cuStreamCreateWithPriority(self, out: Any, flags: int, priority: Any) -> int:
        out._obj.value = next(self._numbers)
        return 0

    def cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> int:
        if self.rate is not None:
            way = target >= 1 << 44
            begins = max(time.perf_counter(), self._streams[stream], self._links[way])
            self._streams[stream] = self._links[way] = begins + nbytes / self.rate
        return 0

    def work(self, stream: int, seconds: float) -> None:
        if self.rate is not None:
            self._streams[stream] = max(time.perf_counter(), self._streams[stream]) + seconds

    def cuStreamSynchronize(self, stream: int) -> int:
        if self.rate is not None:
            left_s = self._streams[stream] - time.perf_counter()
            if left_s > 1e-4:
                time.sleep(left_s - 1e-4)
            while time.perf_counter() < self._streams[stream]:
                pass
        return 0


def install(library: Library) -> None:
    """Kernels that take their time on a stream and do nothing."""

    def permute(permutation: Any, *, into_blocks: bool) -> Any:
        def start(runs: int, num_runs: int, layers: int, stream: int) -> None:
            each = sum(one.nbytes for one in permutation.segments) * permutation.num_heads * permutation.num_layers
            library.work(stream, _LAUNCH_S + 2 * each * BLOCK_TOKENS * num_runs / _MEMORY_RATE)

        return start

    def digest() -> Any:
        def start(pages: int, num_pages: int, nbytes: int, *rest: int) -> None:
            library.work(rest[-1], 2 * _LAUNCH_S + nbytes * num_pages / _MEMORY_RATE + nbytes * _CHAIN_S)

        return start

    from vllm_plugin.device import digests

    taken = {name: getattr(digests, name) for name in ("constants", "can_digest", "sums_nbytes")}
    for name, module in (("kernel", {"prepare": permute}), ("digests", {"prepare": digest, **taken})):
        sys.modules[f"vllm_plugin.device.{name}"] = SimpleNamespace(**module)  # type: ignore[assignment]
        setattr(vllm_plugin.device, name, sys.modules[f"vllm_plugin.device.{name}"])


class Worker:
    """Jobs of one rank of a model whose pages have `nbytes`."""

    def __init__(self, store: EmbeddedStore, library: Library, nbytes: int) -> None:
        layers, heads = LAYERS_AND_HEADS[nbytes]
        self.fmt = fmt = PageFormat(layers, PAGE_TOKENS, heads, HEAD_DIM, HEAD_DIM, 2)
        assert fmt.nbytes == nbytes
        self.count = JOB_NBYTES // nbytes
        shape = layers, self.count * PAGE_TOKENS // BLOCK_TOKENS, BLOCK_TOKENS, heads, 2 * HEAD_DIM
        memory = torch.empty(shape, dtype=torch.bfloat16)
        blocks = KVBlocks(list(memory.permute(0, 1, 3, 2, 4)), fmt.whole, fmt, None)
        locks = PageLocks(Driver(library), 0)
        self.device = Device(torch.device("cpu"), locks, SLAB_NBYTES, nbytes)
        self.pages = self.device.pages(blocks, fmt.whole, fmt)
        assert self.pages is not None
        locks.lock(4096, (1 << 47) - 4096)  # whatever there is
        self.memory: Any = SimpleNamespace(fmt=fmt, is_writer=True, group=SimpleNamespace(block_tokens=BLOCK_TOKENS))
        self.table = np.random.default_rng(1).permutation(self.count * PAGE_TOKENS // BLOCK_TOKENS).tolist()
        self.keys = [hashlib.sha256(f"{nbytes}/{number}".encode()).digest() for number in range(self.count)]
        namespace = Namespace(
            model_name=str(nbytes), model_digest=str(nbytes), kv_dtype="bfloat16", num_layers=layers,
            num_kv_heads=heads, head_dim=HEAD_DIM, page_tokens=PAGE_TOKENS,
        )  # fmt: skip
        self.view = ShardView(store, namespace, fmt.whole, fmt.unit_nbytes)

    def save(self) -> Job:
        pages = self.pages
        assert pages is not None
        plan = SaveJob(1, self.keys, None, 0, self.table, True)
        return DeviceSave(
            keys=self.keys, parent=None, view=lambda: self.view, deadline_s=60.0, copy=print, plan=plan,
            memory=self.memory, device_pages=pages,
        )  # fmt: skip

    def load(self) -> Job:
        pages = self.pages
        assert pages is not None

        def copy(number: int, part: Any, page: Any) -> None:
            pages.load_page(part, plan.block_ids, plan.first_token + number * PAGE_TOKENS, page, 0)

        plan = LoadJob("r", self.keys, 0, 0, self.table)
        return BlockLoad(
            keys=self.keys, view=lambda: self.view, deadline_s=60.0, copy=copy, settle=pages.settle_loads, plan=plan
        )


def took(job: Job) -> tuple[float, float]:
    """Seconds, and those of this thread's processor time."""
    began_s, thread_s = time.perf_counter(), time.thread_time()
    while (cause := job.run()) is None:
        pass
    assert not cause and job.pages == len(job.keys), cause
    return time.perf_counter() - began_s, time.thread_time() - thread_s


def measured(worker: Worker, rounds: int) -> dict[str, list[tuple[float, float]]]:
    figures: dict[str, list[tuple[float, float]]] = {"save": [], "load": []}
    for _ in range(rounds + 1):
        worker.view.own.clear()
        for way, make in (("save", worker.save), ("load", worker.load)):
            figures[way].append(took(make()))
    return {way: each[1:] for way, each in figures.items()}


def main(rounds: int, rate: float) -> None:
    library = Library()
    install(library)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = EmbeddedStore(Path(folder) / "pool", capacity_nbytes=POOL_NBYTES)
        for nbytes in LAYERS_AND_HEADS:
            worker = Worker(store, library, nbytes)
            library.rate = None
            for way, each in measured(worker, rounds).items():
                us = sorted(1e6 * thread_s / worker.count for _, thread_s in each)
                print(f"{nbytes >> 10} KiB, {way}: {statistics.median(us):.1f} us a page ({us[0]:.1f} to {us[-1]:.1f})")
            library.rate = rate * 1e9
            for way, each in measured(worker, rounds).items():
                of = sorted(JOB_NBYTES / (seconds * library.rate) for seconds, _ in each)
                reached = f"{statistics.median(of):.2f} of the link ({of[0]:.2f} to {of[-1]:.2f})"
                print(f"{nbytes >> 10} KiB, {way}: {reached}")
            worker.view.own.clear()
        store.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, float(sys.argv[2]) if len(sys.argv) > 2 else 54.0)
