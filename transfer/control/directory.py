"""Where the ranks of an instance are: asked for once by each peer, before it talks to the ranks themselves.

The directory of an instance is a small listener at the address that the answers of a prefill instance name
(`remote_host`, `remote_port`), of which the port names a Unix socket where the host is this one. Whoever passes the
handshake says one frame and gets one, an `InstanceCard`, and the connection ends.

Ranks whose engine tells the directory's owner of them are in it from the start; others join it by themselves. The ranks
of a decode instance ask their own one, too: what each fetches depends on what the others do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.control.connection import Access, Link, LoopThread, connect
from transfer.control.listener import Listener, listen
from transfer.plan.layout import RankLayout
from transfer.transports.base import INSTANCE_NBYTES, TransferError, Unavailable

Address: TypeAlias = tuple[str, int]
"""Host and port; "" as the host is a Unix socket that the port names."""
PURPOSE = "directory"
THIS_HOST = "127.0.0.1"
"""What is told to others, who expect an address, where the directory listens for this host only."""
_MAX_RANKS = 1 << 10
_START_S = 60.0
_QUESTION_S = 5.0
_COMPLETE_S = 30.0
"""Who asks before all ranks have joined waits for so long; a look-up's own deadline may be shorter."""
_FLUSH_S = 5.0
_MAX_QUESTION_NBYTES = 64 << 10

logger = get_logger(__name__)


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


class Ask(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Who are your ranks?"""


class Join(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """I am rank `number` of this instance; and who are the others?"""

    number: Annotated[int, Meta(ge=0, lt=_MAX_RANKS)]
    card: RankCard


Question: TypeAlias = Ask | Join

_questions = msgspec.msgpack.Decoder(Question)
_decoder = msgspec.msgpack.Decoder(InstanceCard)
"""Made once, when this is imported: msgspec crashes where two threads use a type for the first time at once."""


def decode_card(data: bytes) -> InstanceCard:
    """Raises Unavailable for bytes that are no card."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, TransferError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Unavailable(f"the directory's answer cannot be read: {str(error)[:200]}") from None


async def look_up(address: Address, access: Access, *, deadline_s: float) -> InstanceCard:
    """The ranks of the instance whose directory listens there. Raises Unavailable, within about `deadline_s`."""
    return await _ask(address, Ask(), access, deadline_s)


async def join(address: Address, number: int, card: RankCard, access: Access, *, deadline_s: float) -> InstanceCard:
    """Be rank `number` of the instance whose directory listens there; returns when all its ranks have joined.

    Raises Unavailable within about `deadline_s`, also where another process is that rank. May be called again.
    """
    return await _ask(address, Join(number, card), access, deadline_s)


async def _ask(address: Address, question: Question, access: Access, deadline_s: float) -> InstanceCard:
    link = await connect(address, PURPOSE, access, deadline_s=deadline_s)
    try:
        link.send(msgspec.msgpack.encode(question))
        return decode_card(await link.receive(deadline_s))
    finally:
        link.close()


class Directory:
    """Serves one instance's card, once it has all ranks, until it is closed.

    Args:
        cards: of the first ranks, those that are known already; the others join.

    Raises:
        TransferError: the address needs a secret, or cannot be listened at.
    """

    def __init__(
        self, engine_id: str, cards: Sequence[RankCard], num_ranks: int, address: Address, access: Access
    ) -> None:
        self._engine_id, self._num_ranks = engine_id, num_ranks
        self._cards = dict(enumerate(cards))
        self._complete = asyncio.Event()
        self._answer = b""
        self._check_complete()
        self._thread = LoopThread("mooncake-connector-directory")
        try:
            self._listener: Listener = self._thread.run(listen(address, PURPOSE, access, self._serve), _START_S)
        except BaseException:
            self._thread.close()
            raise
        self.port = self._listener.port

    def _check_complete(self) -> None:
        if len(self._cards) == self._num_ranks:
            ranks = [self._cards[number] for number in range(self._num_ranks)]
            self._answer = msgspec.msgpack.encode(InstanceCard(self._engine_id, ranks))
            self._complete.set()

    async def _serve(self, link: Link) -> None:
        try:
            question = _questions.decode(await link.receive(_QUESTION_S, _MAX_QUESTION_NBYTES))
            if isinstance(question, Join):
                self._take_in(question)
        except Exception as error:  # also what a layout's checks raise
            reason = str(error)[:200]
            log_once(f"directory:{kind_of(reason)}", "the directory does not answer: %s", reason, logger=logger)
            return
        link.known()
        try:
            await asyncio.wait_for(self._complete.wait(), _COMPLETE_S)
        except asyncio.TimeoutError:
            joined = f"{len(self._cards)} of {self._num_ranks} ranks have joined"
            log_once("directory.incomplete", "the directory does not answer: %s", joined, logger=logger)
            return
        link.send(self._answer)
        await link.flush(_FLUSH_S)

    def _take_in(self, rank: Join) -> None:
        """Raises Unavailable for a number that is not of this instance, or another process's."""
        if rank.number >= self._num_ranks:
            raise Unavailable(f"rank {rank.number} joins an instance of {self._num_ranks} ranks")
        if self._cards.setdefault(rank.number, rank.card) != rank.card:
            raise Unavailable(f"rank {rank.number} joins, which another process is")
        self._check_complete()

    def close(self) -> None:
        """May be called twice."""
        self._thread.post(self._listener.close)
        self._thread.close()
