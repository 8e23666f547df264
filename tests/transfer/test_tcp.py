"""The `tcp` transport does what every transport must."""

import pytest

from transfer.tcp import TcpTransport
from transfer.testing import TransportConformance


class TestTcp(TransportConformance):
    transport = TcpTransport

    @pytest.fixture
    def options(self):
        return {"lost_after_s": 60.0}  # a busy machine may leave a thread waiting for seconds
