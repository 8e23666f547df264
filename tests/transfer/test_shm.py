"""The `shm` transport does what every transport must."""

from transfer.testing.conformance import TransportConformance
from transfer.transports.shm import ShmTransport


class TestShm(TransportConformance):
    transport = ShmTransport
