"""The part of the conformance class on failures: peers that stop, die, come and go, or are none."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from transfer.testing.fixtures import DEADLINE_S, TransportFixtures
from transfer.testing.memory import MIB, digest, int64
from transfer.testing.process import Process
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Cause, Outcome, Transport, Unavailable
from transfer.transports.memory import Memory
from transfer.transports.pull import PullTransport


class FailureConformance(TransportFixtures):
    """Claims about what a failure costs; part of `transfer.testing.conformance.TransportConformance`."""

    def test_a_stopped_peer_costs_the_deadline_and_is_there_again_afterwards(
        self, sender: Transport, other: Process
    ) -> None:
        nbytes = 32 * MIB
        peer, source, grant = self.towards(other, sender, nbytes, seed=14)
        other.stop()
        late = peer.write(grant, *self.all_of(source, grant), deadline_s=0.2)
        told: list[Outcome] = []
        late.add_done_callback(told.append)
        deadline = time.monotonic() + DEADLINE_S
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
        assert told and told[0].cause is Cause.DEADLINE, "the outcome comes without anybody waiting for it"
        other.go_on()
        _, second = other.offer(nbytes)
        self.send(peer, second, source, nbytes)
        assert other.digest(second) == digest(source)

    def test_a_deadline_before_those_of_other_batches_is_kept(self, sender: Transport, other: Process) -> None:
        """Small batches, which are sent by the thread that asks: the transport's own has to be told of the deadline."""
        peer, source, grant = self.towards(other, sender, 4096, seed=20)
        other.stop()
        late = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        soon = peer.write(grant, *self.all_of(source, grant), deadline_s=0.2)
        told = threading.Event()
        soon.add_done_callback(lambda _: told.set())
        assert told.wait(DEADLINE_S / 2) and outcome_of(soon).cause is Cause.DEADLINE
        assert late.outcome is None
        other.go_on()
        assert outcome_of(late).ok

    def test_a_source_that_is_used_again_after_a_failure_does_not_travel(
        self, sender: Transport, other: Process
    ) -> None:
        """The peer that fetches by itself is told nothing of it: there the peer's revoking has to do."""
        if isinstance(sender, PullTransport):
            pytest.skip("the receiver fetches; it revokes the grant of a transfer that failed")
        nbytes = 16 * MIB
        peer, source, grant = self.towards(other, sender, nbytes)
        other.stop()
        late = peer.write(grant, *self.all_of(source, grant), deadline_s=0.1)
        assert outcome_of(late).cause is Cause.DEADLINE
        source.bytes[:] = 255
        other.go_on()
        _, second = other.offer(4096)
        self.send(peer, second, source, 4096)  # in order behind what was on its way
        assert other.digest(grant) == digest(self.buffer(nbytes))

    def test_a_peer_killed_in_mid_batch_is_lost(self, sender: Transport, other: Process) -> None:
        nbytes = 32 * MIB
        peer, source, grant = self.towards(other, sender, nbytes, seed=15)
        endpoint, _ = other.offer(1)
        other.stop()
        completion = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        other.kill()
        assert outcome_of(completion).cause is Cause.PEER_LOST
        assert not peer.alive
        again = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        assert again.outcome is not None and again.outcome.cause is Cause.PEER_LOST
        with pytest.raises(Unavailable):
            sender.connect(endpoint, deadline_s=DEADLINE_S)

    def test_a_peer_that_went_unnoticed_is_lost(
        self, memory: Memory, sender: Transport, there: Memory, receiver: Transport
    ) -> None:
        peer = sender.connect(receiver.listen(), deadline_s=DEADLINE_S)
        source, _, grant = self.between(memory, there, MIB, seed=21)
        receiver.close()
        is_last = False
        while not is_last:  # at every moment until it is noticed, and after that
            is_last = not peer.alive
            outcome = outcome_of(peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S))
            assert outcome.cause is Cause.PEER_LOST

    def test_a_sender_killed_in_mid_batch_leaves_the_receiver_serving(
        self, memory: Memory, sender: Transport, there: Memory, receiver: Transport, other: Process
    ) -> None:
        nbytes = 64 * MIB
        target = self.buffer(nbytes)
        there.register(target.address, nbytes)
        grant = there.grant(int64(target.address), int64(nbytes))
        endpoint = receiver.listen()
        other.tell(do="send", endpoint=endpoint.hex(), key=grant.key.hex(), address=target.address, nbytes=nbytes)
        deadline = time.monotonic() + DEADLINE_S
        while not target.bytes[::4096].any() and time.monotonic() < deadline:
            time.sleep(0.002)
        other.kill()
        assert target.bytes.any()
        source = self.buffer(nbytes, seed=16)
        memory.register(source.address, nbytes)
        self.send(sender.connect(endpoint, deadline_s=DEADLINE_S), grant, source, nbytes)
        assert np.array_equal(target.bytes, source.bytes)

    def test_a_stopped_listener_does_not_hold_up_connect(self, sender: Transport, other: Process) -> None:
        endpoint, _ = other.offer(4096)
        other.stop()
        with pytest.raises(Unavailable):
            sender.connect(endpoint, deadline_s=0.3)

    def test_a_peer_with_another_secret_is_unavailable(self, receiver: Transport, memory: Memory) -> None:
        with self.make(memory, secret=b"another secret of 16+") as stranger, pytest.raises(Unavailable, match="secret"):
            stranger.connect(receiver.listen(), deadline_s=DEADLINE_S)

    @pytest.mark.parametrize("endpoint", [b"", b"\xc1", b"\x80", b"nonsense", b"\xdf" + b"\xff" * 20])
    def test_an_endpoint_that_is_none_is_unavailable(self, sender: Transport, endpoint: bytes) -> None:
        with pytest.raises(Unavailable, match="cannot be read"):
            sender.connect(endpoint, deadline_s=1)

    def test_closing_fails_what_is_under_way_and_leaves_nothing_behind(self, other: Process) -> None:
        other.offer(1)
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        memory, nbytes = Memory(), 32 * MIB
        sender = self.make(memory)
        sender.listen()
        assert sender.listen() == sender.listen()
        peer, source, grant = self.towards(other, sender, nbytes, seed=18)
        other.stop()
        completion = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        sender.close()
        sender.close()
        peer.close()
        assert completion.outcome is not None and completion.outcome.cause is Cause.PEER_LOST
        assert not peer.alive
        source.free()
        del peer, sender
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)
