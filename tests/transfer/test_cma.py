"""The `cma` transport does what every transport must."""

from transfer.cma import CmaTransport
from transfer.testing import TransportConformance


class TestCma(TransportConformance):
    transport = CmaTransport
