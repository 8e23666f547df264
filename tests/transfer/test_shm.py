"""The `shm` transport does what every transport must."""

from transfer.shm import ShmTransport
from transfer.testing import TransportConformance


class TestShm(TransportConformance):
    transport = ShmTransport
