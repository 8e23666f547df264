"""Any host: the bytes go over TCP, from the sender's memory to the receiver's without a copy in between.

Memory of a device goes through stages of page-locked memory on its side, whatever the other side has.
"""

from __future__ import annotations

from transfer.control.handshake import Server
from transfer.transports.base import Capabilities
from transfer.transports.channel import Channel
from transfer.transports.cuda.landing import LandingConnection
from transfer.transports.incoming import Connection
from transfer.transports.inline import InlineConnection, InlineEncoder
from transfer.transports.network import NetworkTransport
from transfer.transports.stream import PayloadEncoder


class TcpTransport(NetworkTransport):
    """See the module."""

    name = "tcp"
    capabilities = Capabilities(device_memory=True, other_host=True)

    def _connection(self, channel: Channel, server: Server) -> Connection:
        if self.stages is None:
            return InlineConnection(channel, server, self.memory)
        return LandingConnection(channel, server, self.memory, self.stages)

    def _prepare(self, channel: Channel, deadline_at: float) -> PayloadEncoder:
        return InlineEncoder(channel.version)
