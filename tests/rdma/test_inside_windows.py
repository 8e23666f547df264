"""Keys that end with an order: what a card still reads by them, and for whom. Over real queue pairs and windows."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from rdma.test_inside import EMULATED

from transfer.testing.fixtures import DEADLINE_S, TransportFixtures
from transfer.testing.memory import MIB
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Cause
from transfer.transports.memory import Memory
from transfer.transports.rdma.keys import Keys, decode_keys
from transfer.transports.rdma.opened import open_cards
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.transport import RdmaTransport
from transfer.transports.rdma.windows import BATCH, Windows
from transfer.transports.vectors import Pieces

pytestmark = pytest.mark.inside
NBYTES = 8192


def piece(address: int, nbytes: int = NBYTES) -> Pieces:
    return Pieces([address], [address], [nbytes], nbytes)


class TestWindows(TransportFixtures):
    """Over one rail: with another one they would break both, one after the other."""

    transport = RdmaTransport

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return EMULATED

    @pytest.fixture(autouse=True)
    def one_rail(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("transfer.transports.rdma.rails.MAX_RAILS", 1)

    @pytest.fixture
    def told(self, peer: Any, monkeypatch: pytest.MonkeyPatch) -> list[Keys]:
        """What its orders carry from now on."""
        said, encoder = [], peer._encoder
        tell = encoder._told

        def listening(path: Any, part: Any) -> bytes:
            keys: bytes = tell(path, part)
            said.append(decode_keys(keys))
            return keys

        monkeypatch.setattr(encoder, "_told", listening)
        return said

    def refused(self, peer: Any, grant: Any, source: Any, target: Any, keys: Keys) -> None:
        target.bytes[:] = 7
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(peer._encoder, "_told", lambda path, part: keys.encode(part.pieces.local))
            outcome = outcome_of(peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S))
        assert outcome.cause is Cause.SOURCE and "broke" in outcome.detail
        assert (target.bytes == 7).all() and peer.alive
        self.send(peer, grant, source, len(source.bytes))
        assert np.array_equal(target.bytes, source.bytes)

    def test_a_key_that_was_told_reads_nothing_once_its_order_is_over(
        self, memory: Memory, there: Memory, peer: Any, told: list[Keys]
    ) -> None:
        source, target, grant = self.between(memory, there, NBYTES, seed=1)
        self.send(peer, grant, source, NBYTES)
        self.send(peer, grant, source, NBYTES)
        first, second = told[:2]
        assert first.keys[0] != second.keys[0]
        self.refused(peer, grant, source, target, second)

    def test_the_key_of_the_registered_memory_reads_nothing(
        self, memory: Memory, there: Memory, sender: Any, peer: Any
    ) -> None:
        source, target, grant = self.between(memory, there, NBYTES, seed=2)
        keys = decode_keys(sender._rails.all[0].card.unreadable(piece(source.address)))
        assert keys.covers([source.address], [NBYTES])
        self.refused(peer, grant, source, target, keys)

    def test_a_window_goes_from_the_first_piece_to_the_end_of_the_last(
        self, memory: Memory, there: Memory, peer: Any
    ) -> None:
        """What it is bound to. Soft-RoCE of Linux 6.1 looks at the bounds of the registered memory instead."""
        source, _, _ = self.between(memory, there, NBYTES, seed=3)
        (windows,) = peer._encoder._windows
        places, sizes = [source.address + 4096, source.address + 1024], [512, 256]
        opened, keys = windows.open(Pieces(places, places, sizes, sum(sizes)))
        assert (keys.starts.tolist(), keys.sizes.tolist()) == ([source.address + 1024], [3584])
        bound = windows._chain.requests[0]
        assert bound["bind_mw.bind_info.addr"] == source.address + 1024 and bound["bind_mw.bind_info.length"] == 3584
        assert bound["bind_mw.rkey"] == keys.keys[0] == opened[0].key
        windows.close(opened)

    def test_a_key_that_was_told_to_one_peer_reads_nothing_for_another(
        self, memory: Memory, there: Memory, sender: Any, peer: Any
    ) -> None:
        """Both are of this process, and of one protection domain."""
        source, target, grant = self.between(memory, there, NBYTES, seed=4)
        with self.make(Memory()) as stranger:
            other = sender.connect(stranger.listen(), deadline_s=DEADLINE_S)
            (windows,) = other._encoder._windows
            opened, keys = windows.open(piece(source.address))
            self.refused(peer, grant, source, target, keys)
            windows.close(opened)

    def test_memory_is_unregistered_while_windows_are_open(
        self, memory: Memory, there: Memory, sender: Any, peer: Any
    ) -> None:
        source, target, grant = self.between(memory, there, NBYTES, seed=5)
        (windows,) = peer._encoder._windows
        opened, keys = windows.open(piece(source.address))
        memory.unregister(*memory.regions)
        memory.register(source.address, NBYTES)
        self.refused(peer, grant, source, target, keys)
        windows.close(opened)
        assert not sender._rails.all[0].card._windows.get(memory.regions[0])

    def test_orders_of_many_regions_and_more_orders_than_a_window_has_keys(
        self, memory: Memory, there: Memory, sender: Any, peer: Any, told: list[Keys]
    ) -> None:
        count = BATCH + 5
        sources = [self.buffer(NBYTES, seed) for seed in range(count)]
        for source in sources:
            memory.register(source.address, NBYTES)
        target = self.buffer(count * NBYTES)
        there.register(target.address, count * NBYTES)
        grant = there.grant(np.array([target.address]), np.array([count * NBYTES]))
        starts = np.array([source.address for source in sources])
        places, sizes = target.address + NBYTES * np.arange(count), np.full(count, NBYTES)
        assert outcome_of(peer.write(grant, starts, places, sizes, deadline_s=DEADLINE_S)).ok
        assert len(told[0].keys) == count
        assert np.array_equal(target.bytes, np.concatenate([source.bytes for source in sources]))
        for _ in range(300):
            self.send(peer, grant, sources[0], NBYTES)
        card = sender._rails.all[0].card
        assert not any(card._windows.values()), "all are over"
        assert len(peer._encoder._windows[0]._free) == count, "and used again"

    @pytest.mark.parametrize("when", ["open", "close"])
    def test_a_window_that_fails_costs_the_queue_pair_and_no_bytes(
        self, memory: Memory, there: Memory, peer: Any, monkeypatch: pytest.MonkeyPatch, when: str
    ) -> None:
        source, target, grant = self.between(memory, there, MIB, seed=6)
        act, fails = getattr(Windows, when), iter([True])

        def failing(windows: Windows, *arguments: Any) -> Any:
            if next(fails, False):
                raise OSError("made to fail")
            return act(windows, *arguments)

        monkeypatch.setattr(Windows, when, failing)
        for _ in range(3):
            target.bytes[:] = 0
            self.send(peer, grant, source, MIB)
            assert np.array_equal(target.bytes, source.bytes)
        (path,) = peer._encoder.paths.all
        deadline = time.monotonic() + DEADLINE_S
        while not path.is_in and time.monotonic() < deadline:
            time.sleep(0.01)
        assert path.is_in and path.epoch >= 1

    def test_rdma_windows_off_means_the_keys_of_regions(self, memory: Memory, there: Memory) -> None:
        source, target, grant = self.between(memory, there, NBYTES, seed=7)
        settings = RdmaSettings(lost_after_s=10.0, no_windows="rdma_windows is off")
        with RdmaTransport(memory, settings=settings) as sender, RdmaTransport(there, settings=settings) as receiver:
            memory.follow(sender)
            there.follow(receiver)
            peer: Any = sender.connect(receiver.listen(), deadline_s=DEADLINE_S)
            self.send(peer, grant, source, NBYTES)
            assert np.array_equal(target.bytes, source.bytes)
            assert not peer._encoder._windows[0]._free


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("open", "it does not read by a window: it read something else"),
        ("close", "it reads by a window that is over"),
    ],
)
def test_a_card_whose_windows_do_not_work_has_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, act: str, said: str
) -> None:
    if act == "open":
        monkeypatch.setattr("transfer.transports.rdma.card.Cells.holds", lambda cells, place, number: False)
    else:
        monkeypatch.setattr(Windows, "close", lambda windows, opened: None)
    cards = open_cards([], RdmaSettings())
    assert not any(card.has_windows for card in cards) and said in caplog.text
    for card in cards:
        assert "no memory windows" in card.described
        card.close()


def test_cards_of_the_machine_have_windows() -> None:
    for card in open_cards([], RdmaSettings()):
        assert card.has_windows and "by memory windows" in card.described
        card.close()
