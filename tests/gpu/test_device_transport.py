"""What serves memory of a device does there what every transport must."""

import os
import subprocess
import sys

import numpy as np
import pytest
from gpu.device import STAND_IN, DeviceBuffer, DeviceCudaIpc, DeviceShm, DeviceTcp, allocate, require, windows_of

from transfer.testing.conformance import TransportConformance

require()
pytestmark = pytest.mark.gpu


def test_memory_in_expandable_segments_cannot_be_shared():
    """So `cuda_ipc` refuses it with that reason, and vLLM starts no connector with them."""
    assert windows_of(allocate(1 << 20), 1 << 20) == 1
    if STAND_IN:
        pytest.skip("the driver itself has to say so")
    said = "import torch; from gpu.device import windows_of; t = torch.zeros(64 << 20, device='cuda'); "
    said += "print(windows_of(t.data_ptr(), t.nbytes))"
    variables = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    found = subprocess.run([sys.executable, "-c", said], env=variables, capture_output=True, text=True, timeout=120)
    assert found.stdout == "0\n", found.stderr


class Large:
    """In place of `transfer.testing.memory.folded`: a device has no address space without memory."""

    def __init__(self, nbytes, fold, seed=None):
        self._buffer = DeviceBuffer(nbytes, seed)
        self.address, self.nbytes = self._buffer.address, nbytes

    content = property(lambda self: np.asarray(self._buffer.bytes))

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass


class DeviceConformance(TransportConformance):
    @pytest.mark.slow
    def test_a_piece_beyond_4_gib_arrives(self, memory, there, peer, monkeypatch):
        monkeypatch.setattr("transfer.testing.conformance.folded", Large)
        super().test_a_piece_beyond_4_gib_arrives(memory, there, peer)


class TestCudaIpc(DeviceConformance):
    transport = DeviceCudaIpc


class TestTcp(DeviceConformance):
    transport = DeviceTcp


class TestShm(DeviceConformance):
    transport = DeviceShm
