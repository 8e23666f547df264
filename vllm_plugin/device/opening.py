"""The device path of a worker: a slab of the device's memory, pipes through it, and kernels for its blocks.

Opened where the KV cache is on a CUDA device. Where anything is missing (driver, Triton, memory, a layout that a kernel
can be made for) pages go the slow way through host memory, and one line of the log says so.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import PageFormat
from mooncake_connector.log import get_logger, log_once
from transfer.transports.base import Unavailable
from transfer.transports.cuda.driver import CudaError, system_driver
from vllm_plugin.blocks import KVBlocks
from vllm_plugin.device.page_locks import PageLocks
from vllm_plugin.device.pages import DevicePages
from vllm_plugin.device.permutation import Permutation
from vllm_plugin.device.pipe import Digester, Permuter, Pipe, aligned, lanes_for

if TYPE_CHECKING:
    from vllm_plugin.device import digests
    from vllm_plugin.device.kernel import Start

logger = get_logger(__name__)

_WAYS = 2
_locks: list[PageLocks] = []
"""Of this process: memory is locked once, for all its devices."""


def locks_for(where: torch.device) -> PageLocks | None:
    """What page-locks memory for a device; None where it is none of CUDA's. Called by the engine's thread."""
    if where.type != "cuda":
        return None
    try:
        if not _locks:
            _locks.append(PageLocks(system_driver(), where.index or 0))
        return _locks[0]
    except Unavailable as error:  # ROCm's devices have this type as well
        said = "pages go between %s and the pool by way of host memory: %s"
        log_once("vllm.device", said, where, error, logger=logger)
        return None


class Device:
    """See the module. Opened by the engine's thread, and then for the worker's movers.

    Args:
        where: the device that the blocks are on.
        locks: what the driver has locked of the pool's memory.
        slab_nbytes: of device memory for pages; more where four of the largest of this rank need it.
        page_nbytes, whole_nbytes: of the largest pages of this rank's shard, and of the whole model, some of which
            other shards may have.

    Raises:
        CudaError: the driver has no more memory, or streams.
    """

    def __init__(
        self, where: torch.device, locks: PageLocks, slab_nbytes: int, page_nbytes: int, whole_nbytes: int = 0
    ) -> None:
        self._where, self._driver, self._ordinal = where, locks.driver, where.index or 0
        loads = lanes_for(slab_nbytes // _WAYS, page_nbytes, whole_nbytes)
        saves = lanes_for(slab_nbytes // _WAYS, page_nbytes)  # of this rank's own shard
        slab = self._driver.allocate(self._ordinal, math.prod(loads) + math.prod(saves))
        self._memory = [slab]
        self._starts: dict[tuple[Permutation, int, bool], Start] = {}
        self._digests: tuple[digests.Start, int] | None = None
        """Compiled, and where their constants are; None where the device takes none."""
        self._tried_digests = False
        self._compiling = threading.Lock()
        with contextlib.ExitStack() as undone:
            undone.callback(self._driver.free, self._ordinal, slab)
            self.loads = Pipe(self._driver, self._ordinal, slab, loads, locks, into_blocks=True)
            undone.callback(self.loads.close)
            behind = slab + math.prod(loads)
            self.saves = Pipe(self._driver, self._ordinal, behind, saves, locks, into_blocks=False)
            undone.pop_all()

    def pages(self, blocks: KVBlocks, shard: Shard, fmt: PageFormat) -> DevicePages | None:
        """Of one group, its kernels compiled, which takes a second where no former process did.

        None where no kernel can be made for its blocks.
        """
        try:
            return DevicePages(blocks, shard, fmt, self.loads, self.saves, self.prepare)
        except Exception as error:  # Triton has a compiler, a cache and tools of its own
            said = "pages go between the device and the pool by way of host memory, without a kernel: %s"
            log_once("vllm.device.kernel", said, error, logger=logger, exc_info=True)
            return None

    def prepare(self, permutation: Permutation, page_nbytes: int, into_blocks: bool) -> Permuter:
        """How pages get into blocks, or out of them, by kernels that are compiled once for all of this form."""
        from vllm_plugin.device import digests, kernel

        form = replace(permutation, layer_addresses=()), permutation.num_layers, into_blocks
        with self._compiling:
            if form not in self._starts:
                with self._current():
                    self._starts[form] = kernel.prepare(permutation, into_blocks=into_blocks)
            digester = self._digester(page_nbytes)
        place_nbytes = aligned(page_nbytes) + (0 if digester is None else aligned(digests.sums_nbytes(page_nbytes)))
        layers = np.array(permutation.layer_addresses, dtype=np.int64)
        return Permuter(self._starts[form], layers, digester, place_nbytes)

    def _digester(self, page_nbytes: int) -> Digester | None:
        from vllm_plugin.device import digests

        if not self._tried_digests:
            self._tried_digests = True
            try:
                with self._current():
                    start = digests.prepare()
                self._digests = start, self._kept(digests.constants().tobytes())
            except Exception as error:  # Triton has a compiler, a cache and tools of its own
                said = "the device takes no checksums, so processors do, which is slower: %s"
                log_once("vllm.device.digests", said, error, logger=logger, exc_info=True)
        if self._digests is None or not digests.can_digest(page_nbytes):
            return None
        return Digester(*self._digests, page_nbytes)

    def _kept(self, content: bytes) -> int:
        """Where it is in device memory, until this is closed."""
        address = self._driver.allocate(self._ordinal, len(content))
        self._memory.append(address)
        self._driver.write(self._ordinal, address, content)
        return address

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Let this thread work on the device, and Triton compile for it."""
        if self._where.type != "cpu":
            torch.accelerator.set_device_index(self._where)
        with self._driver.on(self._ordinal):
            yield

    def close(self) -> None:
        """Touch no memory of the engine from now on, and give the device's back. Called once."""
        if all([self.loads.close(), self.saves.close()]):  # both, whatever the first one says
            with contextlib.suppress(CudaError):  # of a device that has failed
                for address in self._memory:
                    self._driver.free(self._ordinal, address)


def open_device(
    where: torch.device, locks: PageLocks, slab_nbytes: int, page_nbytes: int, whole_nbytes: int = 0
) -> Device | None:
    """As `Device`; None where the device has no room for it."""
    try:
        return Device(where, locks, slab_nbytes, page_nbytes, whole_nbytes)
    except Unavailable as error:
        log_once(
            "vllm.device", "pages go between %s and the pool by way of host memory, which is slow: %s; leave more "
            "memory to others (`--gpu-memory-utilization`) or set a smaller `device_slab`", where, error, logger=logger,
        )  # fmt: skip
        return None
