"""Reads one peer's memory: fetches wait their turn, their requests go to the card, and completions say what is over.

The card does a queue pair's requests in order, so one completion at the end of a batch tells of all of it. When a
request fails the card gives up all that were posted; nothing is told of any fetch until the last of these is over, and
from then on none of them writes here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.transports.base import TransferError
from transfer.transports.pull import Fetch
from transfer.transports.rdma.card import Card
from transfer.transports.rdma.completions import Completions
from transfer.transports.rdma.pair import End, Pair
from transfer.transports.rdma.queue_pair import Chain
from transfer.transports.rdma.verbs import Completion
from transfer.transports.rdma.work import FewReads, Work
from transfer.transports.wire import CopyStatus, WireError

logger = get_logger(__name__)

Done: TypeAlias = Callable[[CopyStatus], None]
BATCH = 32
"""Requests for which there is one completion, and the turn of a fetch beside others."""
WINDOW_NBYTES = 8 << 20
"""Under way on the wire: what a fetch that nobody wants any more waits for."""
PATIENCE_S = 1.0
"""What nobody wants any more has so long to end by itself; then the queue pair gives up."""
SILENCE = 1.5
"""Times `lost_after_s`: a card should have given up long since, and not each does."""
SPIN_S = 50e-6
"""What is small and alone is looked for so long by who posts it: a card has it there sooner than a thread is woken."""
SPIN_NBYTES = 64 << 10
MAX_VAIN = 63
"""After it was looked for in vain, so many are not, at most; twice as many each time."""
LOOK_S = 0.2
"""How often the port is looked at while something is under way."""


@dataclass(slots=True, eq=False)
class _Job:
    """A fetch, its requests, how many of them were posted, and in how many batches they are under way."""

    fetch: Fetch
    done: Done
    work: Work | FewReads
    posted: int = 0
    under_way: int = 0
    unwanted_at: float | None = None

    @property
    def is_all_posted(self) -> bool:
        return self.unwanted_at is not None or self.posted == len(self.work)


@dataclass(slots=True)
class _Batch:
    job: _Job
    last: int
    """Number of its last request."""
    requests: int
    nbytes: int


class Reader:
    """See the module. Safe to use from any thread."""

    def __init__(self, card: Card, completions: Completions) -> None:
        """Raises OSError."""
        self._card, self._completions = card, completions
        self._chain = Chain(BATCH, card.max_ranges)
        self._lock = threading.Lock()
        self._jobs: dict[Fetch, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._batches: deque[_Batch] = deque()
        self._room, self._in_flight_nbytes, self._number = card.max_requests, 0, 0
        self._epoch = -1
        self._peer: End | None = None
        self._why = ""
        """What broke the queue pair in this epoch."""
        self._lost = ""
        """Why nobody knows what is under way."""
        self._looked_at = self._moved_at = 0.0
        self._is_heard = False
        """Whether the thread of `completions` will be told of what is over next."""
        self._vain = self._left_out = 0
        """Of `_spin`: how many it leaves out when it is in vain, and how many of them are to come."""
        self._silent_s = SILENCE * card.settings.lost_after_s
        self._is_closed = False
        self._queue = completions.queue(card.max_requests + 1, self._completed)
        try:
            self._pair = Pair(card, self._queue, card.max_requests)
        except BaseException:
            completions.remove(self._queue)
            raise

    @property
    def end(self) -> End:
        return self._pair.end

    @property
    def is_connected(self) -> bool:
        return self._peer is not None

    @property
    def rail(self) -> str:
        return str(self._card.rail)

    def connect(self, peer: End, epoch: int) -> bool:
        """Read from this end of the peer's from now on; False where that is not possible now. Raises WireError.

        What is under way is given up before, and tells so: the sender begins anew where it knows that the rail is of
        no use, which it may before we do.
        """
        with self._lock:
            if epoch <= self._epoch:
                raise WireError(f"epoch {epoch} of a queue pair in epoch {self._epoch}")
            try:
                if self._batches:
                    self._give_up("its sender gave it up")
                    return False
                self._pair.read_from(peer, epoch)
            except OSError as error:
                self._break(str(error))
                return False
            self._peer, self._epoch, self._why = peer, epoch, ""
            return True

    def add(self, fetch: Fetch, done: Done, work: Work | FewReads, epoch: int) -> CopyStatus | None:
        """Begin to fetch; what became of it where it is over already. Raises WireError, OSError.

        Args:
            done: called once it is over, unless that was returned.
            epoch: in which the sender expects to be read; it begins one when it was told that the last one broke.
        """
        with self._lock:
            if epoch > self._epoch:
                raise WireError(f"epoch {epoch} of a queue pair that works in epoch {self._epoch}")
            if epoch < self._epoch or self._why:
                return CopyStatus.BROKEN
            job = _Job(fetch, done, work)
            self._jobs[fetch] = job
            self._waiting.append(job)
            over: list[tuple[_Job, CopyStatus]] = []
            is_alone = not self._batches
            self._post()
            if is_alone and job.is_all_posted and self._in_flight_nbytes <= SPIN_NBYTES:
                self._spin(over)
            if not self._is_heard:
                self._go_on(over)
        own = None
        for ended, status in over:
            if ended is job:
                own = status
            else:
                ended.done(status)
        return own

    def cancel(self, fetch: Fetch) -> None:
        """Post no more of it. It is over with what is under way."""
        with self._lock:
            job = self._jobs.get(fetch)
            if job is None:
                return
            job.unwanted_at = time.monotonic()
            if not job.under_way:
                del self._jobs[fetch]
        if not job.under_way:
            job.done(CopyStatus.NO_GRANT)

    def look_after(self, fetch: Fetch) -> None:
        """Have the card give up everything where this should have been over since `PATIENCE_S`, where nothing has been
        over for long, or where the port is down.

        Raises OSError, and TransferError where the queue pair is of no use any more.
        """
        now = time.monotonic()
        with self._lock:
            if self._lost:
                raise TransferError(f"the card takes no request: {self._lost}")
            if self._why:
                return
            job = self._jobs.get(fetch)
            if job is not None and job.unwanted_at is not None and now >= job.unwanted_at + PATIENCE_S:
                self._give_up(f"a read did not end within {PATIENCE_S:g} s after nobody wanted it any more")
            elif self._batches and now >= self._moved_at + self._silent_s:
                self._give_up(f"its card has said nothing of what is under way for {self._silent_s:g} s")
            elif now >= self._looked_at + LOOK_S:
                self._looked_at = now
                if not self._card.is_up:
                    self._give_up("its port is down")

    def close(self) -> None:
        """Once this returned, nothing is written any more. Raises OSError."""
        with self._lock:
            self._is_closed = True
            self._jobs.clear()
            self._waiting.clear()
            with contextlib.suppress(OSError):
                self._pair.fail()
            self._pair.close()
        self._completions.remove(self._queue)

    def _post(self) -> None:
        """As much as there is room for; fetches take turns."""
        while self._waiting and self._room and self._in_flight_nbytes < WINDOW_NBYTES and not self._why:
            job = self._waiting.popleft()
            if job.is_all_posted:
                continue
            chain, room_nbytes = self._chain, WINDOW_NBYTES - self._in_flight_nbytes
            chain.begin()
            nbytes = job.work.fill(chain, self._number + 1, job.posted, min(BATCH, self._room), room_nbytes)
            self._number += chain.count
            job.posted += chain.count
            job.under_way += 1
            self._room -= chain.count
            self._in_flight_nbytes += nbytes
            if not self._batches:
                self._moved_at = time.monotonic()
            self._batches.append(_Batch(job, self._number, chain.count, nbytes))
            if not job.is_all_posted:
                self._waiting.append(job)
            try:
                self._pair.post(chain)
            except OSError as error:  # it may have taken some of them
                self._lost = str(error)
                self._break(f"the card takes no request: {error}")

    def _completed(self) -> None:
        """Called by `completions`."""
        over: list[tuple[_Job, CopyStatus]] = []
        with self._lock:
            if self._is_closed:
                return
            self._is_heard = False
            self._go_on(over)
        for job, status in over:
            job.done(status)

    def _spin(self, over: list[tuple[_Job, CopyStatus]]) -> None:
        """Wait for what was just posted, for a moment, so that it costs no change of thread."""
        if self._left_out:
            self._left_out -= 1
            return
        until = time.perf_counter() + SPIN_S
        while self._batches:
            self._poll(over)
            if time.perf_counter() >= until:
                break
        self._vain = min(2 * self._vain + 1, MAX_VAIN) if self._batches else 0
        self._left_out = self._vain

    def _go_on(self, over: list[tuple[_Job, CopyStatus]]) -> None:
        """Take what is over, post more, and be told of what is under way then."""
        while True:
            self._poll(over)
            if self._why and not self._batches:
                over += [(job, CopyStatus.BROKEN) for job in self._jobs.values()]
                self._jobs.clear()
                self._waiting.clear()
            elif not self._why:
                self._post()
            if self._is_heard or not self._batches:
                return
            self._queue.notify()
            self._is_heard = True  # of what was over before nobody is told: once more

    def _poll(self, over: list[tuple[_Job, CopyStatus]]) -> None:
        while found := self._queue.poll(BATCH):
            for completion in found:
                self._take(completion, over)

    def _give_up(self, why: str) -> None:
        """Have the card end all that is under way. Raises OSError."""
        self._break(why)
        self._pair.fail()

    def _break(self, why: str) -> None:
        if not self._why:
            cause = f"transfer.rdma.broke:{self._card.rail.name}:{kind_of(why)}"
            log_once(cause, "rdma: %s to a peer broke: %s", self._card.rail, why, logger=logger)
        self._why = why

    def _take(self, completion: Completion, over: list[tuple[_Job, CopyStatus]]) -> None:
        if not completion.is_success and not self._why:
            self._break(completion.status_str)
        while self._batches and self._batches[0].last <= completion.wr_id:
            batch = self._batches.popleft()
            self._moved_at = time.monotonic()
            job = batch.job
            job.under_way -= 1
            self._room += batch.requests
            self._in_flight_nbytes -= batch.nbytes
            if not self._why and job.is_all_posted and not job.under_way:
                del self._jobs[job.fetch]
                whole = job.posted == len(job.work) and job.unwanted_at is None
                over.append((job, CopyStatus.OK if whole else CopyStatus.NO_GRANT))
