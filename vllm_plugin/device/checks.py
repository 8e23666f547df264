"""What `mooncake-connector doctor vllm` says of devices: whether a pool's memory can be page-locked for them, and
whether vLLM starts with torch's allocator as it is set."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np

from mooncake_connector.checks import Check, ok, warning
from mooncake_connector.sizes import human_nbytes
from transfer.transports.base import Unavailable
from transfer.transports.cuda.driver import system_driver
from vllm_plugin.device.page_locks import MEND, limit

_NAME = "page locks"
_TRIED_NBYTES = 64 << 20
"""More than the usual default of the limit."""


_ALLOCATOR, _SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"


def check_allocator() -> Iterator[Check]:
    """vLLM refuses torch's expandable segments beside any connector, as it may pin memory that they move."""
    if _SEGMENTS in os.environ.get(_ALLOCATOR, ""):
        yield warning(
            "allocator",
            f"{_ALLOCATOR} has {_SEGMENTS}, with which vLLM starts no KV connector: unset it, or start vLLM with "
            "--enable-cumem-allocator, whose memory may go, so that pages are copied aside before they are stored",
        )


def check_page_locks() -> Iterator[Check]:
    """Try to lock shared memory as the pool's would be. Nothing where there is no CUDA device."""
    try:
        driver = system_driver()
    except Unavailable:
        return
    memory = np.frombuffer(mmap.mmap(-1, _TRIED_NBYTES), dtype=np.uint8)
    address = memory.ctypes.data
    try:
        driver.register(0, address, _TRIED_NBYTES)
        driver.unregister(0, address)
    except Unavailable as error:
        yield warning(
            _NAME,
            f"the driver locks no {human_nbytes(_TRIED_NBYTES)} ({error}), so each page is copied once more on its way "
            f"between pool and device. The limit of locked memory is {limit()}; where it is in the way, {MEND}. A "
            "device in use by others may also be out of memory, and some sandboxes forbid it",
        )
        return
    yield ok(_NAME, f"the driver locks shared memory, so devices copy pages by themselves (limit: {limit()})")
