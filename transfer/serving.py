"""The producer's side of a rank: takes connections of consumers, and writes into the memory that they granted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np

from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.control.connection import Link
from transfer.driver import Driver, look, peer_name
from transfer.integrity import PassingPages, page_checksums
from transfer.plan.granularity import Bounds, Divider, Granularity
from transfer.plan.layout import RankLayout, Table
from transfer.plan.pairing import Pairing, Pairings, coalesce, pair_sections
from transfer.protocol.messages import Granted, Introduction, MessageError, Refused, decode, encode
from transfer.protocol.orders import Abandon, Ended, Failed, Order, Timing, Write
from transfer.protocol.outgoing import Outgoing
from transfer.protocol.producer import Producer
from transfer.transports.base import Completion, Grant, Outcome, Peer, TransferError, Unavailable
from transfer.transports.cuda.copier import Staging
from transfer.transports.cuda.staged import StagedPeer
from transfer.transports.registry import Transports

MAX_VISITORS = 256
"""Consumers' ranks, those included whose connection ended a moment ago."""
_INTRODUCTION_S = 5.0
_MAX_INTRODUCTION_NBYTES = 64 << 10
_MAX_REASON_LENGTH = 512
_CONNECT_S = 10.0
_MIN_BATCH_NBYTES = 1 << 20
"""Layers travel together until they are worth a batch of so many bytes."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step computes of a transfer.

    Args:
        block_tables: the block table of each section as it is now.
        stop_token: after this step the KV of the tokens before it is there.
        run: how often prefill was begun again before.
    """

    block_tables: list[list[int]]
    stop_token: int
    run: int = 0


@dataclass(slots=True)
class _Visitor:
    """A consumer's rank."""

    layout: RankLayout
    pairings: Pairings
    endpoints: Mapping[str, bytes]
    marks: bool
    """It notes what comes with checksums of its own."""
    data: asyncio.Future[Peer]
    """The connection for bulk data."""


