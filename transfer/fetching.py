"""The consumer's side of a rank: finds the ranks of a prefill instance, grants them blocks, checks what lands there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np

from mooncake_connector.log import get_logger, log_once
from transfer.control.connection import Access, Gone, Link, connect
from transfer.control.directory import Address, InstanceCard, RankCard, look_up
from transfer.control.handshake import MARKS_VERSION
from transfer.driver import RANK_PURPOSE, Driver, look, now_s, peer_name
from transfer.integrity import page_checksums
from transfer.plan.layout import RankLayout, Table
from transfer.plan.pairing import Pairings, Route, pair_sections, routes
from transfer.protocol.consumer import Consumer
from transfer.protocol.incoming import Incoming, Source, Where
from transfer.protocol.messages import AnyMessage, Introduction, Landed, Refused, encode
from transfer.protocol.orders import Ended, Failed, Order, Revoke, Timing, Verify
from transfer.transports.base import TransferError, Unavailable
from transfer.transports.cuda.copier import Staging
from transfer.transports.memory import Memory
from transfer.transports.passing import Passed

MAX_SEARCHES = 32
"""Prefill instances that are looked for at the same time. Requests name their addresses, so they may be anybody's."""
_CONNECT_S = 10.0
_RECONNECT_S = 1.0
_REVOKE_AGAIN_S = 1.0
_UNREACHABLE_S = 1.0
"""An instance that could not be reached is not tried again for so long: its requests fail at once."""
_REFUSED_S = 5.0
"""The same for one that can be asked, and whose KV reaches nothing here."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Origin(Source):
    """A rank of a prefill instance that has a route to this rank."""

    card: RankCard
    route: Route
    pairings: Pairings

    def sends(self, section: int, wanted: Table) -> range:
        pairing = self.pairings.get(section)
        return wanted.tokens if pairing is None else pairing[1].covering(wanted.tokens)


@dataclass(slots=True)
class _Remote:
    """A prefill instance."""

    engine_id: str
    origins: list[_Origin]
    refusal: str = ""
    """Why nothing of it reaches this rank."""
    is_lost: bool = False
    """Its connections are over, or are those of a later look-up."""
    asked: asyncio.Task[InstanceCard] | None = None
    """Whose directory answers there now."""


class Fetching(Driver):
    """See the module. `executor` has one thread, which checks what landed, on a device through `staging`: what did not
    come with checksums of its own, which are compared in the stages."""

    def __init__(
        self,
        timing: Timing,
        layout: RankLayout,
        memory: Memory,
        endpoints: Mapping[str, bytes],
        access: Access,
        page_tokens: int,
        loop: asyncio.AbstractEventLoop,
        executor: Executor,
        staging: Staging | None,
        report: Callable[[Failed | Ended], None],
    ) -> None:
        self.consumer = Consumer(timing)
        super().__init__(self.consumer, loop, report)
        self._timing = timing
        self._layout, self._memory, self._endpoints, self._executor = layout, memory, dict(endpoints), executor
        self._access, self._page_tokens, self._staging = access, page_tokens, staging
        self._own: dict[Address, asyncio.Task[InstanceCard]] = {}
        """Who the ranks of this instance are, by the address of its directory."""
        self._remotes: dict[Address, asyncio.Task[_Remote]] = {}
        self._failed_s: dict[Address, float] = {}

    # What the engine says

    def announce(self, transfer: Incoming, home: Address, now_s: float) -> None:
        """A request that will want this transfer; `home` is the directory of this rank's own instance."""
        self.consumer.announce(transfer, now_s)
        if transfer.ending is None:
            self._start(self._seek(transfer, home))

    def grant(self, transfer: Incoming, tables: Sequence[Table], now_s: float) -> None:
        """Fetch into the blocks of these tables, one of each section; nothing if it has ended already."""
        if transfer.ending is None:
            try:
                transfer.memory = self._memory.grant(*self._layout.ranges(tables))
            except (TransferError, ValueError) as error:
                self.consumer.fail(transfer, str(error), now_s)
        key = b"" if transfer.memory is None else transfer.memory.key
        self.consumer.grant(transfer, tables, key, now_s)

    async def _seek(self, transfer: Incoming, home: Address) -> None:
        sources: list[_Origin] = []
        remote: _Remote | None = None
        patience_s = self._timing.deadline_s + self._timing.retry_s
        try:
            remote = await asyncio.wait_for(self._remote(transfer.where, home), patience_s)
            if remote.is_lost:
                raise Unavailable("the prefill instance was lost just now")
            sources = remote.origins
        except asyncio.TimeoutError:  # the protocol has ended it
            pass
        except Exception as error:
            if not isinstance(error, TransferError):
                log_once("transfer.begin", "a transfer cannot begin: %r", error, logger=logger, exc_info=True)
            self.tell(self.consumer.fail, transfer, str(error))
        self.tell(self.consumer.found, transfer, sources)
        if remote is not None and remote.refusal:
            self._fail_refused(remote)

    # The prefill instance

    async def _remote(self, where: Where, home: Address) -> _Remote:
        """Raises TransferError, also where the life that has the KV is over."""
        remote = await self._known(where.address, home)
        if where.engine_id in ("", remote.engine_id):
            return remote
        if remote.asked is None or remote.asked.done():  # once for all requests that name another life
            remote.asked = self._loop.create_task(look_up(where.address, self._access, deadline_s=_CONNECT_S))
            remote.asked.add_done_callback(look)
        card = await asyncio.shield(remote.asked)
        if card.engine_id != remote.engine_id:  # it restarted since it was asked
            if not remote.is_lost:
                self._forget(where.address, remote)
                for origin in remote.origins:  # what was begun with the earlier life fails now, not at its lease
                    self.tell(self.consumer.lost, origin.peer)
            remote = await self._known(where.address, home)
        if where.engine_id != remote.engine_id:
            raise Unavailable(f"prefill instance {where.engine_id!r} is gone: {remote.engine_id!r} answers there")
        return remote

    async def _known(self, address: Address, home: Address) -> _Remote:
        task = self._remotes.get(address)
        if task is None:
            if now_s() < self._failed_s.get(address, 0.0):
                raise Unavailable(f"the prefill instance at {address} could not be reached a moment ago")
            if sum(not search.done() for search in self._remotes.values()) >= MAX_SEARCHES:
                reason = f"no search for the prefill instance at {address}: {MAX_SEARCHES} others are under way"
                log_once("transfer.searches", "a transfer fails: %s", reason, logger=logger)
                raise Unavailable(reason)
            task = self._remotes[address] = self._loop.create_task(self._find(address, home))
            task.add_done_callback(partial(self._found, address))
        return await asyncio.shield(task)

    def _found(self, address: Address, task: asyncio.Task[_Remote]) -> None:
        """Forget a search that failed, also where each transfer that waited for it has met its deadline."""
        if task.cancelled() or task.exception() is None:
            return
        if self._remotes.get(address) is task:
            del self._remotes[address]
            failed_s = {other: until_s for other, until_s in self._failed_s.items() if until_s > now_s()}
            self._failed_s = {**failed_s, address: now_s() + _UNREACHABLE_S}

    async def _find(self, address: Address, home: Address) -> _Remote:
        own, card = await asyncio.gather(self._of_own(home), look_up(address, self._access, deadline_s=_CONNECT_S))
        origins = await self._loop.run_in_executor(None, self._origins, card, own)
        links = await asyncio.gather(*(self._visit(origin) for origin in origins), return_exceptions=True)
        failures = [link for link in links if isinstance(link, BaseException)]
        if failures:
            for link in links:
                if isinstance(link, Link):
                    link.close()
            raise failures[0]
        remote = _Remote(card.engine_id, origins)
        for origin, link in zip(origins, links, strict=True):
            assert isinstance(link, Link)
            self._links[origin.peer] = link
            self._start(self._keep(address, remote, origin, link))
        return remote

    async def _of_own(self, home: Address) -> InstanceCard:
        """The ranks of this instance, which stay what they are. Raises Unavailable."""
        task = self._own.get(home)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._own[home] = self._loop.create_task(look_up(home, self._access, deadline_s=_CONNECT_S))
            task.add_done_callback(look)
        try:
            return await asyncio.shield(task)
        except Unavailable as error:
            raise Unavailable(f"this instance's own directory at {home[0]}, port {home[1]}: {error}") from None

    def _origins(self, card: InstanceCard, own: InstanceCard) -> list[_Origin]:
        """Those that have a route to this rank. Raises LayoutError, Unavailable where this rank is not in its own."""
        mine = self._access.identity.instance
        number = next((number for number, rank in enumerate(own.ranks) if rank.instance == mine), None)
        if number is None:
            raise Unavailable(f"this rank is not in the directory of its own instance, {own.engine_id!r}")
        every = routes([rank.layout for rank in card.ranks], [rank.layout for rank in own.ranks])
        origins = []
        for route in every:
            if route.destination != number:
                continue
            rank = card.ranks[route.source]
            pairings = pair_sections(rank.layout, self._layout, route.parts)
            destinations = sum(other.source == route.source for other in every)
            peer = peer_name(rank.instance)
            layers = [pairings[at][1].layers if at in pairings else range(0) for at in range(len(route.parts))]
            origins.append(_Origin(peer, layers, destinations, rank, route, pairings))
        return origins

    async def _visit(self, origin: _Origin) -> Link:
        """A connection on which this rank has introduced itself. Raises Unavailable, Gone."""
        card = origin.card
        link = await connect(
            (card.host, card.port), RANK_PURPOSE, self._access, deadline_s=_CONNECT_S, expected=card.instance
        )
        parts = list(origin.route.parts)
        marks = self._staging is not None and link.version >= MARKS_VERSION
        link.send(encode(Introduction(layout=self._layout, parts=parts, endpoints=self._endpoints, marks=marks)))
        return link

    async def _keep(self, address: Address, remote: _Remote, origin: _Origin, link: Link | None) -> None:
        """Talk with a rank, and connect again where the connection ends while there is anything to say."""
        tried_s = -_RECONNECT_S
        try:
            while True:
                if link is not None:
                    await self._talk(origin.peer, link)
                # All go when one does: this one stays while any rank of the instance has to be told anything.
                if remote.is_lost or not self.consumer.needs(address, [other.peer for other in remote.origins]):
                    return
                # One that takes connections and closes them is not asked again and again.
                await asyncio.sleep(tried_s + _RECONNECT_S - now_s())
                tried_s, link = now_s(), await self._visit_again(remote, origin)
        except Gone:
            self.tell(self.consumer.lost, origin.peer)
        finally:
            self._forget(address, remote)

    def _receive(self, peer: str, message: AnyMessage) -> None:
        if isinstance(message, Refused):
            self._refused(peer, message.cause)
        else:
            super()._receive(peer, message)

    def _refused(self, peer: str, cause: str) -> None:
        """What waits for the peer's instance fails now, and so does what asks for it in a while."""
        for address, task in self._remotes.items():
            remote = task.result() if task.done() and not task.cancelled() and task.exception() is None else None
            if remote is not None and not remote.refusal and any(origin.peer == peer for origin in remote.origins):
                remote.refusal = f"prefill cannot send here: {cause}"
                self._fail_refused(remote)
                self._loop.call_later(_REFUSED_S, self._forget, address, remote)

    def _fail_refused(self, remote: _Remote) -> None:
        """Its ranks are told, so that they hold nothing for it."""
        for origin in remote.origins:
            self.tell(self.consumer.refused, origin.peer, remote.refusal)

    async def _talk(self, peer: str, link: Link) -> None:
        try:
            await self._converse(peer, link)
        except TransferError:
            pass
        finally:
            link.close()
        if self._links.get(peer) is link:
            del self._links[peer]

    async def _visit_again(self, remote: _Remote, origin: _Origin) -> Link | None:
        """None where it cannot be reached for now, or is lost. Raises Gone."""
        try:
            link = None if remote.is_lost else await self._visit(origin)
        except Gone:
            raise
        except Unavailable:
            return None
        if link is not None and remote.is_lost:  # asked again meanwhile, over connections of its own
            link.close()
            return None
        if link is not None:
            self._links[origin.peer] = link
        return link

    def _forget(self, address: Address, remote: _Remote) -> None:
        """Ask the directory again before the next transfer."""
        if remote.is_lost:  # whose connections are over: those to its ranks are others now
            return
        remote.is_lost = True
        for origin in remote.origins:
            link = self._links.get(origin.peer)
            if link is not None:
                link.close()
        task = self._remotes.get(address)
        if task is not None and task.done() and task.exception() is None and task.result() is remote:
            del self._remotes[address]

    # What lands

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, Verify):
            self._start(self._verify(order))
        elif isinstance(order, Revoke):
            self._start(self._revoke(order.transfer))

    async def _verify(self, order: Verify) -> None:
        transfer = order.transfer
        origin = transfer.sessions[order.peer].source
        assert isinstance(origin, _Origin)
        right, nbytes = False, 0
        try:
            right, nbytes = await self._loop.run_in_executor(
                self._executor,
                _check,
                origin,
                order.landed,
                transfer.tables,
                self._page_tokens,
                self._staging,
                self._passed(transfer),
            )
        except Exception as error:
            log_once(f"transfer.verify:{type(error).__name__}", "a batch cannot be checked: %r", error, logger=logger)
        if not right:
            log_once("transfer.checksum", "a batch arrived with wrong bytes; it is sent once more", logger=logger)
        transfer.nbytes += nbytes if right else 0
        self.tell(self.consumer.verified, order.peer, transfer, order.landed, right)

    def _passed(self, transfer: Incoming) -> Passed | None:
        """What has come of a transfer with checksums of its own."""
        held = None if transfer.memory is None else self._memory.granted(transfer.memory.key)
        return None if held is None else held.passed

    async def _revoke(self, transfer: Incoming) -> None:
        """Until nothing can write to the blocks any more: what the engine put there before would be overwritten."""
        assert transfer.memory is not None
        while True:
            try:  # a transport may be in the middle of a step
                wait = await self._loop.run_in_executor(self._executor, self._memory.begin_revoke, transfer.memory)
                if wait is not None:  # for a transport that fetches by itself: not in the thread that others need
                    await self._loop.run_in_executor(None, wait)
                break
            except Exception as error:
                log_once("transfer.revoke", "a transfer keeps its blocks for now: %s", error, logger=logger)
            await asyncio.sleep(_REVOKE_AGAIN_S)
        self.tell(self.consumer.revoked, transfer)


def _check(
    origin: _Origin,
    landed: Landed,
    tables: Sequence[Table],
    page_tokens: int,
    staging: Staging | None,
    passed: Passed | None,
) -> tuple[bool, int]:
    """Whether a batch has the bytes that were sent, and how many. Raises TransferError for a batch that cannot be.

    Nothing is read of one that came with checksums of its own.
    """
    _, pairing = origin.pairings[landed.section]
    block_ids, page_tokens = tables[landed.section].block_ids, pairing.checksum_tokens(page_tokens)
    pages = pairing.destination_pages(landed.part.layers, landed.first_token, landed.stop_token, block_ids, page_tokens)
    nbytes = int(np.sum(pages.nbytes))
    if not landed.checksums and passed is not None:
        return passed.is_whole(origin.card.instance, landed.batch, pages.addresses, pages.nbytes), nbytes
    return page_checksums(pages, staging) == landed.checksums, nbytes
