"""The consumer's half of the PD protocol: grants blocks, has what lands in them checked, says when they may be read.

One rank of the decode instance. What one rank of the prefill instance sends it for one transfer is a *leg*.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import numpy as np

from transfer.protocol.messages import (
    MAX_NAME_LENGTH,
    Announce,
    AnyMessage,
    Close,
    Granted,
    Landed,
    Report,
    State,
    Status,
)
from transfer.protocol.orders import Ending, Half, Release, Revoke, Timing, Verify
from transfer.transports.base import GRANT_KEY_NBYTES


@dataclass(frozen=True, slots=True)
class Source:
    """A rank of the prefill instance that has a route to this rank (`transfer.plan.pairing.routes`).

    Args:
        generation: the life of it that has the KV, if known; else 0.
        layers: what it sends; empty where it only has to be told that the transfer is over.
        legs: how many ranks of this rank's instance have a route from it.
    """

    peer: str
    generation: int
    layers: range
    legs: int


@dataclass(slots=True)
class _Got:
    """A batch that landed; `right` is None while it is being checked."""

    landed: Landed
    right: bool | None = None


@dataclass(slots=True)
class _Leg:
    source: Source
    life: int
    send_s: float
    heard_s: float = 0.0
    accepted: bool = False
    """The producer has the grant."""
    batches: dict[int, _Got] = field(default_factory=dict)
    verified: int = 0
    done: bool = False
    closed: bool = False
    """The producer knows that we are through."""

    def again(self) -> list[int]:
        return [number for number, got in self.batches.items() if got.right is False]


@dataclass(slots=True)
class _Transfer:
    name: str
    legs: dict[str, _Leg]
    computed: bool
    deadline_s: float
    grant: int = 0
    tokens: range = range(0)
    block_ids: list[int] = field(default_factory=list)
    key: bytes = b""
    ending: Ending | None = None
    cause: str = ""
    ended_s: float = 0.0
    released: bool = False


class Consumer(Half):
    """Fetches transfers. The engine calls `announce`, then `grant` or `cancel`; see `Half` for the rest."""

    _other = "producer"

    def __init__(self, generation: int, timing: Timing | None = None) -> None:
        super().__init__(generation, timing or Timing())
        self._transfers: dict[str, _Transfer] = {}
        self._grants = 0

    def announce(
        self,
        transfer: str,
        sources: Sequence[Source],
        now_s: float,
        *,
        computed: bool,
        deadline_s: float | None = None,
    ) -> None:
        """A request that wants this transfer, maybe without blocks yet; there will be one Release for it.

        Args:
            computed: the request was at the producer first, which must know it.
            deadline_s: seconds until it is given up; `Timing.deadline_s` by default.

        Raises ValueError for a name whose earlier transfer is not released or that is too long, or without sources.
        """
        if len(transfer) > MAX_NAME_LENGTH:
            raise ValueError(f"transfer {transfer[:64]!r}...: a name of {len(transfer)} characters")
        known = self._transfers.get(transfer)
        if not sources or (known is not None and not known.released):
            raise ValueError(f"transfer {transfer!r} is under way, or has no sources")
        legs = {source.peer: _Leg(source, source.generation, now_s) for source in sources}
        deadline_s = now_s + (self._timing.deadline_s if deadline_s is None else deadline_s)
        known = self._transfers[transfer] = _Transfer(transfer, legs, computed, deadline_s)
        for leg in legs.values():
            life = self._lives.get(leg.source.peer, 0)
            if leg.life > life:
                self.met(leg.source.peer, leg.life, now_s)
            elif leg.life and leg.life != life:
                leg.closed = True
                self._end(known, Ending.FAILED, "the producer restarted", now_s)
        self._repeat(known, now_s)

    def grant(
        self, transfer: str, first_token: int, stop_token: int, block_ids: Sequence[int], key: bytes, now_s: float
    ) -> bool:
        """Let the producers write tokens `[first_token, stop_token)` into these blocks, the request's whole table.

        False where the transfer is over already: it has its Release, and nothing was granted. Raises ValueError where
        it has a grant, or for tokens or a key that cannot be.
        """
        if not 0 <= first_token <= stop_token or len(key) != GRANT_KEY_NBYTES:
            raise ValueError(f"transfer {transfer!r}: tokens {first_token}..{stop_token - 1}, key of {len(key)} bytes")
        known = self._transfers.get(transfer)
        if known is None or known.ending is not None:
            return False
        if known.grant:
            raise ValueError(f"transfer {transfer!r} is granted already")
        self._grants += 1
        known.grant, known.key = self._grants, key
        known.tokens, known.block_ids = range(first_token, stop_token), list(block_ids)
        for leg in known.legs.values():
            leg.heard_s = leg.send_s = now_s
            leg.done = not (leg.source.layers and known.tokens)
        self._repeat(known, now_s)
        self._finish(known, now_s)
        return True

    def cancel(self, transfer: str, cause: str, now_s: float) -> None:
        """The engine gives the request up; its blocks come free when nothing can write to them any more."""
        known = self._transfers.get(transfer)
        if known is not None:
            self._end(known, Ending.CANCELLED, cause, now_s)

    def verified(self, peer: str, transfer: str, landed: Landed, right: bool, now_s: float) -> None:
        """A `Verify` is over. Raises ValueError where none was ordered."""
        known = self._transfers.get(transfer)
        if known is None or known.ending is not None or known.grant != landed.grant:
            return
        leg = known.legs.get(peer)
        got = None if leg is None else leg.batches.get(landed.batch)
        if leg is None or got is None or got.right is not None or got.landed != landed:
            raise ValueError(f"transfer {transfer!r}: no check of batch {landed.batch} from {peer} is under way")
        got.right = right
        if not right and landed.attempt:
            self._end(known, Ending.FAILED, f"batch {landed.batch} came with wrong bytes twice", now_s)
            return
        while leg.verified in leg.batches and leg.batches[leg.verified].right:
            leg.verified += 1
        self._report(known, leg, now_s)
        if right:
            self._check_complete(known, leg, now_s)

    def revoked(self, transfer: str, now_s: float) -> None:
        """A `Revoke` is done."""
        known = self._transfers.get(transfer)
        if known is not None and known.ending is not None:
            self._release(known)

    def tick(self, now_s: float) -> float | None:
        for known in list(self._transfers.values()):
            self._expire(known, now_s)
            self._repeat(known, now_s)
            over = all(leg.closed for leg in known.legs.values()) or now_s >= known.ended_s + self._timing.lease_s
            if known.released and over:
                del self._transfers[known.name]
        return self._timing.retry_s / 2 if self._transfers else None

    @property
    def held(self) -> list[str]:
        """Transfers that are not released."""
        return [name for name, known in self._transfers.items() if not known.released]

    # What producers say

    def _handle(self, peer: str, message: AnyMessage, now_s: float) -> None:
        if not isinstance(message, Landed | Status):
            return
        known = self._transfers.get(message.transfer)
        leg = None if known is None else known.legs.get(peer)
        if known is None or leg is None or message.grant not in (0, known.grant):
            if not (isinstance(message, Status) and message.state is State.CLOSED):
                fields = {"legs": 0, "done": False, "cause": "the transfer is not known here, or not any more"}
                self._send(peer, Close, message.transfer, to=message.generation, grant=message.grant, **fields)
            return
        leg.heard_s = now_s
        leg.life = leg.life or message.generation
        leg.accepted = leg.accepted or message.grant != 0
        if isinstance(message, Status):
            self._status(known, leg, message, now_s)
        elif known.ending is None and message.grant:
            self._landed(known, leg, message, now_s)

    def _status(self, known: _Transfer, leg: _Leg, message: Status, now_s: float) -> None:
        if known.ending is not None:
            leg.closed = leg.closed or message.state is State.CLOSED
        elif message.state is not State.OPEN:
            self._end(known, Ending.FAILED, f"the producer gave up: {message.cause or message.state.value}", now_s)

    def _landed(self, known: _Transfer, leg: _Leg, message: Landed, now_s: float) -> None:
        got = leg.batches.get(message.batch)
        if got is not None and not (got.right is False and message.attempt > got.landed.attempt):
            if got.right is not None:
                self._report(known, leg, now_s)  # what was said before got lost
            return
        layers, tokens = leg.source.layers, known.tokens
        inside = layers.start <= message.first_layer < message.first_layer + message.num_layers <= layers.stop
        inside = inside and tokens.start <= message.first_token < message.stop_token <= tokens.stop
        if not inside or message.batch >= len(layers) * len(tokens):
            self._end(known, Ending.FAILED, f"a batch is not in what was granted: {message}"[:512], now_s)
            return
        leg.batches[message.batch] = _Got(message)
        self._orders.append(Verify(leg.source.peer, known.name, message))

    def owes(self, peer: str) -> bool:
        """Whether the peer has not confirmed the end of a transfer: it holds blocks for it."""
        legs = [known.legs.get(peer) for known in self._transfers.values()]
        return any(leg is not None and not leg.closed for leg in legs)

    def _deals_with(self, peer: str) -> bool:
        return any(peer in known.legs for known in self._transfers.values())

    def _fail_begun(self, peer: str, spared: Container[int], cause: str, now_s: float) -> None:
        for known in list(self._transfers.values()):
            leg = known.legs.get(peer)
            if leg is not None and leg.life not in spared:
                leg.closed = True
                self._end(known, Ending.FAILED, cause, now_s)

    # How a transfer ends

    def _check_complete(self, known: _Transfer, leg: _Leg, now_s: float) -> None:
        """Whether everything has landed, each layer and token in one batch."""
        batches = [got.landed for got in leg.batches.values() if got.right]
        cells = sum(batch.num_layers * (batch.stop_token - batch.first_token) for batch in batches)
        if cells < len(leg.source.layers) * len(known.tokens):
            return
        cuts = sorted({cut for batch in batches for cut in (batch.first_token, batch.stop_token)})
        column = {cut: number for number, cut in enumerate(cuts)}
        count = np.zeros((len(leg.source.layers), len(cuts) - 1), dtype=np.int32)
        for batch in batches:
            first = batch.first_layer - leg.source.layers.start
            count[first : first + batch.num_layers, column[batch.first_token] : column[batch.stop_token]] += 1
        if (count == 1).all():
            leg.done = True
            self._finish(known, now_s)
        else:
            self._end(known, Ending.FAILED, "batches overlap", now_s)

    def _finish(self, known: _Transfer, now_s: float) -> None:
        if all(leg.done for leg in known.legs.values()):
            self._end(known, Ending.DONE, "", now_s)

    def _end(self, known: _Transfer, ending: Ending, cause: str, now_s: float) -> None:
        if known.ending is not None:
            return
        known.ending, known.cause, known.ended_s = ending, cause[:512], now_s
        for leg in known.legs.values():
            leg.send_s = now_s + self._timing.retry_s
            if not leg.closed:
                self._close(known, leg)
        if known.grant:
            self._orders.append(Revoke(known.name))
        else:
            self._release(known)

    def _release(self, known: _Transfer) -> None:
        if not known.released:
            assert known.ending is not None
            known.released = True
            self._orders.append(Release(known.name, known.ending, known.cause))

    def _expire(self, known: _Transfer, now_s: float) -> None:
        if known.ending is None and now_s >= known.deadline_s:
            self._end(known, Ending.EXPIRED, "not complete by its deadline", now_s)
        for leg in known.legs.values():
            if known.grant and not leg.done and now_s >= leg.heard_s + self._timing.lease_s:
                cause = f"the producer said nothing for {self._timing.lease_s:g} s"
                self._end(known, Ending.FAILED, cause, now_s)

    # What the consumer says

    def _repeat(self, known: _Transfer, now_s: float) -> None:
        for leg in known.legs.values():
            if now_s < leg.send_s or (known.ending is not None and leg.closed):
                continue
            leg.send_s = now_s + self._timing.retry_s
            if known.ending is not None:
                self._close(known, leg)
            elif known.grant and leg.source.layers and not leg.accepted:
                self._grant(known, leg)
            elif known.grant and leg.source.layers:
                self._report(known, leg, now_s)
            else:
                fields = {"legs": leg.source.legs, "computed": known.computed}
                self._send(leg.source.peer, Announce, known.name, to=leg.life, grant=known.grant, **fields)
                leg.send_s = now_s + self._timing.heartbeat_s

    def _grant(self, known: _Transfer, leg: _Leg) -> None:
        self._send(
            leg.source.peer,
            Granted,
            known.name,
            to=leg.life,
            grant=known.grant,
            legs=leg.source.legs,
            computed=known.computed,
            first_token=known.tokens.start,
            stop_token=known.tokens.stop,
            block_ids=known.block_ids,
            key=known.key,
        )

    def _report(self, known: _Transfer, leg: _Leg, now_s: float) -> None:
        again = leg.again()
        leg.send_s = now_s + (self._timing.retry_s if again else self._timing.heartbeat_s)
        fields = {"verified": leg.verified, "again": again}
        self._send(leg.source.peer, Report, known.name, to=leg.life, grant=known.grant, **fields)

    def _close(self, known: _Transfer, leg: _Leg) -> None:
        fields = {"legs": leg.source.legs, "done": known.ending is Ending.DONE, "cause": known.cause}
        self._send(leg.source.peer, Close, known.name, to=leg.life, grant=known.grant, **fields)
