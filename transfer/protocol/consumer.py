"""The consumer's side of the protocol: grants blocks, has what lands in them checked, says when they may be read.

One rank of the decode instance. What it and one rank of the prefill instance say about one transfer is a *session*.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from transfer.plan.granularity import Batch
from transfer.plan.layout import Table
from transfer.protocol.incoming import Got, Incoming, Session, Source
from transfer.protocol.messages import Announce, AnyMessage, Close, Granted, Landed, Report, State, Status
from transfer.protocol.orders import Ending, Failed, Protocol, Revoke, Timing, Verify


class Consumer(Protocol):
    """Fetches transfers. The engine calls `announce`, then `grant` or `cancel`; see `Protocol` for the rest."""

    def __init__(self, timing: Timing | None = None) -> None:
        super().__init__(timing or Timing())
        self._transfers: dict[int, Incoming] = {}
        """By their numbers."""
        self._latest: dict[str, Incoming] = {}
        """The last of each name."""
        self._count = 0

    def announce(self, transfer: Incoming, now_s: float) -> None:
        """A request that wants this transfer, maybe without blocks yet; `found` or `fail` says more.

        It fails where another one of that name is not over.
        """
        transfer.started_s, transfer.deadline_s = now_s, now_s + self._timing.deadline_s
        known = self._latest.get(transfer.name)
        if known is not None and not known.is_over:
            self._end(transfer, Ending.FAILED, f"transfer {transfer.name!r} is under way", now_s)
        elif self._closed:
            self._end(transfer, Ending.FAILED, self._closed, now_s)
        else:
            self._count += 1
            transfer.number, transfer.earlier = self._count, known
            self._transfers[transfer.number] = self._latest[transfer.name] = transfer

    def found(self, transfer: Incoming, sources: Sequence[Source], now_s: float) -> None:
        """The ranks that have the transfer, if any; they are also told where it has ended meanwhile."""
        transfer.is_found = True
        transfer.sessions = {source.peer: Session(source, now_s, now_s) for source in sources}
        if not sources:
            self.fail(transfer, "no rank of the prefill instance has anything for this one", now_s)
        self._begin(transfer, now_s)

    def fail(self, transfer: Incoming, cause: str, now_s: float) -> None:
        """Its sources cannot be found, or its blocks not be granted."""
        self._end(transfer, Ending.FAILED, cause, now_s)

    def allocated(self, transfer: Incoming, tables: Sequence[Table], now_s: float) -> None:
        """The engine has blocks for it, and waits for its end; nothing may be written to them before `grant`."""
        if not transfer.is_over:
            transfer.spoken, transfer.tables = True, tables
            if transfer.ending is not None and not transfer.is_granted:
                self._give_ended(transfer, now_s)

    def grant(self, transfer: Incoming, tables: Sequence[Table], key: bytes, now_s: float) -> bool:
        """Let the producers write into the blocks of these tables, one of each section.

        False where the transfer has ended: nothing was granted. Raises ValueError where it has a grant.
        """
        if transfer.is_granted:
            raise ValueError(f"transfer {transfer.name!r} is granted already")
        self.allocated(transfer, tables, now_s)
        if transfer.ending is not None:
            return False
        transfer.is_granted, transfer.key = True, key
        self._begin(transfer, now_s)
        return True

    def _begin(self, transfer: Incoming, now_s: float) -> None:
        """Say what can be said, now that the sources or the blocks are known."""
        if not transfer.is_found:
            return
        transfer.deadline_s = now_s + (self._timing.deadline_s if transfer.is_granted else self._timing.hold_s)
        transfer.patient_until_s = now_s + self._timing.hold_s
        for session in transfer.sessions.values():
            session.heard_s = session.send_s = now_s
            if transfer.is_granted:
                source = session.source
                pairs = enumerate(zip(source.layers, transfer.tables, strict=True))
                session.places = sum(len(layers) * len(source.sends(at, table)) for at, (layers, table) in pairs)
                session.done = not session.places
        self._repeat(transfer, now_s)
        self._finish(transfer, now_s)

    def cancel(self, transfer: Incoming, cause: str, now_s: float) -> None:
        """The engine gives the request up; its blocks come free when nothing can write to them any more."""
        transfer.spoken = True
        if transfer.ending is None:
            self._end(transfer, Ending.CANCELLED, cause, now_s)
        elif not transfer.is_granted:
            self._give_ended(transfer, now_s)

    def verified(self, peer: str, transfer: Incoming, landed: Landed, right: bool, now_s: float) -> None:
        """A `Verify` is over. Raises ValueError where none was ordered."""
        if transfer.ending is not None:
            return
        session = transfer.sessions.get(peer)
        got = None if session is None else session.batches.get(landed.batch)
        if session is None or got is None or got.right is not None or got.landed != landed:
            raise ValueError(f"transfer {transfer.name!r}: no check of batch {landed.batch} from {peer} is under way")
        got.right = right
        if right:
            transfer.deadline_s = now_s + self._timing.deadline_s
        if not right and landed.attempt:
            self._end(transfer, Ending.FAILED, f"batch {landed.batch} came with wrong bytes twice", now_s)
            return
        while session.verified in session.batches and session.batches[session.verified].right:
            session.verified += 1
        self._report(transfer, session, now_s)
        if right:
            self._check_complete(transfer, session, now_s)

    def revoked(self, transfer: Incoming, now_s: float) -> None:
        """A `Revoke` is done."""
        self._give_ended(transfer, now_s)

    def tick(self, now_s: float) -> float | None:
        for transfer in list(self._transfers.values()):
            self._expire(transfer, now_s)
            self._repeat(transfer, now_s)
            told = transfer.sessions and all(session.closed for session in transfer.sessions.values())
            if transfer.is_over and (told or now_s >= transfer.ended_s + self._timing.lease_s):
                self._forget(transfer)
        return self._timing.retry_s / 2 if self._transfers else None

    def _forget(self, transfer: Incoming) -> None:
        transfer.earlier = None
        del self._transfers[transfer.number]
        if self._latest.get(transfer.name) is transfer:
            del self._latest[transfer.name]

    def close(self, cause: str, now_s: float) -> None:
        self._closed = cause
        for transfer in self._transfers.values():
            self._end(transfer, Ending.FAILED, cause, now_s)
            if transfer.is_granted:
                self._give_ended(transfer, now_s)
        self._transfers.clear()
        self._latest.clear()

    @property
    def held(self) -> list[str]:
        """Transfers that are not over."""
        return [transfer.name for transfer in self._transfers.values() if not transfer.is_over]

    # What producers say

    def receive(self, peer: str, message: AnyMessage, now_s: float) -> None:
        if not isinstance(message, Landed | Status):
            return
        transfer = self._transfers.get(message.number)
        session = None if transfer is None else transfer.sessions.get(peer)
        if transfer is None or session is None or transfer.name != message.transfer:
            if not (isinstance(message, Status) and message.state is State.CLOSED):
                fields = {"destinations": 0, "done": False, "cause": "the transfer is not known here, or not any more"}
                self._send(peer, Close, message.transfer, number=message.number, **fields)
            return
        session.heard_s = now_s
        session.accepted = session.accepted or isinstance(message, Landed) or message.has_grant
        if isinstance(message, Status):
            self._status(transfer, session, message, now_s)
        elif transfer.ending is None and transfer.is_granted:
            self._landed(transfer, session, message, now_s)

    def _status(self, transfer: Incoming, session: Session, message: Status, now_s: float) -> None:
        if transfer.ending is not None:
            if message.state is State.CLOSED:
                session.closed = True
                self._go_on(transfer, session.source.peer, now_s)
        elif message.state is not State.OPEN:
            cause = f"the producer gave up: {message.cause or message.state.value}"
            self._end(transfer, Ending.FAILED, cause, now_s)
        elif message.computes and transfer.is_granted:
            patient_s = min(now_s + self._timing.deadline_s, transfer.patient_until_s)
            transfer.deadline_s = max(transfer.deadline_s, patient_s)

    def _go_on(self, earlier: Incoming, peer: str, now_s: float) -> None:
        """The producer knows now that this transfer is over, and may hear of the next one of its name."""
        later = self._latest.get(earlier.name)
        while later is not None and later.earlier is not earlier:
            later = later.earlier
        session = None if later is None else later.sessions.get(peer)
        if later is not None and session is not None:
            session.heard_s = session.send_s = now_s
            self._repeat(later, now_s)

    def _landed(self, transfer: Incoming, session: Session, message: Landed, now_s: float) -> None:
        got = session.batches.get(message.batch)
        if got is not None and not (got.right is False and message.attempt > got.landed.attempt):
            if got.right is not None:
                self._report(transfer, session, now_s)  # what was said before got lost
            return
        inside = message.section < len(transfer.tables)
        if inside:
            layers = session.source.layers[message.section]
            tokens = session.source.sends(message.section, transfer.tables[message.section])
            inside = layers.start <= message.first_layer < message.first_layer + message.num_layers <= layers.stop
            inside = inside and tokens.start <= message.first_token < message.stop_token <= tokens.stop
        if not inside or message.batch >= session.places:
            self._end(transfer, Ending.FAILED, f"a batch is not in what was granted: {message}"[:512], now_s)
            return
        session.batches[message.batch] = Got(message, message.part)
        self._orders.append(Verify(session.source.peer, transfer, message))

    def needs(self, address: tuple[str, int], peers: Collection[str]) -> bool:
        """Whether a transfer of the instance there has not ended, or one of its ranks has not confirmed the end."""
        return any(
            (transfer.ending is None and transfer.where.address == address)
            or any(peer in peers and not session.closed for peer, session in transfer.sessions.items())
            for transfer in self._transfers.values()
        )

    def lost(self, peer: str, now_s: float) -> None:
        """The peer's process is gone for certain; what was begun with it fails."""
        for transfer in list(self._transfers.values()):
            session = transfer.sessions.get(peer)
            if session is not None:
                session.closed = True
                self._end(transfer, Ending.FAILED, "the producer is gone", now_s)

    def refused(self, peer: str, cause: str, now_s: float) -> None:
        """No transport of the peer reaches this rank: what was begun with it fails, and it is told so."""
        for transfer in list(self._transfers.values()):
            if peer in transfer.sessions:
                self._end(transfer, Ending.FAILED, cause, now_s)

    # How a transfer ends

    def _check_complete(self, transfer: Incoming, session: Session, now_s: float) -> None:
        """Whether everything has landed, each layer and token in one batch."""
        batches = [got.part for got in session.batches.values() if got.right]
        places = sum(batch.places for batch in batches)
        if places < session.places:
            return
        by_section: dict[int, list[Batch]] = {}
        for batch in batches:
            by_section.setdefault(batch.section, []).append(batch)
        layers = session.source.layers
        if places == session.places and not any(_overlap(layers[at], of) for at, of in by_section.items()):
            session.done = True
            self._finish(transfer, now_s)
        else:
            self._end(transfer, Ending.FAILED, "batches overlap", now_s)

    def _finish(self, transfer: Incoming, now_s: float) -> None:
        if transfer.sessions and all(session.done for session in transfer.sessions.values()):
            self._end(transfer, Ending.DONE, "", now_s)

    def _end(self, transfer: Incoming, ending: Ending, cause: str, now_s: float) -> None:
        if transfer.ending is not None:
            return
        transfer.ending, transfer.cause, transfer.ended_s = ending, cause[:512], now_s
        for session in transfer.sessions.values():
            session.send_s = now_s + self._timing.retry_s
            if not session.closed and transfer.may_be_told(session.source.peer):
                self._close(transfer, session)
        if transfer.is_granted:
            self._orders.append(Revoke(transfer))
        elif transfer.spoken:
            self._give_ended(transfer, now_s)
        else:
            self._orders.append(Failed(transfer))

    def _expire(self, transfer: Incoming, now_s: float) -> None:
        if transfer.ending is None and now_s >= transfer.deadline_s:
            cause = f"nothing arrived for {self._timing.deadline_s:g} s"
            if not transfer.is_granted:
                cause = f"no blocks were granted for {self._timing.hold_s:g} s"
            elif transfer.deadline_s == transfer.patient_until_s:
                cause = f"prefill was not over {self._timing.hold_s:g} s after blocks were granted"
            if not transfer.is_found:
                cause = "the prefill instance did not answer by the deadline"
            self._end(transfer, Ending.EXPIRED, cause, now_s)
        earlier = transfer.earlier
        if earlier is not None and earlier.number not in self._transfers and transfer.is_found:
            if all(earlier.is_known_by(peer) for peer in transfer.sessions):
                transfer.earlier = None
            else:  # who does not know that end is told nothing of this one either
                cause = "the producer did not say that it knows the end of an earlier transfer of this name"
                self._end(transfer, Ending.FAILED, cause, now_s)
        for session in transfer.sessions.values():
            if not session.done and now_s >= session.heard_s + self._timing.lease_s:
                cause = f"the producer said nothing for {self._timing.lease_s:g} s"
                self._end(transfer, Ending.FAILED, cause, now_s)

    # What the consumer says

    def _repeat(self, transfer: Incoming, now_s: float) -> None:
        for session in transfer.sessions.values():
            if now_s < session.send_s or (transfer.ending is not None and session.closed):
                continue
            if not transfer.may_be_told(session.source.peer):
                continue
            session.send_s = now_s + self._timing.retry_s
            if transfer.ending is not None:
                self._close(transfer, session)
            elif transfer.is_granted and any(session.source.layers) and not session.accepted:
                self._grant(transfer, session)
            elif transfer.is_granted and any(session.source.layers):
                self._report(transfer, session, now_s)
            else:
                fields = {"destinations": session.source.destinations, "computed": transfer.computed}
                self._say(session.source.peer, Announce, transfer, **fields)
                session.send_s = now_s + self._timing.heartbeat_s

    def _grant(self, transfer: Incoming, session: Session) -> None:
        fields = {"destinations": session.source.destinations, "computed": transfer.computed, "key": transfer.key}
        tables = list(transfer.tables)
        self._say(session.source.peer, Granted, transfer, tables=tables, **fields)

    def _report(self, transfer: Incoming, session: Session, now_s: float) -> None:
        again = session.again()
        session.send_s = now_s + (self._timing.retry_s if again else self._timing.heartbeat_s)
        fields = {"verified": session.verified, "again": again}
        self._say(session.source.peer, Report, transfer, **fields)

    def _say(
        self, peer: str, kind: type[Announce | Granted | Report | Close], transfer: Incoming, **fields: Any
    ) -> None:
        self._send(peer, kind, transfer.name, number=transfer.number, prompt=transfer.prompt, **fields)

    def _close(self, transfer: Incoming, session: Session) -> None:
        done = transfer.ending is Ending.DONE
        fields = {"destinations": session.source.destinations, "done": done, "cause": transfer.cause}
        self._say(session.source.peer, Close, transfer, **fields)


def _overlap(layers: range, batches: Sequence[Batch]) -> bool:
    """Whether batches of a section have a layer and token in common."""
    cuts = sorted({cut for batch in batches for cut in (batch.first_token, batch.stop_token)})
    column = {cut: number for number, cut in enumerate(cuts)}
    count = np.zeros((len(layers), len(cuts) - 1), dtype=np.int32)
    for batch in batches:
        first = batch.first_layer - layers.start
        count[first : first + batch.num_layers, column[batch.first_token] : column[batch.stop_token]] += 1
    return bool((count > 1).any())
