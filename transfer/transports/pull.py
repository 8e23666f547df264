"""Transports whose receiver fetches the bytes: what another one has to bring is a `Fetcher`.

The sender says where the pieces are; here every order is held against its grant, given to the peer's fetcher, and
answered when that says it is over: at once, later from any thread, or when it is asked. Several orders of a peer may be
under way and end in any order. A grant ends only after the fetches that hold it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from transfer.control.handshake import Server
from transfer.transports.base import Numbers, TransferError
from transfer.transports.channel import Channel
from transfer.transports.incoming import Connection
from transfer.transports.memory import Memory, Revocable
from transfer.transports.passing import Passing
from transfer.transports.sockets import SocketTransport
from transfer.transports.stream import PayloadEncoder, Slice
from transfer.transports.vectors import Pieces, Vector
from transfer.transports.wire import CopyOrder, CopyStatus, WireError

GREET = b"?"


class Fetch:
    """One order: copy `pieces`, from `local`, there, to `remote`, here. They lie inside the grant of `held`."""

    __slots__ = ("attachment", "connection", "held", "number", "passing", "pieces", "progress")

    def __init__(
        self,
        number: int,
        pieces: Pieces,
        attachment: bytes,
        held: Revocable | None,
        connection: PullConnection,
        passing: Passing | None = None,
    ) -> None:
        self.number, self.pieces = number, pieces
        self.attachment = attachment
        """What the sender's `PullEncoder.attachment` said."""
        self.held = held
        """None for a probe, which has pieces where the fetcher likes."""
        self.progress: Any = None
        """For the fetcher."""
        self.passing = passing
        """For a fetcher that fills stages of a device's memory: who is to see the bytes, where the order is marked."""
        self.connection = connection

    def done(self, status: CopyStatus) -> None:
        """It is over, and nothing of it is written any more. For any thread; what is said twice counts once."""
        self.let_go()
        self.connection.post(lambda: self.connection.finish(self, status))

    def let_go(self) -> None:
        """Of its grant, where it holds that."""
        if self.held is not None:
            self.held.let_go(self)

    def cancel(self) -> None:
        """See `memory.Holder`."""
        self.connection.post(lambda: self.connection.cancel(self))

    def cut_off(self) -> None:
        """See `memory.Holder`."""
        self.connection.post(lambda: self.connection.cut_off(self))


class Fetcher(ABC):
    """Fetches from one peer. All methods are called by the receiving thread, for all peers: none may wait.

    A fetch is over when one of them returns its status, or when its `done` is called.
    """

    max_under_way: int = 64
    """Orders of the peer; what it asks beyond that waits on its side."""
    poll_s: float | None = None
    """How often `go_on` is called for fetches under way, 0 for as often as others have had their turn; None: never."""
    greets: bool = False
    """Whether the sender asks for a greeting first of all."""
    num_lanes: int = 1
    """Ways that fetches take beside each other, each with a share of what there is of stages."""
    is_stepwise: bool = False
    """Whether it writes in steps of some milliseconds, each with `fetch.held.lock` taken and while it is not `revoked`,
    or while it holds the grant by itself. The grant of any other fetch is held until that is over."""

    def greeting(self) -> bytes:
        """Said to the sender when its `_prepare` asks by `GREET`, where `greets`. Raises OSError, TransferError."""
        raise NotImplementedError

    def lane(self, fetch: Fetch) -> int:
        """Which one this takes, below `num_lanes`; any for what no sender sends."""
        return 0

    def fills(self, fetch: Fetch) -> bool:
        """Whether it fills these pieces by itself where they are on a device; for all others it gets stages."""
        return False

    @abstractmethod
    def start(self, fetch: Fetch) -> CopyStatus | None:
        """Begin; what became of it where it is over already, else None."""

    def go_on(self, fetch: Fetch) -> CopyStatus | None:
        """As `start`, again and again."""
        raise NotImplementedError

    def probe(self, fetch: Fetch, number: int) -> CopyStatus | None:
        """Answer what the sender's `_prepare` asks, as `start`; `number` is what it said. Raises WireError."""
        raise WireError("a probe, of which this transport knows none")

    def cancel(self, fetch: Fetch) -> None:  # noqa: B027
        """Nobody wants it any more: its grant ended, or its peer is gone. It should be over soon, however it ends."""

    def close(self) -> None:  # noqa: B027
        """The peer is gone. Fetches still under way did not end when cancelled: once this returned, they write no more.

        Called once; it may take a moment, as for destroying a queue.
        """


