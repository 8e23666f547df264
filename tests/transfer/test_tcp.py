"""The `tcp` transport does what every transport must."""

import pytest

from transfer.testing.conformance import TransportConformance
from transfer.transports.tcp import TcpTransport


class TestTcp(TransportConformance):
    transport = TcpTransport

    @pytest.fixture
    def options(self):
        return {"lost_after_s": 60.0}  # a busy machine may leave a thread waiting for seconds
