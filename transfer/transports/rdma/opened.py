"""The rails of a process: each an opened card, with the thread that hears what it has done."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.transports.base import Region, Unavailable
from transfer.transports.cuda.driver import CudaError
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.rdma.card import Card
from transfer.transports.rdma.completions import Completions
from transfer.transports.rdma.rails import SYSFS, Rail, chosen, distances, links_to, rails, unused
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.trial import without_windows
from transfer.transports.rdma.verbs import library

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OpenRail:
    card: Card
    completions: Completions

    def close(self) -> None:
        """Queues of others must be closed before. Raises OSError."""
        try:
            self.completions.close()
        finally:
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
                self.all.append(OpenRail(cards[0], Completions(cards[0])))
                del cards[0]
        except (OSError, RuntimeError) as error:
            for card in cards:
                card.close()
            self.close()
            raise Unavailable(f"{cards[0].rail} cannot be used: {error}") from error

    def register(self, region: Region) -> None:
        """With every card, or with none. Raises TransferError."""
        self._with_all(region, lambda card: card.register(region, by_window=True))

    def register_device(self, region: Region, *, by_window: bool) -> None:
        """The same, of memory that the kernel knows to be a device's."""
        self._with_all(region, lambda card: card.register(region, remedy="", by_window=by_window))

    def register_dma_buf(self, region: Region, descriptor: int, offset: int, *, by_window: bool) -> None:
        """The same; see `Card.register_dma_buf`."""
        self._with_all(region, lambda card: card.register_dma_buf(region, descriptor, offset, by_window=by_window))

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
            rail = self.all.pop()
            try:
                rail.close()
            except OSError as error:
                cause = f"transfer.rdma.close:{rail.card.rail.name}:{kind_of(str(error))}"
                log_once(cause, "rdma: %s cannot be closed: %s", rail.card.rail, error, logger=logger)


def open_cards(hosts: Sequence[str], settings: RdmaSettings, near: str = "") -> list[Card]:
    """One for each port to use, the best first; one that cannot be used is left out. Raises Unavailable for none.

    Args:
        hosts: the addresses by which peers know this process: ports that have them are preferred.
        near: the PCI address of the device whose memory cards are to reach by themselves.
    """
    cards: list[Card] = []
    reasons: list[str] = []
    for rail in _rails(hosts, settings, links_to(near) if near else {}):
        try:
            cards.append(_card(rail, settings))
        except Unavailable as error:
            reasons.append(str(error))
    if not cards:
        raise Unavailable("; ".join(reasons))
    if missing := unused(settings.ports, [card.rail for card in cards]):
        reasons.append(f"rdma_ports names {', '.join(missing)}: no such port is up with an address for RDMA")
    for reason in reasons:
        log_once(f"transfer.rdma.rail:{kind_of(reason)}", "rdma: a rail is left out: %s", reason, logger=logger)
    return cards


def _card(rail: Rail, settings: RdmaSettings) -> Card:
    """Raises Unavailable."""
    card = Card(rail, settings)
    if card.has_windows and (why_not := settings.no_windows or without_windows(card)):
        card.has_windows = False
        cause = f"transfer.rdma.windows:{rail.device}:{kind_of(why_not)}"
        said = "rdma: %s has no memory windows for us, so peers that were told a key keep it: %s"
        level = logging.INFO if settings.no_windows else logging.WARNING
        log_once(cause, said, rail.device, why_not, level=level, logger=logger)
    return card


def _rails(hosts: Sequence[str], settings: RdmaSettings, links: Mapping[str, int]) -> list[Rail]:
    """Raises Unavailable."""
    found = rails()
    if not found:  # asked first: a process without a card never has the library
        raise Unavailable(f"there is no RDMA card: {SYSFS} is empty")
    library()
    if several := chosen(found, hosts, settings.ports, settings.gid_index, distances(), links):
        return several
    seen = ", ".join(sorted({f"{rail.device} port {rail.port} {'up' if rail.is_up else 'down'}" for rail in found}))
    of = f" of {', '.join(settings.ports)}" if settings.ports else ""
    at = "" if settings.gid_index is None else f" at entry {settings.gid_index} of its table"
    raise Unavailable(f"no port{of} is up with a RoCE v2 or InfiniBand address{at}: {seen}")
