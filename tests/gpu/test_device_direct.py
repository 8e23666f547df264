"""Memory of a GPU for cards: what the real driver offers. What cards make of it, `doctor rdma` says."""

from __future__ import annotations

import os

import pytest
from gpu.device import DEVICE, require

from transfer.transports.base import Region, Unavailable
from transfer.transports.cuda.direct import DMA_BUF, DirectMemory
from transfer.transports.cuda.driver import system_driver
from transfer.transports.cuda.stage import OnDevice

require()
pytestmark = pytest.mark.gpu


def test_the_driver_exports_pages_of_its_memory_as_a_dma_buf() -> None:
    driver = system_driver()
    try:
        memory = DirectMemory(OnDevice(driver, DEVICE))
    except Unavailable as error:
        pytest.skip(f"NO GPUDIRECT here, so this was not tried: {error}")
    memory.settle()
    if DMA_BUF not in memory.ways:
        pytest.skip("NO DMA-BUF here, so this was not tried")
    address = driver.allocate(DEVICE, 4 << 20)
    try:
        region = Region(address + 77, 5000)
        memory.check(region)
        with memory.exported(region) as (descriptor, offset):
            assert "dmabuf" in os.readlink(f"/proc/self/fd/{descriptor}") and offset == region.address % 4096
    finally:
        driver.free(DEVICE, address)
