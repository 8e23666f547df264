"""The producer's half of the PD protocol: holds blocks until every consumer rank has them, or its time is over.

One rank of the prefill instance. What it says to one rank of the decode instance about one transfer is a *leg*.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from transfer.plan.granularity import Batch, Divider, Granularity
from transfer.protocol.messages import Announce, AnyMessage, Close, Granted, Landed, Report, State, Status
from transfer.protocol.orders import Abandon, Ending, Half, Release, Timing, Write
from transfer.transports.base import TransferError

_MAX_STRANGERS = 4096
"""Transfers that consumers ask for and the engine has not named yet."""
_MAX_REPEATED = 32
_ALL_LAYERS = 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """How one leg is divided: see `transfer.plan.granularity.Divider`. Without layers there is nothing to send."""

    granularity: Granularity
    layers: range
    unit: int
    min_layers: int = 1


ShapeOf: TypeAlias = Callable[[str, Granted], Shape]
"""The leg of (peer, what it granted). Raises TransferError where the layouts cannot be mapped."""


@dataclass(slots=True)
class _Sent:
    """A batch; `checksums` is None while it is being written."""

    batch: Batch
    attempt: int = 0
    checksums: Sequence[int] | None = None


@dataclass(slots=True)
class _Leg:
    peer: str
    heard_s: float
    send_s: float
    granted: Granted | None = None
    divider: Divider | None = None
    sent: list[_Sent] = field(default_factory=list)
    verified: int = 0
    writing: set[int] = field(default_factory=set)
    """Batches that a write reads."""
    state: State = State.OPEN
    ending: Ending | None = None
    cause: str = ""

    @property
    def unheard(self) -> list[int]:
        """Batches that landed and that the consumer has not confirmed."""
        return [n for n in range(self.verified, len(self.sent)) if self.sent[n].checksums is not None]


@dataclass(slots=True)
class _Transfer:
    name: str
    heard_s: float
    opened: bool = False
    legs: dict[str, _Leg] = field(default_factory=dict)
    expected: int = 0
    """Legs that there will be; 0 while unknown."""
    progress: list[tuple[int, int]] = field(default_factory=list)
    """(layer, token): all layers up to this one have the KV of the tokens before."""
    computed_s: float | None = None
    ending: Ending | None = None
    cause: str = ""
    released_s: float | None = None


class Producer(Half):
    """Serves transfers: the engine calls `open`, then `computed` and `finished`, or `cancel`. See also `Half`.

    Calls about a transfer that is not open, or not any more, raise ValueError.
    """

    _other = "consumer"

    def __init__(self, generation: int, shape_of: ShapeOf, timing: Timing | None = None) -> None:
        super().__init__(generation, timing or Timing())
        self._shape_of = shape_of
        self._transfers: dict[str, _Transfer] = {}

    def open(self, transfer: str, now_s: float) -> None:
        """A request whose KV a consumer will want; there will be one Release for it.

        Raises ValueError for a name in use. A name may return once the earlier transfer has been forgotten.
        """
        known = self._transfers.get(transfer)
        if known is None:
            known = self._transfers[transfer] = _Transfer(transfer, now_s)
        if known.opened:
            raise ValueError(f"transfer {transfer!r} is or was open here")
        known.opened = True
        for leg in known.legs.values():
            self._start(known, leg)
        self._settle(known, now_s)

    def computed(self, transfer: str, layer: int, stop_token: int, now_s: float) -> None:
        """All layers of this rank up to `layer` have the KV of the request's tokens before `stop_token`."""
        self._compute(self._computing(transfer), layer, stop_token, now_s)

    def _compute(self, known: _Transfer, layer: int, stop_token: int, now_s: float) -> None:
        known.progress = [(at, stop) for at, stop in known.progress if at > layer or stop > stop_token]
        known.progress.append((layer, stop_token))
        for leg in known.legs.values():
            self._advance(known, leg, layer, stop_token)
        self._settle(known, now_s)

    def finished(self, transfer: str, num_tokens: int, now_s: float) -> None:
        """Prefill is over, with the KV of so many tokens; the lease begins."""
        known = self._computing(transfer)
        known.computed_s = now_s
        self._compute(known, _ALL_LAYERS, num_tokens, now_s)
        for leg in known.legs.values():
            self._check_enough(known, leg)
        self._settle(known, now_s)

    def preempted(self, transfer: str, now_s: float) -> None:
        """The engine took the blocks in mid-prefill, and will compute again from the start.

        Where a batch was begun the transfer ends: what landed came from blocks that are gone, and what is being read
        may change under the write, whose outcome counts for nothing any more.
        """
        known = self._computing(transfer)
        if any(leg.sent for leg in known.legs.values()):
            self._end(known, Ending.CANCELLED, "preempted", now_s)
        else:
            known.progress.clear()

    def cancel(self, transfer: str, cause: str, now_s: float) -> None:
        """The engine gives the request up; its blocks come free when no write reads them any more."""
        self._end(self._mine(transfer), Ending.CANCELLED, cause, now_s)

    def written(
        self,
        peer: str,
        transfer: str,
        number: int,
        checksums: Sequence[int],
        error: str | None,
        now_s: float,
    ) -> None:
        """A `Write` is over: with one checksum for each page, or with what went wrong.

        Raises ValueError where none was ordered.
        """
        known = self._transfers.get(transfer)
        leg = None if known is None else known.legs.get(peer)
        if known is None or leg is None or number not in leg.writing:
            raise ValueError(f"transfer {transfer!r}: no write of batch {number} to {peer} is under way")
        leg.writing.remove(number)
        if leg.state is State.OPEN:
            if error is not None:
                self._fail(known, leg, Ending.FAILED, error)
            else:
                leg.sent[number].checksums = checksums
                self._say_landed(known, leg, number)
                leg.send_s = min(leg.send_s, now_s + self._timing.retry_s)
        self._settle(known, now_s)

    def tick(self, now_s: float) -> float | None:
        for known in list(self._transfers.values()):
            self._expire(known, now_s)
            for leg in known.legs.values():
                if now_s >= leg.send_s:
                    self._repeat(known, leg, now_s)
        return self._timing.retry_s / 2 if self._transfers else None

    @property
    def held(self) -> list[str]:
        """Transfers whose blocks are not released."""
        return [name for name, known in self._transfers.items() if known.opened and known.released_s is None]

    def _mine(self, transfer: str) -> _Transfer:
        known = self._transfers.get(transfer)
        if known is None or not known.opened:
            raise ValueError(f"transfer {transfer!r} is not open here")
        return known

    def _computing(self, transfer: str) -> _Transfer:
        known = self._mine(transfer)
        if known.computed_s is not None:
            raise ValueError(f"transfer {transfer!r} is finished already")
        return known

    # What consumers say

    def _handle(self, peer: str, message: AnyMessage, now_s: float) -> None:
        if not isinstance(message, Announce | Granted | Report | Close):
            return
        known = self._transfers.get(message.transfer)
        if known is None:
            refusal = self._refusal(message)
            if refusal is not None:
                state = State.CLOSED if isinstance(message, Close) else State.FAILED
                fields = {"state": state, "cause": refusal, "grant": message.grant}
                self._send(peer, Status, message.transfer, to=message.generation, **fields)
                return
            known = self._transfers[message.transfer] = _Transfer(message.transfer, now_s)
        leg = known.legs.get(peer)
        if leg is None:
            leg = known.legs[peer] = _Leg(peer, now_s, now_s + self._timing.heartbeat_s)
            if known.ending is not None:
                self._fail(known, leg, known.ending, f"the transfer is over: {known.cause or known.ending.value}")
        known.heard_s = leg.heard_s = now_s
        if not isinstance(message, Report) and message.legs:
            known.expected = message.legs
        if isinstance(message, Close):
            self._close(known, leg, message)
        elif isinstance(message, Report):
            self._report(known, leg, message)
        else:
            self._ask(known, leg, message)
        self._settle(known, now_s)

    def _refusal(self, message: Announce | Granted | Report | Close) -> str | None:
        """Why an unknown transfer is not waited for, if it is not."""
        if isinstance(message, Report) or (isinstance(message, Announce | Granted) and message.computed):
            return "the transfer is not known here, or not any more"
        strangers = sum(not known.opened for known in self._transfers.values())
        return "too many transfers are awaited" if strangers >= _MAX_STRANGERS else None

    def _ask(self, known: _Transfer, leg: _Leg, message: Announce | Granted) -> None:
        if isinstance(message, Granted) and leg.state is State.OPEN:
            if leg.granted is None:
                leg.granted = message
                self._start(known, leg)
            elif leg.granted.grant != message.grant:
                fields = {"state": State.FAILED, "cause": "the transfer was granted before", "grant": message.grant}
                self._send(leg.peer, Status, known.name, to=self._lives[leg.peer], **fields)
                return
        self._say_status(known, leg, message.grant)

    def _report(self, known: _Transfer, leg: _Leg, message: Report) -> None:
        if leg.state is not State.OPEN:
            self._say_status(known, leg, message.grant)
        elif leg.granted is not None and message.grant == leg.granted.grant:
            leg.verified = max(leg.verified, message.verified)
            for number in message.again:
                if number < len(leg.sent) and leg.sent[number].checksums is not None and not leg.sent[number].attempt:
                    leg.sent[number].attempt, leg.sent[number].checksums = 1, None
                    self._write(known, leg, number)

    def _close(self, known: _Transfer, leg: _Leg, message: Close) -> None:
        if leg.state is State.OPEN and leg.granted is not None and leg.granted.grant != message.grant:
            return
        if leg.ending is None:
            leg.ending, leg.cause = (Ending.DONE if message.done else Ending.CANCELLED), message.cause
        leg.state = State.CLOSED
        if leg.writing:
            self._orders.append(Abandon(leg.peer, known.name))
        self._say_status(known, leg, message.grant)

    def _deals_with(self, peer: str) -> bool:
        return any(peer in known.legs for known in self._transfers.values())

    def _fail_begun(self, peer: str, spared: Container[int], cause: str, now_s: float) -> None:
        for known in list(self._transfers.values()):
            leg = known.legs.get(peer)
            if leg is not None:  # made by a message of the life that was known then, so of none that is spared
                self._fail(known, leg, Ending.FAILED, cause)
                if peer in self._lost:
                    leg.state = State.CLOSED  # nobody is left to be told
                self._settle(known, now_s)

    # What happens to a leg

    def _start(self, known: _Transfer, leg: _Leg) -> None:
        """Send what has been computed, once both the engine and the consumer have named the transfer."""
        granted = leg.granted
        if not known.opened or granted is None or leg.state is not State.OPEN:
            return
        try:
            shape = self._shape_of(leg.peer, granted)
        except TransferError as error:
            self._fail(known, leg, Ending.FAILED, str(error))
            return
        tokens = range(granted.first_token, granted.stop_token)
        if not shape.layers or not tokens:
            return
        if tokens.start % shape.unit:
            cause = f"tokens from {tokens.start} on are wanted where {shape.unit} are moved together"
            self._fail(known, leg, Ending.FAILED, cause)
            return
        leg.divider = Divider(shape.granularity, shape.layers, tokens, shape.unit, shape.min_layers)
        for layer, stop_token in known.progress:
            self._advance(known, leg, layer, stop_token)
        self._check_enough(known, leg)

    def _advance(self, known: _Transfer, leg: _Leg, layer: int, stop_token: int) -> None:
        if leg.divider is None or leg.state is not State.OPEN:
            return
        for batch in leg.divider.computed(layer, stop_token):
            leg.sent.append(_Sent(batch))
            self._write(known, leg, len(leg.sent) - 1)

    def _write(self, known: _Transfer, leg: _Leg, number: int) -> None:
        assert leg.granted is not None
        leg.writing.add(number)
        sent = leg.sent[number]
        self._orders.append(Write(leg.peer, known.name, leg.granted, number, sent.attempt, sent.batch))

    def _check_enough(self, known: _Transfer, leg: _Leg) -> None:
        if known.computed_s is not None and leg.divider is not None and not leg.divider.complete:
            self._fail(known, leg, Ending.FAILED, "fewer tokens were computed than are wanted")

    def _fail(self, known: _Transfer, leg: _Leg, ending: Ending, cause: str) -> None:
        if leg.state is not State.OPEN:
            return
        leg.state, leg.ending, leg.cause = State.FAILED, ending, cause[:512]
        if leg.writing:
            self._orders.append(Abandon(leg.peer, known.name))
        self._say_status(known, leg)
        leg.send_s = 0.0  # and again from the next tick on

    # How a transfer ends

    def _end(self, known: _Transfer, ending: Ending, cause: str, now_s: float) -> None:
        if known.ending is None:
            known.ending, known.cause = ending, cause
            for leg in known.legs.values():
                self._fail(known, leg, ending, cause)
            self._settle(known, now_s)

    def _settle(self, known: _Transfer, now_s: float) -> None:
        """Release the blocks once no leg wants them and no write reads them."""
        legs = list(known.legs.values())
        if not known.opened or known.released_s is not None or any(leg.writing for leg in legs):
            return
        if known.ending is None:
            if not known.expected or len(legs) < known.expected or any(leg.ending is None for leg in legs):
                return
            worst = next((leg for leg in legs if leg.ending is not Ending.DONE), legs[0])
            known.ending, known.cause = worst.ending, worst.cause
        assert known.ending is not None
        known.released_s = now_s
        self._orders.append(Release(known.name, known.ending, known.cause))

    def _expire(self, known: _Transfer, now_s: float) -> None:
        lease_s = self._timing.lease_s
        if known.released_s is not None or not known.opened:
            if now_s >= (known.heard_s if known.released_s is None else known.released_s) + lease_s:
                del self._transfers[known.name]
            return
        for leg in known.legs.values():
            if now_s >= leg.heard_s + lease_s:
                self._fail(known, leg, Ending.EXPIRED, f"the consumer said nothing for {lease_s:g} s")
        if known.computed_s is not None:
            if now_s >= max(known.heard_s, known.computed_s) + lease_s:
                self._end(known, Ending.EXPIRED, f"no consumer asked for it for {lease_s:g} s", now_s)
            elif now_s >= known.computed_s + self._timing.hold_s:
                self._end(known, Ending.EXPIRED, f"held for {self._timing.hold_s:g} s", now_s)
        self._settle(known, now_s)

    # What the producer says

    def _repeat(self, known: _Transfer, leg: _Leg, now_s: float) -> None:
        leg.send_s = now_s + self._timing.heartbeat_s
        if leg.state is State.CLOSED or now_s >= leg.heard_s + self._timing.lease_s:
            return
        self._say_status(known, leg)
        unheard = leg.unheard if leg.state is State.OPEN else []
        for number in unheard[:_MAX_REPEATED]:
            self._say_landed(known, leg, number)
        if unheard or leg.state is State.FAILED:
            leg.send_s = now_s + self._timing.retry_s

    def _say_status(self, known: _Transfer, leg: _Leg, grant: int | None = None) -> None:
        if grant is None:
            grant = 0 if leg.granted is None else leg.granted.grant
        self._send(
            leg.peer, Status, known.name, to=self._lives[leg.peer], grant=grant, state=leg.state, cause=leg.cause
        )

    def _say_landed(self, known: _Transfer, leg: _Leg, number: int) -> None:
        sent = leg.sent[number]
        assert leg.granted is not None and sent.checksums is not None
        self._send(
            leg.peer,
            Landed,
            known.name,
            to=self._lives[leg.peer],
            grant=leg.granted.grant,
            batch=number,
            attempt=sent.attempt,
            first_layer=sent.batch.first_layer,
            num_layers=sent.batch.num_layers,
            first_token=sent.batch.first_token,
            stop_token=sent.batch.stop_token,
            checksums=list(sent.checksums),
        )