class Serving(Driver):
    """See the module.

    Args:
        executor: one thread, which plans and takes checksums, on a device through `staging`.
        pairing: one thread as well: a consumer's introduction takes some memory and time, as much as it likes.
    """

    def __init__(
        self,
        timing: Timing,
        names_return: bool,
        layout: RankLayout,
        transports: Transports,
        bounds: Bounds,
        page_tokens: int,
        loop: asyncio.AbstractEventLoop,
        executor: Executor,
        pairing: Executor,
        staging: Staging | None,
        report: Callable[[Failed | Ended], None],
    ) -> None:
        self.producer = Producer(self._divide, timing, names_return=names_return)
        super().__init__(self.producer, loop, report)
        self._timing = timing
        self._layout, self._transports, self._executor, self._pairing = layout, transports, executor, pairing
        self._bounds, self._page_tokens, self._staging = bounds, page_tokens, staging
        self._visitors: dict[str, _Visitor] = {}
        self._completions: dict[tuple[str, Outgoing, int], Completion] = {}
        """Of writes under way, by consumer's rank, transfer and batch."""

    def computed(self, layer: int, progress: Sequence[tuple[Outgoing, Computed]], section: int, now_s: float) -> None:
        """All layers of a section up to `layer` have the KV of these transfers' tokens before their stop."""
        for transfer, computed in progress:
            transfer.block_tables = computed.block_tables
            self.producer.computed(transfer, layer, computed.stop_token, now_s, run=computed.run, section=section)

    # Consumers

    async def serve(self, link: Link) -> None:
        """Talk with one consumer's rank until the connection ends."""
        peer = peer_name(link.peer)
        try:
            message = decode(await link.receive(_INTRODUCTION_S, _MAX_INTRODUCTION_NBYTES))
            if not isinstance(message, Introduction):
                raise MessageError(f"{type(message).__name__} before an introduction")
            pairings = await self._loop.run_in_executor(
                self._pairing, pair_sections, self._layout, message.layout, message.parts
            )
            link.known()
            visitor = self._meet(peer, link, message, pairings)
        except Unavailable:
            return
        except TransferError as error:
            reason = str(error)
            log_once(f"transfer.visitor:{kind_of(reason)}", "a decode instance is refused: %s", reason, logger=logger)
            return
        try:
            await self._converse(peer, link)
        except (Unavailable, MessageError):
            pass
        finally:
            if self._links.get(peer) is link:
                del self._links[peer]
                # Writes go on meanwhile: the consumer connects again, unless it is gone.
                self._loop.call_later(self._timing.lease_s, self._forget, peer, visitor)

    def _meet(self, peer: str, link: Link, message: Introduction, pairings: Pairings) -> _Visitor:
        before = self._visitors.get(peer)
        if before is None and len(self._visitors) >= MAX_VISITORS:
            gone = next((name for name in self._visitors if name not in self._links), None)
            if gone is None:
                raise TransferError(f"{MAX_VISITORS} ranks of decode instances are connected: more are not served")
            self._forget(gone, self._visitors[gone])
        is_new = before is None or _is_dead(before.data)
        data = self._connect(message.endpoints) if before is None or is_new else before.data
        if before is not None and is_new:
            before.data.add_done_callback(_close)
        data.add_done_callback(partial(_refuse_unreached, link))
        visitor = _Visitor(message.layout, pairings, message.endpoints, message.marks, data)
        if peer in self._links:
            self._links[peer].close()
        self._links[peer], self._visitors[peer] = link, visitor
        return visitor

    def _forget(self, peer: str, visitor: _Visitor) -> None:
        if self._visitors.get(peer) is visitor and peer not in self._links:
            del self._visitors[peer]
            visitor.data.add_done_callback(_close)

    def _connect(self, endpoints: Mapping[str, bytes]) -> asyncio.Future[Peer]:
        connecting = self._loop.create_task(self._dial(endpoints))
        connecting.add_done_callback(look)
        return connecting

    async def _dial(self, endpoints: Mapping[str, bytes]) -> Peer:
        connect = partial(self._transports.connect, endpoints, deadline_s=_CONNECT_S)
        return await self._loop.run_in_executor(None, connect)

    def _divide(self, peer: str, granted: Granted) -> list[Divider]:
        visitor = self._visitors.get(peer)
        if visitor is None:
            raise TransferError("the consumer has no connection")
        visitor.layout.check_tables(granted.tables)
        return [
            self._divider(number, own, pairing, granted.tables[number])
            for number, (own, pairing) in visitor.pairings.items()
        ]

    def _divider(self, number: int, own: int, pairing: Pairing, table: Table) -> Divider:
        section, tokens = self._layout.sections[own], pairing.covering(table.tokens)
        granularity = Granularity.FULL if section.is_whole else self._bounds.choose(table.stop_token)
        row_nbytes = section.shard.num_heads * (section.k_dim + section.v_dim) * section.itemsize
        min_layers = -(-_MIN_BATCH_NBYTES // (max(1, len(tokens)) * row_nbytes))
        return Divider(
            granularity, pairing.layers, tokens, pairing.unit, min_layers, number, own, is_whole=section.is_whole
        )

    # Writes

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, Write):
            self._start(self._write(order, order.transfer.block_tables))
        elif isinstance(order, Abandon):
            for (peer, transfer, _), completion in tuple(self._completions.items()):
                if peer == order.peer and transfer is order.transfer:
                    completion.cancel()

    async def _write(self, order: Write, block_tables: Sequence[Sequence[int]]) -> None:
        checksums: list[int] = []
        error: str | None
        try:
            checksums, error = await self._try_write(order, block_tables)
        except (TransferError, ValueError) as reason:
            error = str(reason)
        except Exception as reason:
            error = f"{reason!r}"
            log_once(
                f"transfer.write:{type(reason).__name__}", "a write failed: %r", reason, logger=logger, exc_info=True
            )
        self.tell(self.producer.written, order.peer, order.transfer, order.number, checksums, error)

    async def _try_write(self, order: Write, block_tables: Sequence[Sequence[int]]) -> tuple[list[int], str | None]:
        visitor, transfer = self._visitors.get(order.peer), order.transfer
        if visitor is None:
            raise TransferError("the consumer's connection ended")
        if _is_dead(visitor.data):
            visitor.data.add_done_callback(_close)
            visitor.data = self._connect(visitor.endpoints)
        peer = await asyncio.shield(visitor.data)
        if not transfer.wanted_by(order.peer):
            raise TransferError("not wanted any more")
        settled: asyncio.Future[Outcome] = self._loop.create_future()
        completion, nbytes, checksums = await self._loop.run_in_executor(
            self._executor,
            partial(_send, visitor, peer, order, block_tables, self._page_tokens, self._timing.hold_s, self._staging),
        )
        key = order.peer, transfer, order.number
        self._completions[key] = completion
        completion.add_done_callback(lambda outcome: self._settle(settled, outcome))
        if not transfer.wanted_by(order.peer):
            completion.cancel()
        try:
            outcome = await settled
        finally:
            del self._completions[key]
        if outcome.ok:
            transfer.nbytes += nbytes
            transfer.transports.add(peer.transport)
        return checksums() if outcome.ok else [], None if outcome.ok else str(outcome)

    def _settle(self, settled: asyncio.Future[Outcome], outcome: Outcome) -> None:
        """In whichever thread learns the outcome."""

        def tell() -> None:
            if not settled.done():
                settled.set_result(outcome)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(tell)


