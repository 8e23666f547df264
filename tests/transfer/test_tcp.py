"""The `tcp` transport does what every transport must."""

from transfer.tcp import TcpTransport
from transfer.testing import TransportConformance


class TestTcp(TransportConformance):
    transport = TcpTransport
