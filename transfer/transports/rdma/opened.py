"""The rails of a process: each an opened card, with the thread that hears what it has done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transfer.transports.base import Region, Unavailable
from transfer.transports.cuda.driver import CudaError
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.rdma.card import Card, open_cards
from transfer.transports.rdma.completions import Completions
from transfer.transports.rdma.settings import RdmaSettings


@dataclass(frozen=True, slots=True)
class OpenRail:
    """Args:
    silent: the completion queue of queue pairs that only answer: nothing is ever in it.
    """

    card: Card
    completions: Completions
    silent: Any

    def close(self) -> None:
        """Queues of others must be closed before. Raises OSError."""
        self.completions.close()
        self.silent.close()
        self.card.close()


def _pci_address(place: OnDevice) -> str:
    """Empty where the driver does not say."""
    try:
        return place.driver.pci_address(place.device)
    except CudaError:
        return ""


class OpenRails:
    """All that are used together."""

    def __init__(self, hosts: Sequence[str], settings: RdmaSettings, place: OnDevice | None = None) -> None:
        """Raises Unavailable; see `open_cards`.

        Args:
            place: the device whose memory is to travel: without stages, if the settings allow that.
        """
        self.all: list[OpenRail] = []
        cards = open_cards(hosts, settings, "" if place is None or settings.no_gpudirect else _pci_address(place))
        try:
            while cards:
                self.all.append(_opened(cards[0]))
                del cards[0]
        except (OSError, RuntimeError) as error:
            for card in cards:
                card.close()
            self.close()
            raise Unavailable(f"{cards[0].rail} cannot be used: {error}") from error

    def register(self, region: Region) -> None:
        """With every card, or with none. Raises TransferError."""
        self._with_all(region, lambda card: card.register(region))

    def register_device(self, region: Region) -> None:
        """The same, of memory that the kernel knows to be a device's."""
        self._with_all(region, lambda card: card.register(region, remedy=""))

    def register_dma_buf(self, region: Region, descriptor: int, offset: int) -> None:
        """The same; see `Card.register_dma_buf`."""
        self._with_all(region, lambda card: card.register_dma_buf(region, descriptor, offset))

    def unregister(self, region: Region) -> None:
        """Raises OSError where a card does not let go of it; all others have."""
        with contextlib.ExitStack() as stack:
            for rail in self.all:
                stack.callback(rail.card.unregister, region)

    def _with_all(self, region: Region, register: Callable[[Card], None]) -> None:
        with contextlib.ExitStack() as undo:
            for rail in self.all:
                register(rail.card)
                undo.callback(rail.card.unregister, region)
            undo.pop_all()

    def close(self) -> None:
        """May be called twice."""
        while self.all:
            self.all.pop().close()


def _opened(card: Card) -> OpenRail:
    """Raises OSError, RuntimeError; the card is still the caller's then."""
    completions = Completions(card)
    try:
        return OpenRail(card, completions, card.completion_queue(1))
    except BaseException:
        completions.close()
        raise