class PullConnection(Connection):
    """One peer's connection."""

    columns = 3

    def __init__(
        self,
        channel: Channel,
        server: Server,
        memory: Memory,
        fetcher: Fetcher,
        max_nbytes: int,
        max_attached: int,
    ) -> None:
        super().__init__(channel, server, memory)
        self.max_nbytes, self.max_attached = max_nbytes, max_attached
        self._fetcher: Fetcher | None = fetcher
        self._traits = fetcher
        self._under_way: dict[Fetch, None] = {}
        self.is_busy = True

    def welcome(self) -> None:
        super().welcome()
        if self._traits.greets:
            self._next = self._greet

    def execute(self, order: CopyOrder, columns: list[Numbers], held: Revocable) -> bool:
        fetch = self._fetch(order, columns, held)
        if not self._traits.is_stepwise and not held.hold(fetch):
            return self.answer(order, CopyStatus.NO_GRANT)
        assert self._fetcher is not None
        return self._begin(fetch, self._fetcher.start)

    def probe(self, order: CopyOrder, columns: list[Numbers]) -> bool:
        fetcher = self._fetcher
        assert fetcher is not None
        return self._begin(self._fetch(order, columns, None), lambda fetch: fetcher.probe(fetch, order.place))

    def poll(self) -> None:
        """Go on with what is under way. Raises what `step` does."""
        for fetch in list(self._under_way):
            if self._fetcher is not None and (status := self._fetcher.go_on(fetch)) is not None:
                fetch.let_go()
                self.finish(fetch, status)

    def finish(self, fetch: Fetch, status: CopyStatus) -> None:
        """A fetch is over: answer it, if there is still somebody."""
        if fetch not in self._under_way:
            return
        del self._under_way[fetch]
        self._count()
        if not self.is_closed:
            self.say_status(fetch.number, status)
        elif not self._under_way:
            self.cut_off()

    def cancel(self, fetch: Fetch) -> None:
        """Its grant ended."""
        if self._fetcher is not None and fetch in self._under_way:
            self._fetcher.cancel(fetch)

    def cut_off(self, late: Fetch | None = None) -> None:
        """End all fetches now. Raises TransferError if one was `late`, as then the connection is of no use.

        Where the fetcher fails at that, nobody knows whether they still write: each keeps its grant until it is done.
        """
        fetcher, self._fetcher = self._fetcher, None
        fetches = list(self._under_way)
        self._under_way.clear()
        self._count()
        if fetcher is not None:
            fetcher.close()
        for fetch in fetches:
            fetch.let_go()
        if late is not None and not self.is_closed:
            raise TransferError("a fetch did not end when its grant did: cut off")

    def close(self) -> None:
        super().close()
        for fetch in list(self._under_way):
            self.cancel(fetch)
        if self._traits.is_stepwise or not self._under_way:
            self.cut_off()

    def _greet(self) -> bool:
        asked = self.channel.recv(len(GREET))
        if not asked:
            raise ConnectionResetError("closed by the peer")
        if asked != GREET:
            raise WireError("no question for a greeting after the handshake")
        assert self._fetcher is not None
        self._say(self._fetcher.greeting())
        self._next = self._take_block
        return True

    def _fetch(self, order: CopyOrder, columns: list[Numbers], held: Revocable | None) -> Fetch:
        pieces = Pieces(columns[2], columns[0], columns[1], order.nbytes)
        return Fetch(order.number, pieces, self.attachment, held, self, self.passing)

    def _begin(self, fetch: Fetch, start: Callable[[Fetch], CopyStatus | None]) -> bool:
        try:
            status = start(fetch)
        except BaseException:
            self._under_way[fetch] = None  # it may have begun
            self._count()
            raise
        self._next = self._take_block
        if status is None:
            self._under_way[fetch] = None
            self._count()
            return not self.is_full
        fetch.let_go()
        self.say_status(fetch.number, status)
        return False

    def _count(self) -> None:
        self.is_busy = self._fetcher is not None
        self.is_full = len(self._under_way) >= self._traits.max_under_way
        self.poll_s = self._traits.poll_s if self._under_way else None


class PullEncoder(PayloadEncoder):
    """Says where the bytes are."""

    def __init__(self, max_nbytes: int) -> None:
        self.max_nbytes = max_nbytes

    def attachment(self, pieces: Pieces) -> bytes:
        """What the fetcher has to know besides, such as the keys of registered memory."""
        return b""

    def encode(self, part: Slice) -> Vector:
        pieces = part.pieces
        order = CopyOrder(part.number, part.write.grant.key, len(pieces.nbytes), pieces.total)
        attachment = self.attachment(pieces)
        columns = pieces.remote, pieces.nbytes, pieces.local
        return Vector.over(order.encode(*columns, attachment=attachment, mark=part.mark))


class PullTransport(SocketTransport):
    """A transport of this kind; orders and answers travel over the connections of the class that it is mixed with."""

    max_nbytes: ClassVar[int]
    """Of one order."""
    max_attached: ClassVar[int] = 0
    """Bytes of `PullEncoder.attachment`."""

    @abstractmethod
    def _fetcher(self, channel: Channel) -> Fetcher:
        """For a peer that has just connected, and has said nothing yet."""

    def _connection(self, channel: Channel, server: Server) -> Connection:
        fetcher = self._fetcher(channel)
        return PullConnection(channel, server, self.memory, fetcher, self.max_nbytes, self.max_attached)
