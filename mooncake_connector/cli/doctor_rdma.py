"""What `doctor rdma` says: whether the transport `rdma` would work here, over which card, and what is missing."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from mooncake_connector.checks import Check, failed, ok, warning
from mooncake_connector.sizes import human_nbytes
from transfer.transports.base import Unavailable
from transfer.transports.cuda.driver import system_driver
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.rdma.card import Card, open_cards
from transfer.transports.rdma.gpudirect import DeviceRegions
from transfer.transports.rdma.opened import OpenRails
from transfer.transports.rdma.rails import SYSFS, rails, unused
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.verbs import binding, open_device

_MTU_NBYTES = (0, 256, 512, 1024, 2048, 4096)
"""By the verbs' code."""


def rdma_checks(hosts: Sequence[str], settings: RdmaSettings) -> Iterator[Check]:
    """Of the library, the cards, the ports that would be used, and memory.

    Args:
        hosts: `transfer_hosts`.
    """
    try:
        binding()
        yield ok("library", f"libibverbs, by the package ibverbs {version('ibverbs')}")
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
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "no limit")
    return warning(
        "locked memory",
        f"at most {human_nbytes(soft)}, and all KV that travels must be locked: ulimit -l unlimited "
        "(LimitMEMLOCK=infinity, docker run --ulimit memlock=-1)",
    )


def _chosen(hosts: Sequence[str], settings: RdmaSettings) -> Check:
    try:
        cards = open_cards(hosts, settings)
    except Unavailable as error:
        return failed("rdma", f"is not offered: {error}")
    said = "; ".join(map(_described, cards))
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
        way = DeviceRegions(opened, place).way
    except Unavailable as error:
        return warning(name, f"{staged}: {error}")
    cards = ", ".join(rail.card.rail.device for rail in opened.all)
    return ok(name, f"cards read and fill its memory by themselves ({way}); tried with {cards}")


def _described(card: Card) -> str:
    rail = card.rail
    speed = f"{rail.gbit_per_s:g} Gbit/s, " if rail.gbit_per_s else ""
    node = f"NUMA node {rail.node}, " if rail.node >= 0 else ""
    return (
        f"{rail}, {speed}{node}MTU {_MTU_NBYTES[card.mtu]}, requests of {human_nbytes(card.max_request_nbytes)} with "
        f"{card.max_ranges} ranges, {card.max_requests} at a time, {card.max_reads} of them on the wire"
    )
