"""KV to other hosts by RDMA READ: the receiver's cards fetch from the sender's memory what it ordered.

Orders and answers go over one TCP connection, as those of `tcp`, and so do the ends of the queue pairs. Each rail of
the receiver has one reliable queue pair, and a rail of the sender's one for it. Where a request fails, as one with the
key of memory that is not registered any more does, or one over a link that is cut, the cards give up that pair; the
receiver says so, what was under way goes over the others, and the sender tries in the background whether a new epoch of
it works.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.control.handshake import Identity
from transfer.transports.base import Capabilities, Numbers, Region, TransportOptions, Unavailable
from transfer.transports.channel import Channel
from transfer.transports.cuda.fetched import LandingFetcher
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.local import take, take_answer
from transfer.transports.memory import Memory
from transfer.transports.network import NetworkTransport
from transfer.transports.pull import GREET, Fetcher, PullTransport
from transfer.transports.rdma.fetcher import COUNT, WHERE, RdmaFetcher
from transfer.transports.rdma.gpudirect import DeviceRegions
from transfer.transports.rdma.keys import MAX_NBYTES
from transfer.transports.rdma.opened import OpenRails
from transfer.transports.rdma.pair import END_NBYTES, decode_end
from transfer.transports.rdma.paths import RailCounts
from transfer.transports.rdma.rails import MAX_RAILS
from transfer.transports.rdma.sending import RailEncoder
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.verbs import in_use, locked_limit
from transfer.transports.stream import PayloadEncoder
from transfer.transports.tls import Tls
from transfer.transports.wire import CopyStatus, WireError

logger = get_logger(__name__)


class RdmaTransport(PullTransport, NetworkTransport):
    """See the module.

    Args:
        hosts: the control connection uses the first that works, and ports that have these addresses are preferred.
        lost_after_s: after which the control connection counts as dead; by default as long as `settings` say of cards.
    """

    name = "rdma"
    capabilities = Capabilities(device_memory=True, other_host=True, needs_registration=True, needs_library=True)
    fills_stages = True
    max_nbytes = 64 << 20
    max_attached = WHERE.size + END_NBYTES + MAX_NBYTES
    takes_one_path = True

    def __init__(
        self,
        memory: Memory,
        identity: Identity | None = None,
        *,
        hosts: Sequence[str] = ("127.0.0.1",),
        tls: Tls | None = None,
        settings: RdmaSettings = RdmaSettings(),  # noqa: B008
        lost_after_s: float | None = None,
        place: OnDevice | None = None,
    ) -> None:
        """Raises Unavailable with the reason where there is no card, or not what it takes to use it."""
        if lost_after_s is not None:
            settings = replace(settings, lost_after_s=lost_after_s)
        super().__init__(
            memory, identity, hosts=hosts, streams=1, tls=tls, lost_after_s=settings.lost_after_s, place=place
        )
        self._rails = OpenRails(hosts, settings, place)
        self._counts = RailCounts()
        self._device = None if place is None else _direct(self._rails, place, settings)
        self.takes_device = self._device is not None
        self._tell()

    def _tell(self) -> None:
        """Over what it goes: once in the log, and in the metrics."""
        opened = [rail.card.described for rail in self._rails.all]
        beside = f"{in_use()}; locked memory: {locked_limit()}"
        if self.place is not None:
            way = "page-locked stages" if self._device is None else self._device.described
            beside += f"; memory of GPU {self.place.device}: {way}"
        for one in opened:
            self._counts.add("rail_opened", f"{one}; {beside}")
        told = "; ".join(opened)
        cause = f"transfer.rdma:{told}; {beside}"
        log_once(cause, "rdma: goes over %s; %s", told, beside, level=logging.INFO, logger=logger)

    @classmethod
    def make(cls, memory: Memory, options: TransportOptions) -> RdmaTransport:
        return cls(
            memory, options.identity, hosts=options.hosts, tls=options.tls, settings=options.rdma, place=options.place
        )

    def register(self, region: Region) -> None:
        if self._device is None or region.is_stage:
            self._rails.register(region)
        else:
            self._device.register(region)

    def unregister(self, region: Region) -> None:
        if self._device is None or region.is_stage:
            self._rails.unregister(region)
        else:
            self._device.unregister(region)

    def is_direct(self, addresses: Numbers, nbytes: Numbers) -> bool:
        return self._device is not None and self._device.cover(addresses, nbytes)

    def take_counts(self) -> Mapping[str, Mapping[str, int]]:
        return {**super().take_counts(), **self._counts.take()}

    def close(self) -> None:
        super().close()
        self._rails.close()

    def _fetcher(self, channel: Channel) -> Fetcher:
        fetcher = RdmaFetcher(self._rails.all, self._device)
        return fetcher if self.stages is None else LandingFetcher(fetcher, self.stages)

    def _prepare(self, channel: Channel, deadline_at: float) -> PayloadEncoder:
        channel.settimeout(max(0.001, deadline_at - time.monotonic()))
        channel.sendall(GREET)
        (count,) = COUNT.unpack(take(channel, COUNT.size, deadline_at, "our memory"))
        if not 1 <= count <= MAX_RAILS:
            raise Unavailable(f"the peer says that it has {count} rails: expected 1 to {MAX_RAILS}")
        said = take(channel, count * END_NBYTES, deadline_at, "our memory")
        try:
            ends = [decode_end(said[start : start + END_NBYTES]) for start in range(0, len(said), END_NBYTES)]
        except WireError as error:
            raise Unavailable(str(error)) from error
        rails = list(self._rails.all)
        if not rails:  # memory that it could not use closed it
            raise Unavailable("this side is closed")
        encoder = RailEncoder(rails, ends, self._counts, self.max_nbytes, self._device)
        try:
            self._try_out(channel, encoder, deadline_at)
        except BaseException:
            encoder.close()
            raise
        return encoder

    def _try_out(self, channel: Channel, encoder: RailEncoder, deadline_at: float) -> None:
        """Have the peer read a number over every rail, and wait until one works. Raises Unavailable, OSError.

        The answers of the others are taken in the background, as they come: one that is silent holds up nothing.
        """
        asked = encoder.asked
        while (part := encoder.errand()) is not None:
            part.number = len(asked) + 1
            asked[part.number] = part
            channel.sendall(encoder.order(part))
        works = False
        while asked and not works:
            number, status = take_answer(channel, deadline_at, "our memory")
            answered = asked.pop(number, None)
            if answered is None:
                raise Unavailable(f"the peer answers order {number}, which is not open")
            encoder.release(answered, status)
            works = works or status is CopyStatus.OK
        if not works:
            raise Unavailable(encoder.why_not)


def _direct(rails: OpenRails, place: OnDevice, settings: RdmaSettings) -> DeviceRegions | None:
    """What cards may have of a device's memory; None, and a line that says why, where that is nothing."""
    try:
        if settings.no_gpudirect:
            raise Unavailable(settings.no_gpudirect)
        return DeviceRegions(rails, place)
    except Unavailable as error:
        said = "rdma: all memory of GPU %d goes through page-locked stages: %s"
        log_once(f"transfer.rdma.stages:{kind_of(str(error))}", said, place.device, error, logger=logger)
        return None
