"""Small and large batches of several threads, with cancels, revoked grants, broken streams and a sudden close.

One short round for each transport; with MOONCAKE_CONNECTOR_STRESS_S=600 they go on for ten minutes together.
"""

import random
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from simulated.fuzz import STRESS_S

from transfer.testing.memory import MIB, Buffer
from transfer.testing.waiting import outcome_of
from transfer.transports import channel
from transfer.transports.base import Cause
from transfer.transports.cma import CmaTransport
from transfer.transports.memory import Memory
from transfer.transports.shm import ShmTransport
from transfer.transports.tcp import TcpTransport

HOSTS = ("127.0.0.1", "127.0.0.2")
MAKE = {"cma": CmaTransport, "shm": ShmTransport, "tcp": lambda memory: TcpTransport(memory, hosts=HOSTS, streams=2)}
THREADS, BATCHES, AREA = 4, 25, 2 * MIB


class Storm:
    """Every thread writes in an area of its own; `wrong` says what should not be."""

    def __init__(self, kind, seed):
        self.seed, self.wrong, self.num_ok = seed, [], 0
        self.memory, self.there = Memory(), Memory()
        self.source, self.target = Buffer(THREADS * AREA, seed=seed), Buffer(THREADS * AREA)
        self.memory.register(self.source.address, self.source.nbytes)
        self.there.register(self.target.address, self.target.nbytes)
        with MAKE[kind](self.memory) as sender, MAKE[kind](self.there) as receiver:
            self.peer = sender.connect(receiver.listen(), deadline_s=30)
            threads = [threading.Thread(target=self.write, args=(number,)) for number in range(THREADS)]
            for thread in threads:
                thread.start()
            self.strike(random.Random(seed), sender, receiver)
            for thread in threads:
                thread.join()
        self.still_sending = len(self.memory._sending)

    def strike(self, rng, sender, receiver):
        """Break all streams but one, and in every third storm everything."""
        for stream in list(self.peer._streams.values())[1:]:
            time.sleep(rng.random() * 0.03)
            with suppress(OSError):
                stream.channel.socket.shutdown(socket.SHUT_RDWR)
        if self.seed % 3 == 2:
            time.sleep(rng.random() * 0.05)
            rng.choice([self.peer, sender, receiver]).close()

    def write(self, thread):
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
            if not told.wait(70) or completion.outcome.cause is Cause.DEADLINE:
                self.wrong.append(f"batch {number} of thread {thread}: {completion.outcome}")
            elif completion.outcome.ok:
                self.num_ok += 1
                if not np.array_equal(*(buffer.bytes[begin : begin + nbytes] for buffer in (self.source, self.target))):
                    self.wrong.append(f"batch {number} of thread {thread} is ok and has other bytes")
            self.there.revoke(grant)


@pytest.mark.parametrize(("kind", "is_late"), [*((kind, False) for kind in MAKE), ("tcp", True)])
def test_every_batch_of_a_storm_has_its_outcome_and_ok_means_that_the_bytes_are_there(kind, is_late, monkeypatch):
    if is_late:  # as beside a busy Python thread
        monkeypatch.setattr(channel, "_LATE_S", -1.0)
        monkeypatch.setattr(channel, "_MANY_NBYTES", 1)
    until, seed = time.monotonic() + STRESS_S / len(MAKE), 0
    while seed < 3 or time.monotonic() < until:
        storm = Storm(kind, seed)
        assert (storm.wrong, storm.still_sending) == ([], 0), f"seed {seed}"
        assert storm.num_ok > BATCHES or seed % 3 == 2, f"seed {seed}: a storm in which little arrives shows little"
        seed += 1
