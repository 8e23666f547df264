"""What `doctor rdma` says: whether the transport `rdma` would work here, over which card, and what is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from mooncake_connector.checks import Check, failed, ok, warning
from transfer.transports.base import Unavailable
from transfer.transports.cuda.driver import system_driver
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.rdma.gpudirect import DeviceRegions
from transfer.transports.rdma.opened import OpenRails, open_cards
from transfer.transports.rdma.rails import SYSFS, rails, unused
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.verbs import NO_LIMIT, in_use, library, locked_limit, open_device


def rdma_checks(hosts: Sequence[str], settings: RdmaSettings) -> Iterator[Check]:
    """Of the library, the cards, the ports that would be used, and memory.

    Args:
        hosts: `transfer_hosts`.
    """
    try:
        library()
        yield ok("library", in_use())
    except Unavailable as error:
        yield failed("library", str(error))
    yield from _cards()
    yield _locked_memory()
    if not hosts:
        yield warning("addresses", "transfer_hosts is empty: name this machine's addresses there, and set secret_file")
    yield _chosen(hosts, settings)
    yield from _devices(hosts, settings)


def _cards() -> Iterator[Check]:
    found = rails()
    if not found:
        yield failed("cards", f"none: {SYSFS} is empty or missing; is the card's driver loaded (rdma link)?")
    for device in sorted({rail.device for rail in found}):
        ports = sorted({(rail.port, rail.is_up) for rail in found if rail.device == device})
        told = ", ".join(f"port {port} {'up' if is_up else 'down'}" for port, is_up in ports)
        addresses = ", ".join(f"{rail.address} ({rail.kind})" for rail in found if rail.device == device)
        try:
            open_device(device).close()
        except Unavailable as error:
            yield warning(device, f"{told}; {error}")
        else:
            yield ok(device, f"{told}; {addresses}")


def _locked_memory() -> Check:
    limit = locked_limit()
    if limit == NO_LIMIT:
        return ok("locked memory", limit)
    return warning(
        "locked memory",
        f"{limit}, and all KV that travels must be locked: ulimit -l unlimited "
        "(LimitMEMLOCK=infinity, docker run --ulimit memlock=-1)",
    )


def _chosen(hosts: Sequence[str], settings: RdmaSettings) -> Check:
    try:
        cards = open_cards(hosts, settings)
    except Unavailable as error:
        return failed("rdma", f"is not offered: {error}")
    said = "; ".join(card.described for card in cards)
    missing = unused(settings.ports, [card.rail for card in cards])
    for card in cards:
        card.close()
    if missing:
        return warning("rdma", f"{said}; without {', '.join(missing)}, which rdma_ports names: see above what is there")
    return ok("rdma", said)


def _devices(hosts: Sequence[str], settings: RdmaSettings) -> Iterator[Check]:
    """Whether the cards read and fill each GPU's memory by themselves; nothing where there is neither."""
    with contextlib.suppress(Unavailable):
        driver = system_driver()
        for number in range(driver.num_devices):
            place = OnDevice(driver, number)
            with contextlib.closing(OpenRails(hosts, settings, place)) as opened:
                yield _device(f"GPU {number}", opened, place, settings)


def _device(name: str, opened: OpenRails, place: OnDevice, settings: RdmaSettings) -> Check:
    staged = "its KV goes through page-locked stages"
    if settings.no_gpudirect:
        return ok(name, f"{staged}: {settings.no_gpudirect}")
    try:
        how = DeviceRegions(opened, place).described
    except Unavailable as error:
        return warning(name, f"{staged}: {error}")
    cards = ", ".join(rail.card.rail.device for rail in opened.all)
    return ok(name, f"cards read and fill its memory by themselves ({how}); tried with {cards}")
