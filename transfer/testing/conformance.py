"""The conformance class: what any transport must do. Inherit it in a test and name the class.

class TestMine(TransportConformance):
    transport = MyTransport            # called with (memory, identity, **options)
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from transfer.testing.failures import FailureConformance
from transfer.testing.fixtures import DEADLINE_S
from transfer.testing.memory import MIB, digest, expected, folded, int64, scattered
from transfer.testing.process import Process
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Cause, Grant, Outcome, Peer, Transport
from transfer.transports.memory import Memory

MANY_PIECES = 70_000
"""More than one order takes."""


class TransportConformance(FailureConformance):
    """Claims about every transport."""

    def test_scattered_pieces_of_all_sizes_arrive_and_nothing_else_changes(
        self, memory: Memory, there: Memory, peer: Peer
    ) -> None:
        sizes = np.random.default_rng(1).integers(0, 3000, 6000)
        sizes[::7] = 0
        nbytes = int(sizes.sum()) + 17 * len(sizes)
        source, target = self.buffer(nbytes, seed=1), self.buffer(nbytes)
        memory.register(source.address, nbytes)
        there.register(target.address, nbytes)
        local, remote = scattered(source, target.address, sizes, seed=2)
        grant = there.grant(remote, sizes)
        assert len(grant.addresses) > 1000, "gaps between the pieces must not be granted"
        assert outcome_of(peer.write(grant, local, remote, sizes, deadline_s=DEADLINE_S)) == Outcome()
        assert np.array_equal(target.bytes, expected(source, local, remote, sizes, target.address, nbytes))

    def test_pieces_arrive_at_any_alignment(self, memory: Memory, there: Memory, peer: Peer) -> None:
        source, target, grant = self.between(memory, there, MIB, seed=3)
        cases = [(a, b, n) for a in range(9) for b in range(9) for n in (1, 7, 8, 63, 64, 65, 100)]
        steps = int64(*range(len(cases))) * 128
        local = source.address + steps + int64(*(a for a, _, _ in cases))
        remote = target.address + steps + int64(*(b for _, b, _ in cases))
        sizes = int64(*(n for _, _, n in cases))
        assert outcome_of(peer.write(grant, local, remote, sizes, deadline_s=DEADLINE_S)).ok
        assert np.array_equal(target.bytes, expected(source, local, remote, sizes, target.address, MIB))

    @pytest.mark.parametrize("nbytes", [1, 16384, MIB - 1, MIB, 4 * MIB + 1, 40 * MIB + 3])
    def test_one_piece_of_any_size_arrives(self, memory: Memory, there: Memory, peer: Peer, nbytes: int) -> None:
        source, target, grant = self.between(memory, there, nbytes, seed=4)
        self.send(peer, grant, source, nbytes)
        assert np.array_equal(target.bytes, source.bytes)

    def test_more_pieces_than_one_order_takes_arrive(self, memory: Memory, there: Memory, peer: Peer) -> None:
        count = MANY_PIECES
        source, target, grant = self.between(memory, there, 2 * count, seed=5)
        places = np.arange(count) * 2
        sizes = np.ones(count, dtype=np.int64)
        local, remote = source.address + places, target.address + places
        assert outcome_of(peer.write(grant, local, remote, sizes, deadline_s=DEADLINE_S)).ok
        assert np.array_equal(target.bytes[::2], source.bytes[::2]) and not target.bytes[1::2].any()

    def test_nothing_to_write_is_ok(self, there: Memory, peer: Peer) -> None:
        grant = there.grant(int64(), int64())
        assert outcome_of(peer.write(grant, int64(), int64(), int64(), deadline_s=1)).ok
        assert outcome_of(peer.write(grant, int64(5), int64(5), int64(0), deadline_s=1)).ok

    @pytest.mark.slow
    def test_a_piece_beyond_4_gib_arrives(self, memory: Memory, there: Memory, peer: Peer) -> None:
        nbytes, fold = (1 << 32) + 12345, 64 * MIB
        with folded(nbytes, fold, seed=6) as source, folded(nbytes, fold) as target:
            regions = memory.register(source.address, nbytes), there.register(target.address, nbytes)
            grant = there.grant(int64(target.address), int64(nbytes))
            whole = int64(source.address), int64(target.address), int64(nbytes)
            outcome = outcome_of(peer.write(grant, *whole, deadline_s=300))
            for owner, region in zip((memory, there), regions, strict=True):
                owner.unregister(region)  # before it is unmapped, also where the machine was too slow
            assert outcome.ok, outcome
            assert np.array_equal(target.content, source.content)

    def test_pieces_beyond_the_registered_or_granted_memory_are_errors(
        self, memory: Memory, there: Memory, peer: Peer
    ) -> None:
        source, target = self.buffer(8192, seed=7), self.buffer(8192)
        memory.register(source.address, 4096)
        there.register(target.address, 8192)
        grant = there.grant(int64(target.address), int64(4096))
        with pytest.raises(ValueError, match="outside of registered memory"):
            peer.write(grant, int64(source.address + 1), int64(target.address), int64(4096), deadline_s=1)
        with pytest.raises(ValueError, match="outside of the grant"):
            peer.write(grant, int64(source.address), int64(target.address + 1), int64(4096), deadline_s=1)
        with pytest.raises(ValueError, match="int64 arrays of one length"):
            peer.write(grant, int64(source.address), int64(target.address), int64(1, 2), deadline_s=1)
        with pytest.raises(ValueError, match="-1 bytes"):
            peer.write(grant, int64(source.address), int64(target.address), int64(-1), deadline_s=1)
        assert not target.bytes.any()

    @pytest.mark.parametrize("nbytes", [100, 3 * MIB])
    def test_a_receiver_refuses_what_it_did_not_grant(
        self, memory: Memory, there: Memory, peer: Peer, nbytes: int
    ) -> None:
        """The sender's own checks are out of the way: it makes up a grant."""
        source, target = self.buffer(nbytes, seed=8), self.buffer(2 * nbytes)
        memory.register(source.address, nbytes)
        there.register(target.address, target.nbytes)
        right = there.grant(int64(target.address), int64(nbytes))
        wider = Grant(right.key, right.addresses, right.nbytes + 1)
        unknown = Grant(b"k" * 16, right.addresses, right.nbytes)
        start = int64(source.address)
        for grant, remote in ((wider, target.address + 1), (unknown, target.address)):
            outcome = outcome_of(peer.write(grant, start, int64(remote), int64(nbytes), deadline_s=DEADLINE_S))
            assert outcome.cause is Cause.REFUSED
        assert not target.bytes[nbytes:].any(), "a piece may be cut, and only its cuts inside the grant be written"
        self.send(peer, right, source, nbytes)
        assert np.array_equal(target.bytes[:nbytes], source.bytes)

    @pytest.mark.parametrize("how", ["revoked", "revoked just after the receiver found it", "unregistered"])
    def test_a_grant_that_has_ended_is_refused(
        self, memory: Memory, there: Memory, peer: Peer, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        source, target, grant = self.between(memory, there, 4096, seed=9)
        found = there.granted(grant.key)
        if how == "unregistered":
            there.unregister(*there.regions)
        else:
            there.revoke(grant)
        if how == "revoked just after the receiver found it":
            monkeypatch.setattr(there, "granted", lambda key: found)
        outcome = outcome_of(peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S))
        assert outcome.cause is Cause.REFUSED and not target.bytes.any()

    def test_no_byte_changes_once_revoke_returned(self, memory: Memory, there: Memory, peer: Peer) -> None:
        nbytes = 64 * MIB
        source, target, grant = self.between(memory, there, nbytes)
        source.bytes[:] = 255
        completion = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        while not target.bytes[::MIB].any() and time.monotonic() < deadline:
            time.sleep(0.002)
        there.revoke(grant)
        target.bytes[:] = 7
        outcome = outcome_of(completion)
        assert outcome.ok or outcome.cause is Cause.REFUSED
        assert (target.bytes == 7).all()

    def test_unregistered_memory_is_not_read_and_the_connection_goes_on(
        self, memory: Memory, sender: Transport, other: Process
    ) -> None:
        nbytes = 16 * MIB
        peer, source, grant = self.towards(other, sender, nbytes, seed=10)
        other.stop()  # so that the batch is under way for sure
        completion = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        time.sleep(0.05)
        memory.unregister(*(region for region in memory.regions if not region.is_stage))
        assert completion.outcome is not None and completion.outcome.cause is Cause.SOURCE
        source.free()
        other.go_on()
        small = self.buffer(4096, seed=11)
        memory.register(small.address, small.nbytes)
        _, second = other.offer(4096)
        self.send(peer, second, small, 4096)
        assert other.digest(second) == digest(small)

    def test_another_process_gets_the_bytes(self, sender: Transport, other: Process) -> None:
        nbytes = 3 * MIB + 5
        peer, source, grant = self.towards(other, sender, nbytes, seed=13)
        assert other.digest(grant) == digest(self.buffer(nbytes))
        self.send(peer, grant, source, nbytes)
        assert other.digest(grant) == digest(source)
        assert peer.alive and peer.transport == sender.name

    def test_small_batches_have_their_outcome_whether_anybody_waits_or_not(
        self, memory: Memory, there: Memory, peer: Peer
    ) -> None:
        count, rounds, nbytes = 4, 50, 5000
        source, target, grant = self.between(memory, there, count * nbytes, seed=21)
        outcomes: list[Outcome] = []
        told = threading.Semaphore(0)

        def send(offset: int) -> None:
            for number in range(rounds):
                place = int64(source.address + offset), int64(target.address + offset), int64(nbytes)
                completion = peer.write(grant, *place, deadline_s=DEADLINE_S)
                completion.add_done_callback(outcomes.append)
                completion.add_done_callback(lambda _: told.release())
                if number % 2:
                    outcome_of(completion)

        threads = [threading.Thread(target=send, args=(nbytes * i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        assert all(told.acquire(timeout=DEADLINE_S) for _ in range(count * rounds))
        for thread in threads:
            thread.join()
        assert outcomes == [Outcome()] * count * rounds
        assert np.array_equal(target.bytes, source.bytes)

    def test_batches_of_many_threads_to_several_peers_keep_apart(
        self, memory: Memory, sender: Transport, there: Memory, receiver: Transport
    ) -> None:
        count, nbytes = 24, 300_001
        endpoint = receiver.listen()
        peers = [sender.connect(endpoint, deadline_s=DEADLINE_S) for _ in range(3)]
        sources = [self.buffer(nbytes, seed=100 + i) for i in range(count)]
        targets = [self.buffer(nbytes) for _ in range(count)]
        outcomes: dict[int, Outcome] = {}

        def send(i: int) -> None:
            memory.register(sources[i].address, nbytes)
            there.register(targets[i].address, nbytes)
            grant = there.grant(int64(targets[i].address), int64(nbytes))
            completion = peers[i % 3].write(grant, *self.all_of(sources[i], grant), deadline_s=DEADLINE_S)
            outcomes[i] = outcome_of(completion)

        threads = [threading.Thread(target=send, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [outcomes[i] for i in range(count)] == [Outcome()] * count
        assert all(np.array_equal(targets[i].bytes, sources[i].bytes) for i in range(count))

    def test_a_cancelled_batch_ends_at_once_and_the_next_one_arrives(
        self, memory: Memory, there: Memory, peer: Peer
    ) -> None:
        nbytes = 64 * MIB
        source, target, grant = self.between(memory, there, nbytes, seed=17)
        completion = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        completion.cancel()
        assert outcome_of(completion).cause in (Cause.CANCELLED, None)
        self.send(peer, grant, source, nbytes)
        assert np.array_equal(target.bytes, source.bytes)
