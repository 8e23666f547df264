"""The conformance class: what any transport must do. Inherit it in a test and name the class.

class TestMine(TransportConformance):
    transport = MyTransport            # called with (memory, identity, **options)
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from transfer.base import Cause, Grant, Int64, Outcome, Peer, Transport, Unavailable
from transfer.handshake import Identity
from transfer.memory import Memory
from transfer.testing_process import MIB, Buffer, buffer_class, digest, int64, make_transport

DEADLINE_S = 120.0


def scattered(source: Buffer, target: int, sizes: Int64, seed: int) -> tuple[Int64, Int64]:
    """Addresses of pieces of these sizes in random order on both sides, with gaps of 0 to 16 bytes between them."""
    rng = np.random.default_rng(seed)
    sides = []
    for base in (source.address, target):
        order = rng.permutation(len(sizes))
        gaps = rng.integers(0, 17, len(sizes))
        starts = np.empty(len(sizes), dtype=np.int64)
        starts[order] = base + np.cumsum(sizes[order] + gaps) - sizes[order]
        sides.append(starts)
    return sides[0], sides[1]


def expected(
    source: Buffer, local: Int64, remote: Int64, nbytes: Int64, target: int, size: int
) -> npt.NDArray[np.uint8]:
    """What `size` bytes of zeros at `target` become."""
    result, content = np.zeros(size, dtype=np.uint8), np.asarray(source.bytes)
    for a, b, n in zip(local - source.address, remote - target, nbytes, strict=True):
        result[b : b + n] = content[a : a + n]
    return result


class Process:
    """Another process with a transport of the same class; see `transfer.testing_process`."""

    def __init__(self, transport: type[Transport], options: dict[str, Any] | None = None) -> None:
        name = f"{transport.__module__}:{transport.__qualname__}"
        command = [sys.executable, "-m", "transfer.testing_process", name, json.dumps(options or {})]
        # Not from here: `-m` would find a source tree before what is installed.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")

    def ask(self, **order: Any) -> Any:
        """Have it do something; see `transfer.testing_process`."""
        self.tell(**order)
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the other process died"
        return json.loads(line)

    def tell(self, **order: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def offer(self, nbytes: int) -> tuple[bytes, Grant]:
        """Its endpoint, and a grant of `nbytes` new bytes."""
        answer = self.ask(do="offer", nbytes=nbytes)
        grant = Grant(bytes.fromhex(answer["key"]), int64(answer["address"]), int64(nbytes))
        return bytes.fromhex(answer["endpoint"]), grant

    def digest(self, grant: Grant) -> str:
        """Of what the granted memory holds now."""
        answer: str = self.ask(do="digest", key=grant.key.hex())["digest"]
        return answer

    def stop(self) -> None:
        """Stop it, and wait until it is stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe:
                    pipe.close()


