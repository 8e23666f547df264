"""What cards and CUDA's driver are asked so that cards reach memory of devices, and what `doctor` says of it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated.cuda_driver import LIBRARY, SealedBuffer
from simulated.verbs import Fabric

from mooncake_connector.cli import doctor_rdma
from mooncake_connector.config.schema import Config
from transfer.testing.memory import int64
from transfer.transports.base import Region, Unavailable
from transfer.transports.cuda.direct import whole_pages
from transfer.transports.cuda.driver import DMA_BUF_SUPPORTED, CudaError, Driver, system_driver
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.rdma.gpudirect import DeviceRegions
from transfer.transports.rdma.opened import OpenRails
from transfer.transports.rdma.settings import RdmaSettings

pytestmark = pytest.mark.usefixtures("stand_ins")


@given(st.integers(0, 1 << 46), st.integers(1, 1 << 40), st.sampled_from([4096, 16384, 65536]))
def test_the_pages_of_a_region_hold_it_and_none_of_them_is_without_it(address: int, nbytes: int, page: int) -> None:
    start, size = whole_pages(Region(address, nbytes), page)
    assert start % page == size % page == 0
    assert start <= address < start + page
    assert start + size - page < address + nbytes <= start + size


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=8), st.integers(0, 50), st.integers(1, 9))
def test_pieces_are_direct_where_one_registered_region_holds_each(
    wanted: list[tuple[int, int]], place: int, nbytes: int
) -> None:
    regions = DeviceRegions.__new__(DeviceRegions)
    apart: list[Region] = []
    for start, size in wanted:
        if all(start + size <= one.address or one.address + one.nbytes <= start for one in apart):
            apart.append(Region(start, size))
    regions._set(apart)
    inside = any(one.address <= place and place + nbytes <= one.address + one.nbytes for one in apart)
    for columns in (([place], [nbytes]), (int64(place), int64(nbytes))):
        assert regions.cover(*columns) is inside
        assert regions.cover_first(*columns) is inside


@pytest.mark.parametrize("lacks", ["", "dma-buf", "way", "driver", "off"])
def test_doctor_says_what_cards_do_with_each_gpu(
    monkeypatch: pytest.MonkeyPatch, stand_ins: Fabric, lacks: str
) -> None:
    def driver() -> Driver:
        if lacks == "driver":
            raise Unavailable("no CUDA driver")
        return Driver(LIBRARY)

    monkeypatch.setattr(doctor_rdma, "system_driver", driver)
    LIBRARY.attributes[DMA_BUF_SUPPORTED] = int(lacks != "dma-buf")
    stand_ins.cards["card1"].reaches_devices = lacks != "way"
    settings = RdmaSettings.configured(Config(rdma_gpudirect="off" if lacks == "off" else "auto"))
    found = [check for check in doctor_rdma.rdma_checks(["10.77.0.1"], settings) if check.name.startswith("GPU")]
    if lacks == "driver":
        assert not found
        return
    assert [check.name for check in found] == ["GPU 0", "GPU 1"]
    says = {
        "": "cards read and fill its memory by themselves (dma-buf, by memory windows); tried with card0, card1",
        "dma-buf": "goes through page-locked stages: the driver exports no dma-buf",
        "way": "goes through page-locked stages: dma-buf: card1 does not reach GPU 0: remote operation error",
        "off": "goes through page-locked stages: rdma_gpudirect is off",
    }[lacks]
    assert says in found[0].detail and found[0].status == ("ok" if lacks in ("", "off") else "warning")


def test_a_driver_older_than_gpudirect_serves_through_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        """The stand-in as a library that is loaded, without what came later."""

        def __getattr__(self, name: str) -> Any:
            if name in ("cuMemGetHandleForAddressRange", "cuFlushGPUDirectRDMAWrites"):
                raise AttributeError(name)
            return getattr(LIBRARY, name)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Old())
    driver = system_driver.__wrapped__()
    assert driver.num_devices == 2
    with pytest.raises(CudaError, match="too old: it has no cuMemGetHandleForAddressRange"):
        driver.export_dma_buf(0, 0, mmap.PAGESIZE)
    with pytest.raises(CudaError, match="too old"):
        driver.flush_writes(0)


@pytest.mark.parametrize("asks", [True, False])
def test_cards_are_chosen_for_a_gpu_where_they_reach_it_by_themselves(
    monkeypatch: pytest.MonkeyPatch, stand_ins: Fabric, asks: bool
) -> None:
    asked: list[str] = []

    def links(address: str) -> dict[str, int]:
        asked.append(address)
        return {"card1": 4, "card0": 6}

    monkeypatch.setattr("transfer.transports.rdma.opened.links_to", links)
    settings = RdmaSettings.configured(Config(rdma_gpudirect="auto" if asks else "off"))
    with contextlib.closing(OpenRails(["10.77.0.1"], settings, OnDevice(Driver(LIBRARY), 1))) as opened:
        names = [rail.card.rail.device for rail in opened.all]
    assert (asked, names) == ((["0001:17:00.0"], ["card1"]) if asks else ([], ["card0", "card1"]))
    LIBRARY.fail["cuDeviceGetAttribute"] = 0
    with contextlib.closing(OpenRails(["10.77.0.1"], settings, OnDevice(Driver(LIBRARY), 1))) as opened:
        assert [rail.card.rail.device for rail in opened.all] == ["card0", "card1"]


def test_a_page_of_the_host_is_what_the_driver_is_asked_for() -> None:
    """It refuses others."""
    driver, buffer = Driver(LIBRARY), SealedBuffer(3 * mmap.PAGESIZE)
    with pytest.raises(Unavailable):
        driver.export_dma_buf(0, buffer.address + 1, mmap.PAGESIZE)
    with pytest.raises(Unavailable):
        driver.export_dma_buf(0, buffer.address, 4 * mmap.PAGESIZE)
    os.close(driver.export_dma_buf(0, buffer.address + mmap.PAGESIZE, mmap.PAGESIZE))
