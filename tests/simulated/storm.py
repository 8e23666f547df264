"""Small and large batches of several threads over one connection that is struck meanwhile, with cancels and revokes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np

from transfer.testing.memory import MIB, Buffer
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Cause, Peer, Transport
from transfer.transports.memory import Memory

THREADS, BATCHES, AREA = 4, 25, 2 * MIB
Strike: TypeAlias = Callable[[random.Random, Peer, Transport, Transport], None]
"""What breaks it meanwhile: told the connection, its sender and its receiver."""


class Storm:
    """Every thread writes in an area of its own; `wrong` says what should not be."""

    def __init__(
        self, near: Callable[[Memory], Transport], far: Callable[[Memory], Transport], seed: int, strike: Strike
    ) -> None:
        """Until it is over.

        Args:
            near, far: make the transports of both sides.
        """
        self.seed, self.num_ok = seed, 0
        self.wrong: list[str] = []
        self.memory, self.there = Memory(), Memory()
        self.source, self.target = Buffer(THREADS * AREA, seed=seed), Buffer(THREADS * AREA)
        self.memory.register(self.source.address, self.source.nbytes)
        self.there.register(self.target.address, self.target.nbytes)
        with near(self.memory) as sender, far(self.there) as receiver:
            self.peer = sender.connect(receiver.listen(), deadline_s=30)
            threads = [threading.Thread(target=self.write, args=(number,)) for number in range(THREADS)]
            for thread in threads:
                thread.start()
            strike(random.Random(seed), self.peer, sender, receiver)
            for thread in threads:
                thread.join()
        self.still_sending = len(self.memory._sending)

    def write(self, thread: int) -> None:
        rng = random.Random(self.seed * THREADS + thread)
        for number in range(BATCHES):
            nbytes = rng.randint(1, AREA if number % 4 == 0 else 60_000)
            begin = thread * AREA + rng.randint(0, AREA - nbytes)
            cuts = np.array(sorted({0, nbytes, *(rng.randint(0, nbytes) for _ in range(rng.choice([0, 3, 20])))}))
            offsets, sizes = begin + cuts[:-1], np.diff(cuts)
            self.target.bytes[begin : begin + nbytes] = 0
            grant = self.there.grant(self.target.address + offsets, sizes)
            places = self.source.address + offsets, self.target.address + offsets, sizes
            completion = self.peer.write(grant, *places, deadline_s=60)
            told = threading.Event()
            completion.add_done_callback(lambda _, told=told: told.set())
            if (what := rng.random()) < 0.2:
                completion.cancel() if what < 0.1 else self.there.revoke(grant)
            if rng.random() < 0.5:
                outcome_of(completion)
            if not told.wait(70) or completion.outcome is None or completion.outcome.cause is Cause.DEADLINE:
                self.wrong.append(f"batch {number} of thread {thread}: {completion.outcome}")
            elif completion.outcome.ok:
                self.num_ok += 1
                if not np.array_equal(*(buffer.bytes[begin : begin + nbytes] for buffer in (self.source, self.target))):
                    self.wrong.append(f"batch {number} of thread {thread} is ok and has other bytes")
            self.there.revoke(grant)


def breaking_rails(is_closed: bool, longest_s: float) -> Strike:
    """Break one queue pair of the sender's after the other, twice, after up to so long each; then close something."""

    def strike(rng: random.Random, peer: Any, sender: Transport, receiver: Transport) -> None:
        for pair in (*peer._encoder._pairs, *peer._encoder._pairs):
            time.sleep(rng.random() * longest_s)
            with suppress(OSError):  # it is being made anew
                pair.fail()
        if is_closed:
            closed: list[Peer | Transport] = [peer, sender, receiver]
            rng.choice(closed).close()

    return strike
