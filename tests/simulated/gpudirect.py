"""Cards that reach memory of devices by themselves: the stand-ins of both together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from simulated.cuda_driver import LIBRARY
from simulated.verbs import Fabric

from transfer.transports.cuda import direct
from transfer.transports.cuda.driver import DMA_BUF_SUPPORTED

FAST = 1e12


def num_descriptors() -> int:
    """Open ones of dma-bufs."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            count += "dmabuf" in os.readlink(f"/proc/self/fd/{name}")
    return count


@contextmanager
def cards_and_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fabric]:
    """Two cards; the device's writes need a flush, and the kernel has no nvidia_peermem."""
    LIBRARY.__init__()
    LIBRARY.attributes[DMA_BUF_SUPPORTED] = 1
    monkeypatch.setattr(direct, "PEER_MEMORY", tmp_path / "nvidia_peermem")
    fabric = Fabric(monkeypatch, [FAST, FAST])
    yield fabric
    fabric.close()
    assert not LIBRARY.contexts and not LIBRARY.locked and not LIBRARY.slabs and not LIBRARY._queues
    assert not LIBRARY.on_their_way, "a grant ended while bytes for it were on their way"
    assert num_descriptors() == 0, "whoever registers a dma-buf closes its descriptor"
