"""What serves memory of a device does there what every transport must."""

import numpy as np
import pytest
from gpu.device import DeviceBuffer, DeviceCudaIpc, DeviceShm, DeviceTcp, require

from transfer.testing.conformance import TransportConformance

require()
pytestmark = pytest.mark.gpu


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
