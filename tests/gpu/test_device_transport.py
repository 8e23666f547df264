"""The `cuda_ipc` transport does on a device what every transport must."""

import numpy as np
import pytest
from gpu.device import DeviceBuffer, DeviceCudaIpc, require

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


class TestCudaIpc(TransportConformance):
    transport = DeviceCudaIpc

    @pytest.mark.slow
    def test_a_piece_beyond_4_gib_arrives(self, memory, there, peer, monkeypatch):
        monkeypatch.setattr("transfer.testing.conformance.folded", Large)
        super().test_a_piece_beyond_4_gib_arrives(memory, there, peer)
