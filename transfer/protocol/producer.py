"""The producer's side of the protocol: holds blocks until every consumer rank has them, or their time is over.

One rank of the prefill instance. What it and one rank of the decode instance say about one transfer is a *session*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeAlias

from transfer.plan.granularity import Batch, Divider
from transfer.protocol.messages import Announce, AnyMessage, Close, Granted, Landed, Report, State, Status
from transfer.protocol.orders import Abandon, Ending, Protocol, Timing, Write
from transfer.protocol.outgoing import Outgoing, Progress, Sent, Session
from transfer.transports.base import TransferError

_MAX_AWAITED = 4096
"""Transfers that consumers ask for and the engine has not named yet."""
_MAX_REPEATED = 32
_ANOTHER_PROMPT = "the request here has another prompt: its name must be new for each request"

Divide: TypeAlias = Callable[[str, Granted], list[Divider]]
"""How each section is sent of which (peer, what it granted) gets anything. Raises TransferError where it cannot be."""


class Producer(Protocol):
    """Serves transfers: the engine calls `open`, then `computed` and `finished`, or `cancel`. See also `Protocol`."""

    def __init__(self, divide: Divide, timing: Timing | None = None, *, names_return: bool = False) -> None:
        super().__init__(timing or Timing())
        self._divide, self._names_return = divide, names_return
        self._transfers: dict[str, Outgoing] = {}

    def open(self, transfer: Outgoing, now_s: float) -> None:
        """A request begins whose KV a consumer will want; one that wants that of another prompt is refused.

        It fails where another one has the name, unless names return and that is over with each consumer rank heard; one
        that has ended and is not over yet, since a write reads its blocks, is waited for.
        """
        known = self._transfers.get(transfer.name)
        transfer.opened, transfer.started_s, transfer.heard_s = True, now_s, now_s
        if self._names_return and known is not None and known.is_being_left and known.follower is None:
            known.follower = transfer
        else:
            self._place(transfer, now_s)

    def _place(self, transfer: Outgoing, now_s: float) -> None:
        """Let it have its name, if that is free."""
        known = self._transfers.get(transfer.name)
        if self._closed or (known is not None and known.opened and not self._frees(known)):
            self._end(transfer, Ending.FAILED, self._closed or f"transfer {transfer.name!r} is or was open here", now_s)
            return
        if known is not None and known.opened:
            transfer.former = known.numbers
        elif known is not None:  # what its consumers said before
            transfer.heard_s, transfer.sessions, transfer.former = known.heard_s, known.sessions, known.former
            self._refuse_others(transfer)
        self._transfers[transfer.name] = transfer
        for session in transfer.sessions.values():
            self._start(transfer, session)
        self._settle(transfer, now_s)

    def computed(
        self, transfer: Outgoing, layer: int, stop_token: int, now_s: float, *, run: int = 0, section: int = 0
    ) -> None:
        """All layers of this rank's section up to `layer` have the KV of the request's tokens before `stop_token`.

        Of an earlier run, it is of blocks that are gone.
        """
        if transfer.finished_s is not None:
            raise ValueError(f"transfer {transfer.name!r} is finished already")
        if run != transfer.run or transfer.ending is not None:
            return
        made = Progress(section, layer, stop_token)
        transfer.progress = [
            before
            for before in transfer.progress
            if before.section != made.section or before.layer > made.layer or before.stop_token > made.stop_token
        ]
        transfer.progress.append(made)
        for session in transfer.sessions.values():
            self._advance(transfer, session, made)

    def finished(self, transfer: Outgoing, num_tokens: int, now_s: float) -> None:
        """Prefill is over, with the KV of so many tokens; the lease begins."""
        if transfer.finished_s is not None:
            raise ValueError(f"transfer {transfer.name!r} is finished already")
        transfer.finished_s, transfer.num_tokens, transfer.spoken = now_s, num_tokens, True
        for session in transfer.sessions.values():
            self._complete(transfer, session)
        self._settle(transfer, now_s)

    def awaited(self, transfer: Outgoing, now_s: float) -> None:
        """The engine waits for its end; `finished` comes when the device has computed all of it."""
        transfer.spoken = True
        self._settle(transfer, now_s)

    def preempted(self, transfer: Outgoing, now_s: float) -> None:
        """The engine took the blocks in mid-prefill, and will compute again from the start.

        Where a batch was begun the transfer ends: what landed came from blocks that are gone, and what is being read
        may change under the write, whose outcome counts for nothing any more.
        """
        if transfer.finished_s is not None:
            raise ValueError(f"transfer {transfer.name!r} is finished already")
        transfer.run += 1
        if any(session.sent for session in transfer.sessions.values()):
            self._end(transfer, Ending.CANCELLED, "preempted", now_s)
        else:
            transfer.progress.clear()

    def cancel(self, transfer: Outgoing, cause: str, now_s: float) -> None:
        """The engine gives the request up; its blocks come free when no write reads them any more."""
        transfer.spoken = True
        self._end(transfer, Ending.CANCELLED, cause, now_s)

    def written(
        self, peer: str, transfer: Outgoing, number: int, checksums: Sequence[int], error: str | None, now_s: float
    ) -> None:
        """A `Write` is over: with one checksum for each page, or none where they travelled with the bytes, or with what
        went wrong.

        Raises ValueError where none was ordered.
        """
        session = transfer.sessions.get(peer)
        if session is None or number not in session.writing:
            raise ValueError(f"transfer {transfer.name!r}: no write of batch {number} to {peer} is under way")
        session.writing.remove(number)
        if session.state is State.OPEN:
            if error is not None:
                self._fail(transfer, session, Ending.FAILED, error)
            else:
                session.sent[number].checksums = checksums
                self._say_landed(transfer, session, number)
                session.send_s = min(session.send_s, now_s + self._timing.retry_s)
        self._settle(transfer, now_s)

    def tick(self, now_s: float) -> float | None:
        for transfer in list(self._transfers.values()):
            self._expire(transfer, now_s)
            for session in transfer.sessions.values():
                if now_s >= session.send_s:
                    self._repeat(transfer, session, now_s)
        return self._timing.retry_s / 2 if self._transfers else None

    def close(self, cause: str, now_s: float) -> None:
        self._closed = cause
        for transfer in self._transfers.values():
            for session in transfer.sessions.values():
                session.writing.clear()
            if transfer.opened:
                self._end(transfer, Ending.FAILED, cause, now_s)
        self._transfers.clear()

    @property
    def held(self) -> list[str]:
        """Transfers whose blocks are not released."""
        known = [*self._transfers.values(), *filter(None, (each.follower for each in self._transfers.values()))]
        return [transfer.name for transfer in known if transfer.opened and not transfer.is_over]

    # What consumers say

    def receive(self, peer: str, message: AnyMessage, now_s: float) -> None:
        if not isinstance(message, Announce | Granted | Report | Close):
            return
        transfer = self._meant(peer, message)
        if transfer is None:
            return
        session = transfer.sessions.get(peer)
        if session is None:
            due_s = now_s + self._timing.heartbeat_s
            session = transfer.sessions[peer] = Session(peer, message.number, message.prompt, now_s, due_s)
            if transfer.ending is not None:
                cause = f"the transfer is over: {transfer.cause or transfer.ending.value}"
                self._fail(transfer, session, transfer.ending, cause)
        transfer.heard_s = session.heard_s = now_s
        if not isinstance(message, Report) and message.destinations:
            session.destinations = message.destinations
        if isinstance(message, Close):
            self._close(transfer, session, message)
        elif isinstance(message, Report):
            self._report(transfer, session, message)
        else:
            self._ask(transfer, session, message)
        self._settle(transfer, now_s)

    def _meant(self, peer: str, message: Announce | Granted | Report | Close) -> Outgoing | None:
        """The transfer that it is about, which may be a new one; None where it is answered, or comes too early."""
        transfer = self._transfers.get(message.transfer)
        known = 0 if transfer is None else transfer.last_number(peer)
        if transfer is not None and message.number <= known:
            if peer in transfer.sessions and message.number == known:
                return transfer
            self._refuse(peer, message, "the consumer has asked for it again since")
            return None
        if transfer is not None and peer not in transfer.sessions:
            if not transfer.opened or not transfer.has_another_prompt(message.prompt):
                return transfer
            self._refuse(peer, message, _ANOTHER_PROMPT)
            return None
        # For the consumer, what it asked for before is over.
        if transfer is not None and not transfer.opened:
            transfer.former[peer] = transfer.sessions.pop(peer).number
            return transfer
        if transfer is not None and not transfer.is_over:
            return None  # it is said again, when this one is over
        refusal = self._refusal(message)
        if transfer is not None and not self._frees(transfer):
            if isinstance(message, Close) and self._names_return:
                return None  # who is told that it is known here, may speak of the next
            refusal = f"the transfer is over: {transfer.cause or transfer.ending}"
        if refusal is not None:
            self._refuse(peer, message, refusal)
            return None
        former = {} if transfer is None else transfer.numbers
        transfer = self._transfers[message.transfer] = Outgoing(message.transfer, former=former)
        return transfer

    def _frees(self, earlier: Outgoing) -> bool:
        """Whether another transfer may have its name already."""
        return self._names_return and earlier.may_be_followed

    def _refusal(self, message: Announce | Granted | Report | Close) -> str | None:
        """Why an unknown transfer is not waited for, if it is not."""
        if isinstance(message, Report) or (isinstance(message, Announce | Granted) and message.computed):
            return "the transfer is not known here, or not any more"
        awaited = sum(not transfer.opened for transfer in self._transfers.values())
        return "too many transfers are awaited" if awaited >= _MAX_AWAITED else None

    def _refuse(self, peer: str, message: Announce | Granted | Report | Close, cause: str) -> None:
        """Say so, and change nothing."""
        fields = {"state": State.CLOSED if isinstance(message, Close) else State.FAILED, "cause": cause}
        self._send(peer, Status, message.transfer, number=message.number, has_grant=False, **fields)

    def _refuse_others(self, transfer: Outgoing) -> None:
        """Consumers that asked before the engine named it, and want the KV of another prompt, have no part in it."""
        for peer, session in list(transfer.sessions.items()):
            if transfer.has_another_prompt(session.prompt):
                del transfer.sessions[peer]
                if session.state is State.OPEN:
                    fields = {"state": State.FAILED, "cause": _ANOTHER_PROMPT, "has_grant": False}
                    self._send(peer, Status, transfer.name, number=session.number, **fields)

    def _ask(self, transfer: Outgoing, session: Session, message: Announce | Granted) -> None:
        if isinstance(message, Granted) and session.state is State.OPEN and session.granted is None:
            session.granted = message
            self._start(transfer, session)
        self._say_status(transfer, session)

    def _report(self, transfer: Outgoing, session: Session, message: Report) -> None:
        if session.state is not State.OPEN:
            self._say_status(transfer, session)
        else:
            session.verified = max(session.verified, message.verified)
            for number in message.again:
                sent = session.sent[number] if number < len(session.sent) else None
                if sent is not None and sent.checksums is not None and not sent.attempt:
                    sent.attempt, sent.checksums = 1, None
                    self._write(transfer, session, number)

    def _close(self, transfer: Outgoing, session: Session, message: Close) -> None:
        if session.ending is None:
            session.ending, session.cause = (Ending.DONE if message.done else Ending.CANCELLED), message.cause
        session.state = State.CLOSED
        if session.writing:
            self._orders.append(Abandon(session.peer, transfer))
        self._say_status(transfer, session)

    # What happens to a session

    def _start(self, transfer: Outgoing, session: Session) -> None:
        """Send what has been computed, once both the engine and the consumer have named the transfer."""
        granted = session.granted
        if not transfer.opened or granted is None or session.state is not State.OPEN:
            return
        try:
            session.dividers = self._divide(session.peer, granted)
        except TransferError as error:
            self._fail(transfer, session, Ending.FAILED, str(error))
            return
        for made in transfer.progress:
            self._advance(transfer, session, made)
        if transfer.finished_s is not None:
            self._complete(transfer, session)

    def _advance(self, transfer: Outgoing, session: Session, made: Progress) -> None:
        if session.state is State.OPEN:
            for divider in session.dividers:
                if divider.own == made.section:
                    self._send_batches(transfer, session, divider.computed(made.layer, made.stop_token))

    def _complete(self, transfer: Outgoing, session: Session) -> None:
        """Send what is left; the session fails where more is wanted than was computed."""
        if session.state is State.OPEN:
            for divider in session.dividers:
                self._send_batches(transfer, session, divider.finished(transfer.num_tokens))
            if not all(divider.complete for divider in session.dividers):
                self._fail(transfer, session, Ending.FAILED, "fewer tokens were computed than are wanted")

    def _send_batches(self, transfer: Outgoing, session: Session, batches: Sequence[Batch]) -> None:
        for batch in batches:
            session.sent.append(Sent(batch))
            self._write(transfer, session, len(session.sent) - 1)

    def _write(self, transfer: Outgoing, session: Session, number: int) -> None:
        assert session.granted is not None
        session.writing.add(number)
        sent = session.sent[number]
        self._orders.append(Write(session.peer, transfer, session.granted, number, sent.batch, sent.attempt))

    def _fail(self, transfer: Outgoing, session: Session, ending: Ending, cause: str) -> None:
        if session.state is not State.OPEN:
            return
        session.state, session.ending, session.cause = State.FAILED, ending, cause[:512]
        if session.writing:
            self._orders.append(Abandon(session.peer, transfer))
        self._say_status(transfer, session)
        session.send_s = 0.0  # and again from the next tick on

    # How a transfer ends

    def _end(self, transfer: Outgoing, ending: Ending, cause: str, now_s: float) -> None:
        if transfer.ending is None:
            transfer.ending, transfer.cause = ending, cause
            for session in transfer.sessions.values():
                self._fail(transfer, session, ending, cause)
        self._settle(transfer, now_s)

    def _settle(self, transfer: Outgoing, now_s: float) -> None:
        """The blocks are the engine's after its last word, once no session wants them and no write reads them."""
        sessions = list(transfer.sessions.values())
        if not transfer.opened or any(session.writing for session in sessions):
            return
        if transfer.ending is None:
            done = transfer.expected and len(sessions) >= transfer.expected
            if not done or any(session.ending is None for session in sessions):
                return
            worst = next((session for session in sessions if session.ending is not Ending.DONE), sessions[0])
            transfer.ending, transfer.cause = worst.ending, worst.cause
        if transfer.spoken and not transfer.is_over:
            transfer.ended_s = now_s
            self._give_ended(transfer, now_s)
            if transfer.follower is not None:
                later, transfer.follower = transfer.follower, None
                self._place(later, now_s)

    def _expire(self, transfer: Outgoing, now_s: float) -> None:
        lease_s = self._timing.lease_s
        if transfer.is_over or not transfer.opened:
            if now_s >= (transfer.ended_s if transfer.is_over else transfer.heard_s) + lease_s:
                del self._transfers[transfer.name]
            return
        for session in transfer.sessions.values():
            if now_s >= session.heard_s + lease_s:
                self._fail(transfer, session, Ending.EXPIRED, f"the consumer said nothing for {lease_s:g} s")
        if transfer.finished_s is not None:
            if now_s >= max(transfer.heard_s, transfer.finished_s) + lease_s:
                self._end(transfer, Ending.EXPIRED, f"no consumer asked for it for {lease_s:g} s", now_s)
            elif now_s >= transfer.finished_s + self._timing.hold_s:
                self._end(transfer, Ending.EXPIRED, f"held for {self._timing.hold_s:g} s", now_s)
        self._settle(transfer, now_s)

    # What the producer says

    def _repeat(self, transfer: Outgoing, session: Session, now_s: float) -> None:
        session.send_s = now_s + self._timing.heartbeat_s
        if session.state is State.CLOSED or now_s >= session.heard_s + self._timing.lease_s:
            return
        self._say_status(transfer, session)
        unheard = session.unheard if session.state is State.OPEN else []
        for number in unheard[:_MAX_REPEATED]:
            self._say_landed(transfer, session, number)
        if unheard or session.state is State.FAILED:
            session.send_s = now_s + self._timing.retry_s

    def _say_status(self, transfer: Outgoing, session: Session) -> None:
        fields = {"state": session.state, "cause": session.cause, "has_grant": session.granted is not None}
        computes = transfer.opened and not transfer.spoken
        self._send(session.peer, Status, transfer.name, number=session.number, computes=computes, **fields)

    def _say_landed(self, transfer: Outgoing, session: Session, number: int) -> None:
        sent = session.sent[number]
        assert sent.checksums is not None
        fields = {"batch": number, "attempt": sent.attempt, "checksums": list(sent.checksums), **asdict(sent.batch)}
        self._send(session.peer, Landed, transfer.name, number=session.number, **fields)