class TransportConformance:
    """Claims about every transport."""

    transport: ClassVar[type[Transport]]

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """For `make_transport`; JSON."""
        return {}

    @pytest.fixture(autouse=True)
    def _use(self, options: dict[str, Any]) -> None:
        self._options = options

    def make(self, memory: Memory, secret: bytes = b"") -> Transport:
        return make_transport(self.transport, memory, Identity(secret), self._options)

    def buffer(self, nbytes: int, seed: int | None = None) -> Buffer:
        """Memory to send from or to write to: of the transport's own kind, where it names one."""
        return buffer_class(self.transport)(nbytes, seed)

    @pytest.fixture
    def memory(self) -> Memory:
        """Of the sender."""
        return Memory()

    @pytest.fixture
    def sender(self, memory: Memory) -> Iterator[Transport]:
        with self.make(memory) as made:
            yield made

    @pytest.fixture
    def there(self) -> Memory:
        """Memory of the receiver."""
        return Memory()

    @pytest.fixture
    def receiver(self, there: Memory) -> Iterator[Transport]:
        """In this process."""
        with self.make(there) as made:
            yield made

    @pytest.fixture
    def peer(self, sender: Transport, receiver: Transport) -> Peer:
        return sender.connect(receiver.listen(), deadline_s=DEADLINE_S)

    @pytest.fixture
    def other(self) -> Iterator[Process]:
        """A receiver in another process."""
        process = Process(self.transport, self._options)
        yield process
        process.kill()

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
        assert peer.write(grant, local, remote, sizes, deadline_s=DEADLINE_S).wait() == Outcome()
        assert np.array_equal(target.bytes, expected(source, local, remote, sizes, target.address, nbytes))

    def test_pieces_arrive_at_any_alignment(self, memory: Memory, there: Memory, peer: Peer) -> None:
        source, target = self.buffer(MIB, seed=3), self.buffer(MIB)
        memory.register(source.address, MIB)
        grant = there.grant(int64(there.register(target.address, MIB).address), int64(MIB))
        cases = [(a, b, n) for a in range(9) for b in range(9) for n in (1, 7, 8, 63, 64, 65, 100)]
        steps = int64(*range(len(cases))) * 128
        local = source.address + steps + int64(*(a for a, _, _ in cases))
        remote = target.address + steps + int64(*(b for _, b, _ in cases))
        sizes = int64(*(n for _, _, n in cases))
        assert peer.write(grant, local, remote, sizes, deadline_s=DEADLINE_S).wait().ok
        assert np.array_equal(target.bytes, expected(source, local, remote, sizes, target.address, MIB))

    @pytest.mark.parametrize("nbytes", [1, 16384, MIB - 1, MIB, 4 * MIB + 1, 40 * MIB + 3])
    def test_one_piece_of_any_size_arrives(self, memory: Memory, there: Memory, peer: Peer, nbytes: int) -> None:
        source, target = self.buffer(nbytes, seed=4), self.buffer(nbytes)
        memory.register(source.address, nbytes)
        there.register(target.address, nbytes)
        grant = there.grant(int64(target.address), int64(nbytes))
        self.send(peer, grant, source, nbytes)
        assert np.array_equal(target.bytes, source.bytes)

    def test_more_pieces_than_one_order_takes_arrive(self, memory: Memory, there: Memory, peer: Peer) -> None:
        count = 150_000
        source, target = self.buffer(2 * count, seed=5), self.buffer(2 * count)
        memory.register(source.address, source.nbytes)
        there.register(target.address, target.nbytes)
        grant = there.grant(int64(target.address), int64(target.nbytes))
        places = np.arange(count) * 2
        sizes = np.ones(count, dtype=np.int64)
        local, remote = source.address + places, target.address + places
        assert peer.write(grant, local, remote, sizes, deadline_s=DEADLINE_S).wait().ok
        assert np.array_equal(target.bytes[::2], source.bytes[::2]) and not target.bytes[1::2].any()

    def test_nothing_to_write_is_ok(self, there: Memory, peer: Peer) -> None:
        grant = there.grant(int64(), int64())
        assert peer.write(grant, int64(), int64(), int64(), deadline_s=1).wait().ok
        assert peer.write(grant, int64(5), int64(5), int64(0), deadline_s=1).wait().ok

    @pytest.mark.slow
    def test_a_piece_beyond_4_gib_arrives(self, memory: Memory, there: Memory, peer: Peer) -> None:
        nbytes, fold = (1 << 32) + 12345, 64 * MIB
        with folded(nbytes, fold, seed=6) as source, folded(nbytes, fold) as target:
            regions = memory.register(source.address, nbytes), there.register(target.address, nbytes)
            grant = there.grant(int64(target.address), int64(nbytes))
            outcome = peer.write(
                grant, int64(source.address), int64(target.address), int64(nbytes), deadline_s=300
            ).wait()
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
            outcome = peer.write(grant, start, int64(remote), int64(nbytes), deadline_s=DEADLINE_S).wait()
            assert outcome.cause is Cause.REFUSED
        assert not target.bytes[nbytes:].any(), "a piece may be cut, and only its cuts inside the grant be written"
        self.send(peer, right, source, nbytes)
        assert np.array_equal(target.bytes[:nbytes], source.bytes)

    def test_a_revoked_grant_is_refused(self, memory: Memory, there: Memory, peer: Peer) -> None:
        source, target = self.buffer(4096, seed=9), self.buffer(4096)
        memory.register(source.address, 4096)
        there.register(target.address, 4096)
        grant = there.grant(int64(target.address), int64(4096))
        there.revoke(grant)
        outcome = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S).wait()
        assert outcome.cause is Cause.REFUSED and not target.bytes.any()

    def test_a_grant_revoked_just_after_the_receiver_found_it_is_refused(
        self, memory: Memory, there: Memory, peer: Peer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, target = self.buffer(4096, seed=9), self.buffer(4096)
        memory.register(source.address, 4096)
        there.register(target.address, 4096)
        grant = there.grant(int64(target.address), int64(4096))
        held = there.granted(grant.key)
        there.revoke(grant)
        monkeypatch.setattr(there, "granted", lambda key: held)
        outcome = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S).wait()
        assert outcome.cause is Cause.REFUSED and not target.bytes.any()

    def test_no_byte_changes_once_revoke_returned(self, memory: Memory, there: Memory, peer: Peer) -> None:
        nbytes = 64 * MIB
        source, target = self.buffer(nbytes), self.buffer(nbytes)
        source.bytes[:] = 255
        memory.register(source.address, nbytes)
        there.register(target.address, nbytes)
        grant = there.grant(int64(target.address), int64(nbytes))
        completion = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        while not target.bytes[::MIB].any() and time.monotonic() < deadline:
            time.sleep(0.002)
        there.revoke(grant)
        target.bytes[:] = 7
        outcome = completion.wait()
        assert outcome.ok or outcome.cause is Cause.REFUSED
        assert (target.bytes == 7).all()

    def test_unregistered_memory_is_not_read_and_the_connection_goes_on(
        self, memory: Memory, sender: Transport, other: Process
    ) -> None:
        nbytes = 16 * MIB
        endpoint, grant = other.offer(nbytes)
        peer = sender.connect(endpoint, deadline_s=DEADLINE_S)
        source = self.buffer(nbytes, seed=10)
        region = memory.register(source.address, nbytes)
        other.stop()  # so that the batch is under way for sure
        completion = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        time.sleep(0.05)
        memory.unregister(region)
        assert completion.outcome is not None and completion.outcome.cause is Cause.SOURCE
        source.free()
        other.go_on()
        small = self.buffer(4096, seed=11)
        memory.register(small.address, small.nbytes)
        _, second = other.offer(4096)
        self.send(peer, second, small, 4096)
        assert other.digest(second) == digest(small)

    def test_memory_unregistered_by_the_receiver_is_refused(self, memory: Memory, there: Memory, peer: Peer) -> None:
        source, target = self.buffer(4096, seed=12), self.buffer(4096)
        memory.register(source.address, 4096)
        region = there.register(target.address, 4096)
        grant = there.grant(int64(target.address), int64(4096))
        there.unregister(region)
        target.free()
        outcome = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S).wait()
        assert outcome.cause is Cause.REFUSED

    def test_another_process_gets_the_bytes(self, memory: Memory, sender: Transport, other: Process) -> None:
        nbytes = 3 * MIB + 5
        endpoint, grant = other.offer(nbytes)
        peer = sender.connect(endpoint, deadline_s=DEADLINE_S)
        source = self.buffer(nbytes, seed=13)
        memory.register(source.address, nbytes)
        assert other.digest(grant) == digest(self.buffer(nbytes))
        self.send(peer, grant, source, nbytes)
        assert other.digest(grant) == digest(source)
        assert peer.alive and peer.transport == sender.name and len(peer.instance) == 16

    def test_a_stopped_peer_costs_the_deadline_and_is_there_again_afterwards(
        self, memory: Memory, sender: Transport, other: Process
    ) -> None:
        nbytes = 32 * MIB
        endpoint, grant = other.offer(nbytes)
        peer = sender.connect(endpoint, deadline_s=DEADLINE_S)
        source = self.buffer(nbytes, seed=14)
        memory.register(source.address, nbytes)
        other.stop()
        late = peer.write(grant, *self.all_of(source, grant), deadline_s=0.2)
        told: list[Outcome] = []
        late.add_done_callback(told.append)
        deadline = time.monotonic() + DEADLINE_S
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
        assert told and told[0].cause is Cause.DEADLINE, "the outcome comes without anybody waiting for it"
        waited = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S).wait(0.1)
        assert waited.cause is Cause.DEADLINE
        other.go_on()
        _, second = other.offer(nbytes)
        self.send(peer, second, source, nbytes)
        assert other.digest(second) == digest(source)

    def test_a_deadline_before_those_of_other_batches_is_kept(
        self, memory: Memory, sender: Transport, other: Process
    ) -> None:
        """Small batches, which are sent by the thread that asks: the transport's own has to be told of the deadline."""
        endpoint, grant = other.offer(4096)
        peer = sender.connect(endpoint, deadline_s=DEADLINE_S)
        source = self.buffer(4096, seed=20)
        memory.register(source.address, 4096)
        other.stop()
        late = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        soon = peer.write(grant, *self.all_of(source, grant), deadline_s=0.2)
        told = threading.Event()
        soon.add_done_callback(lambda _: told.set())
        assert told.wait(DEADLINE_S / 2) and soon.wait().cause is Cause.DEADLINE
        assert late.outcome is None
        other.go_on()
        assert late.wait().ok

    def test_small_batches_have_their_outcome_whether_anybody_waits_or_not(
        self, memory: Memory, there: Memory, peer: Peer
    ) -> None:
        count, rounds, nbytes = 4, 50, 5000
        source, target = self.buffer(count * nbytes, seed=21), self.buffer(count * nbytes)
        memory.register(source.address, source.nbytes)
        there.register(target.address, target.nbytes)
        grant = there.grant(int64(target.address), int64(target.nbytes))
        outcomes: list[Outcome] = []
        told = threading.Semaphore(0)

        def send(offset: int) -> None:
            for number in range(rounds):
                place = int64(source.address + offset), int64(target.address + offset), int64(nbytes)
                completion = peer.write(grant, *place, deadline_s=DEADLINE_S)
                completion.add_done_callback(outcomes.append)
                completion.add_done_callback(lambda _: told.release())
                if number % 2:
                    completion.wait()

        threads = [threading.Thread(target=send, args=(nbytes * i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        assert all(told.acquire(timeout=DEADLINE_S) for _ in range(count * rounds))
        for thread in threads:
            thread.join()
        assert outcomes == [Outcome()] * count * rounds
        assert np.array_equal(target.bytes, source.bytes)

    def test_a_source_that_is_used_again_after_a_failure_does_not_travel(
        self, memory: Memory, sender: Transport, other: Process
    ) -> None:
        """The peer that fetches by itself is told nothing of it: there the peer's revoking has to do."""
        if sender.name in ("cma", "cuda_ipc"):
            pytest.skip("the receiver fetches; it revokes the grant of a transfer that failed")
        nbytes = 16 * MIB
        endpoint, grant = other.offer(nbytes)
        peer = sender.connect(endpoint, deadline_s=DEADLINE_S)
        source = self.buffer(nbytes)
        memory.register(source.address, nbytes)
        other.stop()
        late = peer.write(grant, *self.all_of(source, grant), deadline_s=0.1)
        assert late.wait().cause is Cause.DEADLINE
        source.bytes[:] = 255
        other.go_on()
        _, second = other.offer(4096)
        self.send(peer, second, source, 4096)  # in order behind what was on its way
        assert other.digest(grant) == digest(self.buffer(nbytes))

    def test_a_peer_killed_in_mid_batch_is_lost(self, memory: Memory, sender: Transport, other: Process) -> None:
        nbytes = 32 * MIB
        endpoint, grant = other.offer(nbytes)
        peer = sender.connect(endpoint, deadline_s=DEADLINE_S)
        source = self.buffer(nbytes, seed=15)
        memory.register(source.address, nbytes)
        other.stop()
        completion = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        other.kill()
        assert completion.wait().cause is Cause.PEER_LOST
        assert not peer.alive
        again = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        assert again.outcome is not None and again.outcome.cause is Cause.PEER_LOST
        with pytest.raises(Unavailable):
            sender.connect(endpoint, deadline_s=DEADLINE_S)

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
            outcomes[i] = completion.wait()

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
        source, target = self.buffer(nbytes, seed=17), self.buffer(nbytes)
        memory.register(source.address, nbytes)
        there.register(target.address, nbytes)
        grant = there.grant(int64(target.address), int64(nbytes))
        completion = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        completion.cancel()
        assert completion.wait().cause in (Cause.CANCELLED, None)
        self.send(peer, grant, source, nbytes)
        assert np.array_equal(target.bytes, source.bytes)

    def test_closing_fails_what_is_under_way_and_leaves_nothing_behind(self, other: Process) -> None:
        other.offer(1)
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        memory, nbytes = Memory(), 32 * MIB
        sender = self.make(memory)
        sender.listen()
        assert sender.listen() == sender.listen()
        endpoint, grant = other.offer(nbytes)
        peer = sender.connect(endpoint, deadline_s=DEADLINE_S)
        source = self.buffer(nbytes, seed=18)
        memory.register(source.address, nbytes)
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

    def all_of(self, source: Buffer, grant: Grant) -> tuple[Int64, Int64, Int64]:
        """From the beginning of `source` to the whole grant, which is one range."""
        return int64(source.address), grant.addresses, grant.nbytes

    def send(self, peer: Peer, grant: Grant, source: Buffer, nbytes: int) -> None:
        start = int64(source.address)
        outcome = peer.write(grant, start, grant.addresses[:1], int64(nbytes), deadline_s=DEADLINE_S).wait()
        assert outcome == Outcome()


class folded:
    """Many addresses on little memory: `nbytes` of address space that repeat the same `fold` bytes."""

    def __init__(self, nbytes: int, fold: int, seed: int | None = None) -> None:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        self._libc, self.nbytes = libc, -(-nbytes // fold) * fold
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._file = os.memfd_create("fold")
        os.ftruncate(self._file, fold)
        self.content = np.frombuffer(mmap.mmap(self._file, fold), dtype=np.uint8)
        if seed is not None:
            self.content[:] = np.random.default_rng(seed).integers(0, 256, fold, dtype=np.uint8)
        self.address: int = libc.mmap(None, self.nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        map_fixed, access = 0x10, mmap.PROT_READ | mmap.PROT_WRITE
        for start in range(self.address, self.address + self.nbytes, fold):
            assert libc.mmap(start, fold, access, mmap.MAP_SHARED | map_fixed, self._file, 0) == start

    def __enter__(self) -> folded:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._libc.munmap(self.address, self.nbytes)
        os.close(self._file)
