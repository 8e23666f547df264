"""Where the ranks of an instance are: asked for once by each peer, before it talks to the ranks themselves.

The directory of a prefill instance is a small listener at the address that its answers name (`remote_host`,
`remote_port`), of which the port names a Unix socket where the host is this one. Whoever passes the handshake gets one
frame, an `InstanceCard`, and the connection ends.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from transfer.control.connection import Access, Link, LoopThread, connect
from transfer.control.listener import Listener, listen
from transfer.plan.layout import RankLayout
from transfer.transports.base import INSTANCE_NBYTES, TransferError, Unavailable

PURPOSE = "directory"
THIS_HOST = "127.0.0.1"
"""What is told to others, who expect an address, where the directory listens for this host only."""
_MAX_RANKS = 1 << 10
_START_S = 60.0
_FLUSH_S = 5.0


class RankCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank: where its control connections are taken ("": on this host), which process it is, and its KV memory."""

    host: Annotated[str, Meta(max_length=64)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    instance: Annotated[bytes, Meta(min_length=INSTANCE_NBYTES, max_length=INSTANCE_NBYTES)]
    layout: RankLayout


class InstanceCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All ranks of one life of an instance, by number (`pp_rank * tp_size + tp_rank`)."""

    engine_id: Annotated[str, Meta(max_length=256)]
    ranks: Annotated[list[RankCard], Meta(min_length=1, max_length=_MAX_RANKS)]


_decoder = msgspec.msgpack.Decoder(InstanceCard)
"""Made once, when this is imported: msgspec crashes where two threads use a type for the first time at once."""


def decode_card(data: bytes) -> InstanceCard:
    """Raises Unavailable for bytes that are no card."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, TransferError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Unavailable(f"the directory's answer cannot be read: {str(error)[:200]}") from None


async def look_up(address: tuple[str, int], access: Access, *, deadline_s: float) -> InstanceCard:
    """The ranks of the instance whose directory listens there. Raises Unavailable, within about `deadline_s`."""
    link = await connect(address, PURPOSE, access, deadline_s=deadline_s)
    try:
        return decode_card(await link.receive(deadline_s))
    finally:
        link.close()


class Directory:
    """Serves one instance's card until it is closed.

    Raises:
        TransferError: the address needs a secret, or cannot be listened at.
    """

    def __init__(self, card: InstanceCard, address: tuple[str, int], access: Access) -> None:
        self._card = msgspec.msgpack.encode(card)
        self._thread = LoopThread("mooncake-connector-directory")
        try:
            self._listener: Listener = self._thread.run(listen(address, PURPOSE, access, self._serve), _START_S)
        except BaseException:
            self._thread.close()
            raise
        self.port = self._listener.port

    async def _serve(self, link: Link) -> None:
        link.send(self._card)
        await link.flush(_FLUSH_S)

    def close(self) -> None:
        """May be called twice."""
        self._thread.post(self._listener.close)
        self._thread.close()
