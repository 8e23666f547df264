"""A transport on a library: orders and answers over TCP, as with `tcp`, and the library reads.

It brings addresses, ports and threads of its own, and knows neither our secret nor our certificates. It is told of
memory of the host only: of a device's, the stages.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from transfer.control.handshake import LONG_ORDERS_VERSION, Identity
from transfer.transports.base import Capabilities, Region, TransferError, Unavailable
from transfer.transports.channel import Channel
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.libraries.reader import Reader
from transfer.transports.libraries.staging import SLOT_NBYTES, StagedFetcher, Staging
from transfer.transports.memory import Memory
from transfer.transports.network import NetworkTransport
from transfer.transports.pull import Fetcher, PullEncoder, PullTransport
from transfer.transports.stream import PayloadEncoder, Slice
from transfer.transports.tls import Tls
from transfer.transports.vectors import Pieces, Vector
from transfer.transports.wire import CopyStatus

MAX_ORDER_NBYTES = 128 << 20
"""Each order takes 0.5 ms of processors that are copying, as long as it takes to read and copy a slot."""
MAX_ORIGIN_NBYTES = 1 << 20


class LibraryTransport(PullTransport, NetworkTransport):
    """See the module. Raises Unavailable where the library is not installed, or does not work here."""

    capabilities = Capabilities(device_memory=True, other_host=True, needs_registration=True, needs_library=True)
    max_nbytes = MAX_ORDER_NBYTES
    max_attached = MAX_ORIGIN_NBYTES

    def __init__(
        self,
        memory: Memory,
        identity: Identity | None = None,
        *,
        hosts: Sequence[str] = ("127.0.0.1",),
        tls: Tls | None = None,
        lost_after_s: float = 5.0,
        place: OnDevice | None = None,
    ) -> None:
        super().__init__(memory, identity, hosts=hosts, streams=1, tls=tls, lost_after_s=lost_after_s, place=place)
        if tls is not None:
            raise Unavailable("it does not encrypt, and TLS is configured")
        self._reader: Reader | None = self._load(hosts)
        self._staging = Staging(self._reader)

    @abstractmethod
    def _load(self, hosts: Sequence[str]) -> Reader:
        """Raises Unavailable with what is missing."""

    @property
    def reader(self) -> Reader:
        """Raises Unavailable once it is closed."""
        if self._reader is None:
            raise Unavailable("it is closed")
        return self._reader

    def register(self, region: Region) -> None:
        self.reader.offer(region)

    def unregister(self, region: Region) -> None:
        self.reader.withdraw(region)

    def close(self) -> None:
        super().close()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _fetcher(self, channel: Channel) -> Fetcher:
        return StagedFetcher(self.name, self.reader, self._staging, self.stages)

    def _prepare(self, channel: Channel, deadline_at: float) -> PayloadEncoder:
        try:
            self.reader.origin()
        except TransferError as error:
            raise Unavailable(str(error)) from error
        max_nbytes = MAX_ORDER_NBYTES if channel.version >= LONG_ORDERS_VERSION else SLOT_NBYTES
        return _OriginEncoder(self.reader, max_nbytes)


class _OriginEncoder(PullEncoder):
    """Tells with each order where this process's memory is to be found, since that changes."""

    def __init__(self, reader: Reader, max_nbytes: int) -> None:
        super().__init__(max_nbytes)
        self._reader = reader
        self._num_open = 0

    def has_room(self) -> bool:
        """No more than the receiver takes: what it leaves in the socket for long looks like a path that died."""
        return self._num_open < StagedFetcher.max_under_way

    def encode(self, part: Slice) -> Vector:
        vector = super().encode(part)
        self._num_open += 1
        return vector

    def release(self, part: Slice, status: CopyStatus | None) -> None:
        self._num_open -= 1

    def attachment(self, pieces: Pieces) -> bytes:
        return self._reader.origin()
