"""Windows of one queue pair: what is left where one of them fails. With a stand-in for the cards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from simulated.cuda_driver import LIBRARY
from simulated.verbs import QP, Fabric, Window

from transfer.testing.memory import Buffer
from transfer.transports.base import Region
from transfer.transports.rdma import windows as module
from transfer.transports.rdma.card import Card
from transfer.transports.rdma.opened import open_cards
from transfer.transports.rdma.queue_pair import Chain
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.trial import _connected
from transfer.transports.rdma.verbs import Completion
from transfer.transports.vectors import Pieces

NBYTES = 8192


class Made:
    """A card with two registered regions, and the windows of a queue pair that is connected with another one here."""

    def __init__(self, fabric: Fabric, stack: contextlib.ExitStack) -> None:
        self.device = fabric.cards["card0"]
        self.card: Card
        (self.card,) = open_cards([], RdmaSettings())
        stack.callback(self.card.close)
        self.buffers = [Buffer(NBYTES, seed=1), Buffer(NBYTES, seed=2)]
        self.regions = [Region(buffer.address, NBYTES) for buffer in self.buffers]
        for region in self.regions:
            self.card.register(region, by_window=True)
        _, _, self.windows = _connected(stack, self.card)
        self.queue: Any = self.windows._queue

    @property
    def bound(self) -> dict[int, Any]:
        domain: Any = self.card._domain
        return dict(domain.windows)

    def open(self) -> list[Any]:
        starts = [buffer.address for buffer in self.buffers]
        opened, _ = self.windows.open(Pieces(starts, starts, [NBYTES] * 2, 2 * NBYTES))
        assert len(opened) == 2 == len(self.bound)
        return opened


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    LIBRARY.__init__()  # type: ignore[misc]  # of devices whose addresses may be the host's now
    fabric = Fabric(monkeypatch, [400e6])
    with contextlib.ExitStack() as stack:
        yield Made(fabric, stack)
    fabric.close()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> list[Window]:
    """Those that the card does not let go."""
    kept: list[Window] = []
    close = Window.close

    def refusing(window: Window) -> None:
        if window in kept:
            raise OSError(16, "Device or resource busy")
        close(window)

    monkeypatch.setattr(Window, "close", refusing)
    return kept


def test_where_one_cannot_be_closed_the_others_are_and_it_is_dropped_later(made: Made, stuck: list[Window]) -> None:
    """Else it would let the peer read in the next epoch."""
    first, _ = made.open()
    stuck.append(first)
    with pytest.raises(OSError, match="busy"):
        made.windows.drop()
    assert list(made.bound) == [first.key]
    stuck.clear()
    made.windows.drop()
    assert not made.bound and not any(made.card._windows.values())


def test_memory_whose_window_cannot_be_closed_is_let_go_all_the_same(made: Made, stuck: list[Window]) -> None:
    first, _ = made.open()
    stuck.append(first)
    domain: Any = made.card._domain
    before = len(domain.regions)
    with pytest.raises(OSError, match="busy"):
        made.card.unregister(made.windows._bound[first].region)
    assert len(domain.regions) == before - 1
    stuck.clear()


def test_once_the_card_failed_it_is_asked_nothing_until_all_were_dropped(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a card that says nothing each question would cost a second, with memory that waits to be unregistered."""
    opened, asked, post = made.open(), [], QP.post
    monkeypatch.setattr(QP, "post", lambda pair, chain: asked.append(chain))  # and nothing is over
    monkeypatch.setattr(module, "DEADLINE_S", 0.01)
    for _ in range(3):
        with pytest.raises(OSError, match="said nothing"):
            made.windows.close(opened)
        with pytest.raises(OSError, match="said nothing"):
            made.open()
    assert len(asked) == 1 and len(made.bound) == 2
    monkeypatch.setattr(QP, "post", post)
    monkeypatch.setattr(module, "DEADLINE_S", 60.0)
    made.windows.drop()
    assert not made.bound
    made.windows.close(made.open())
    assert not made.bound


def test_what_an_epoch_that_is_over_has_left_in_the_queue_fails_nothing(made: Made) -> None:
    """Not each card takes that away when its queue pair begins anew."""
    made.windows.close(made.open())
    for number in range(made.windows._number + 1):
        made.queue.add(Completion(number, False, "Work Request Flushed Error"))
    made.windows.close(made.open())


def test_more_windows_than_a_batch_has_are_opened_and_closed_in_several(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH", 1)
    counts: list[int] = []
    post = QP.post

    def counted(pair: QP, chain: Chain) -> None:
        counts.append(chain.count)
        post(pair, chain)

    monkeypatch.setattr(QP, "post", counted)
    made.windows.close(made.open())
    assert counts == [1] * 4 and not made.bound


def test_a_window_is_no_larger_than_the_card_binds(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.transports.rdma.card.MAX_WINDOW_NBYTES", 1024)
    made.device.max_window_nbytes = 1024
    starts = [made.buffers[0].address + offset for offset in (0, 512, 4096, 6000)]
    opened, keys = made.windows.open(Pieces(starts, starts, [256] * 4, 1024))
    assert keys.covers(starts, [256] * 4) and keys.sizes.tolist() == [768, 256, 256]
    assert sorted(size for _, size, _ in made.bound.values()) == [256, 256, 768]
    made.windows.close(opened)
    assert not made.bound
