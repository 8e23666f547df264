"""Peers killed in mid-transfer, many times: over real queue pairs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_process import Forked, forking
from rdma.test_inside import EMULATED

from transfer.testing.fixtures import DEADLINE_S, TransportFixtures
from transfer.testing.memory import MIB, digest, int64
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Cause, Transport
from transfer.transports.memory import Memory
from transfer.transports.rdma.transport import RdmaTransport

pytestmark = pytest.mark.inside
KILLS = 10
NBYTES = 1 * MIB


class TestKills(TransportFixtures):
    """A transport that stays, and others that are killed, one after the other."""

    transport = RdmaTransport

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return EMULATED

    @pytest.fixture
    def fork(self, tmp_path: Path) -> Iterator[Callable[[], Forked]]:
        with forking(tmp_path, "transfer.transports.rdma.transport") as path:
            yield lambda: Forked(path, RdmaTransport, EMULATED)

    def test_receivers_killed_at_any_moment_are_lost_and_the_next_one_gets_everything(
        self, memory: Memory, sender: Transport, fork: Callable[[], Forked]
    ) -> None:
        source = self.buffer(NBYTES, seed=30)
        memory.register(source.address, NBYTES)
        rng, num_lost = random.Random(30), 0
        for _ in range(KILLS):
            other = fork()
            endpoint, grant = other.offer(NBYTES)
            peer = sender.connect(endpoint, deadline_s=DEADLINE_S)
            started = time.monotonic()
            self.send(peer, grant, source, NBYTES)
            whole_s = time.monotonic() - started
            writes = [peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S) for _ in range(4)]
            time.sleep(rng.random() * whole_s)
            other.kill()
            causes = {outcome_of(write).cause for write in writes}
            assert causes <= {None, Cause.PEER_LOST}
            num_lost += Cause.PEER_LOST in causes
        assert num_lost > KILLS // 2, "four take longer than one"
        other = fork()
        peer, source, grant = self.towards(other, sender, NBYTES, seed=31)
        self.send(peer, grant, source, NBYTES)
        assert other.digest(grant) == digest(source)
        other.kill()

    def test_senders_killed_at_any_moment_leave_memory_that_nothing_writes_to(
        self, memory: Memory, sender: Transport, there: Memory, receiver: Transport, fork: Callable[[], Forked]
    ) -> None:
        target = self.buffer(NBYTES)
        there.register(target.address, NBYTES)
        endpoint, rng = receiver.listen(), random.Random(32)
        for _ in range(KILLS):
            target.bytes[:] = 0
            grant = there.grant(int64(target.address), int64(NBYTES))
            other = fork()
            other.tell(do="send", endpoint=endpoint.hex(), key=grant.key.hex(), address=target.address, nbytes=NBYTES)
            deadline = time.monotonic() + DEADLINE_S
            while not target.bytes[::4096].any() and time.monotonic() < deadline:
                time.sleep(0.002)
            assert target.bytes.any()
            time.sleep(rng.random() * 0.2)
            other.kill()
            there.revoke(grant)
            target.bytes[:] = 7
            time.sleep(0.02)
            assert (target.bytes == 7).all()
        source = self.buffer(NBYTES, seed=33)
        memory.register(source.address, NBYTES)
        grant = there.grant(int64(target.address), int64(NBYTES))
        self.send(sender.connect(endpoint, deadline_s=DEADLINE_S), grant, source, NBYTES)
        assert np.array_equal(target.bytes, source.bytes)