def _send(
    visitor: _Visitor,
    peer: Peer,
    order: Write,
    block_tables: Sequence[Sequence[int]],
    page_tokens: int,
    deadline_s: float,
    staging: Staging | None,
) -> tuple[Completion, int, Callable[[], list[int]]]:
    """Start writing a batch, and take its checksums meanwhile: they are there when it is written.

    What goes through stages is hashed as it passes: page by page, or order by order where the consumer has stages too
    and notes what it gets. A second attempt has the checksums of its pages in any case. What goes by itself is read
    once more for them, from a device as from the host. Raises TransferError, ValueError.
    """
    batch, granted = order.batch, order.granted
    own, pairing = visitor.pairings[batch.section]
    if own >= len(block_tables):
        raise TransferError(f"{len(block_tables)} block tables: there is none of section number {own}")
    block_ids, blocks = block_tables[own], granted.tables[batch.section].block_ids
    tokens = (batch.first_token, batch.stop_token)
    section = visitor.layout.sections[batch.section]
    grant = Grant(granted.key, *section.ranges(section.holding(blocks, *tokens)))
    page_tokens = pairing.checksum_tokens(page_tokens)
    pages = pairing.source_pages(batch.layers, *tokens, block_ids, page_tokens)
    nbytes = int(np.sum(pages.nbytes))
    if isinstance(peer, StagedPeer) and not peer.is_direct(pages.addresses, pages.nbytes):
        there = pairing.destination_pages(batch.layers, *tokens, blocks, page_tokens)
        pieces = coalesce(pages.addresses, there.addresses, pages.nbytes)
        if visitor.marks and not order.attempt:
            return peer.write(grant, *pieces, deadline_s=deadline_s, batch=order.number), nbytes, list
        passing = PassingPages(pages)
        return peer.write(grant, *pieces, deadline_s=deadline_s, seen=passing.update), nbytes, passing.checksums
    copies = pairing.copies(batch.layers, *tokens, block_ids, blocks)
    completion = peer.write(grant, copies.source, copies.destination, copies.nbytes, deadline_s=deadline_s)
    try:
        checksums = page_checksums(pages, staging)
    except BaseException:
        completion.cancel()
        raise
    return completion, nbytes, lambda: checksums


def _refuse_unreached(link: Link, connecting: asyncio.Future[Peer]) -> None:
    """Tell a consumer at once that nothing reaches it: else prefill is computed before it hears of that."""
    error = None if connecting.cancelled() else connecting.exception()
    if isinstance(error, Unavailable):
        link.send(encode(Refused(cause=str(error)[:_MAX_REASON_LENGTH])))


def _is_dead(connecting: asyncio.Future[Peer]) -> bool:
    if not connecting.done():
        return False
    return connecting.cancelled() or connecting.exception() is not None or not connecting.result().alive


def _close(connecting: asyncio.Future[Peer]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()
