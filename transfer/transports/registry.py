"""Which transports there are, which of them serve what memory, and which one reaches a peer.

A transport is a class that was registered; the configuration names it by its `name`, and its `Capabilities` say where
it serves. A peer is reached by the first of the configured ones that both sides have and that works, tried out; one
that does not is a log line with the reason, once, and the next one is tried.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from mooncake_connector.config.values import TRANSPORTS
from mooncake_connector.errors import ConfigError
from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.transports.base import Peer, TransferError, Transport, TransportOptions, Unavailable
from transfer.transports.cma import CmaTransport
from transfer.transports.cuda.ipc import CudaIpcTransport
from transfer.transports.libraries.mooncake import MooncakeTransport
from transfer.transports.libraries.nixl import NixlTransport
from transfer.transports.memory import Memory
from transfer.transports.rdma.rails import rails
from transfer.transports.rdma.transport import RdmaTransport
from transfer.transports.shm import ShmTransport
from transfer.transports.tcp import TcpTransport

logger = get_logger(__name__)

_FIRST = NixlTransport.name
"""Made before the others: NIXL's wheel has a copy of libnl, and where that is loaded after the system's, which
libibverbs brings, the process crashes as it exits (NIXL 1.5.1, in the system's libnl-route)."""

AUTO = "auto"
"""In a list of names: see `named`."""

_registered: dict[str, type[Transport]] = {}


def register(transport: type[Transport]) -> None:
    """Make a transport usable by its name. Raises ValueError where another one has it."""
    known = _registered.setdefault(transport.name, transport)
    if known is not transport:
        raise ValueError(f"transport {transport.name} is {known.__qualname__} already")


for _transport in (CudaIpcTransport, CmaTransport, ShmTransport, TcpTransport):
    register(_transport)
for _far in (RdmaTransport, NixlTransport, MooncakeTransport):  # which need what not everybody has
    register(_far)


def names() -> tuple[str, ...]:
    """All there are; those that are tried by default come first, in that order."""
    return tuple(_registered)


def transport_class(name: str) -> type[Transport]:
    """Raises TransferError for an unknown name."""
    if name not in _registered:
        raise TransferError(f"transport {name!r} is unknown: there are {', '.join(_registered)}")
    return _registered[name]


def named(of: Sequence[str], *, encrypted: bool = False) -> list[str]:
    """These names, and in the place of `auto` what serves best here and is not named besides.

    It is the default ones, and before `tcp` that of RDMA cards, where a port of one is up and nothing has to be
    `encrypted`. Libraries have to be named: they open ports of their own, which know no secret.
    """
    if AUTO not in of:
        return list(of)
    far = [RdmaTransport.name] if any(rail.is_up for rail in rails()) else []
    if far and encrypted and RdmaTransport.name not in of:
        said = "transport rdma is left out: it does not encrypt, and tls_certificate is set; transports may name it"
        log_once("transfer.rdma.tls", said, level=logging.INFO, logger=logger)
        far = []
    *near, tcp = TRANSPORTS
    place = list(of).index(AUTO)
    return [*of[:place], *(name for name in (*near, *far, tcp) if name not in of), *of[place + 1 :]]


def serving(
    of: Sequence[str] | None = None, *, device: bool = False, hosts: Sequence[str] = (), encrypted: bool = False
) -> list[str]:
    """Those of these names, or of all, that serve memory of a device, or of the host. Raises TransferError.

    Args:
        hosts: what those that reach other hosts listen on; without any they do not serve.
        encrypted: whether what goes to other hosts has to be, unless its transport is named.
    """
    found = []
    for name in _registered if of is None else named(of, encrypted=encrypted):
        capabilities = transport_class(name).capabilities
        fits = capabilities.device_memory if device else capabilities.host_memory
        if fits and (hosts or not capabilities.other_host):
            found.append(name)
    return found


def check_configured(transports: Sequence[str], hosts: Sequence[str]) -> None:
    """Raise ConfigError for `transports` that are unknown, or of which none can serve with these `transfer_hosts`."""
    for name in transports:
        if name not in _registered and name != AUTO:
            known = ", ".join(_registered)
            raise ConfigError(f"transports has {name!r}, which is unknown: expected some of {known}, or {AUTO}")
    if not serving(transports, hosts=hosts) and not serving(transports, hosts=hosts, device=True):
        here = [name for name in _registered if not transport_class(name).capabilities.other_host]
        raise ConfigError(
            f"transports is {', '.join(transports)} and transfer_hosts is empty: set it to the addresses of this "
            f"machine that peers reach, or add one for this host: {', '.join(here)}"
        )


def make_transports(of: Sequence[str], memory: Memory, options: TransportOptions) -> Transports:
    """The transports of these names that serve this memory, preferred in this order.

    One that cannot use what is registered, or whose library is missing, is left out, with a line in the log. Raises
    TransferError for an unknown name, and where one cannot work with these options.
    """
    encrypted = options.tls is not None
    wanted = serving(of, device=options.place is not None, hosts=options.hosts, encrypted=encrypted)
    made: list[Transport] = []
    left_out: list[str] = []
    try:
        for name in sorted(wanted, key=lambda name: name != _FIRST):
            kind = transport_class(name)
            try:
                made.append(kind.make(memory, options))
            except Unavailable as error:
                if not kind.capabilities.needs_library:
                    raise
                log_once(f"transfer.library:{name}", "transport %s is left out: %s", name, error, logger=logger)
                left_out.append(f"{name}: {error}")
                continue
            if not made[-1].capabilities.needs_registration:
                continue
            try:
                memory.follow(made[-1])
            except TransferError as error:
                log_once(f"transfer.register:{name}", "transport %s is left out: %s", name, error, logger=logger)
                left_out.append(f"{name}: {error}")
                made.pop().close()
    except BaseException:
        for transport in made:
            transport.close()
        raise
    made.sort(key=lambda transport: wanted.index(transport.name))
    return Transports(made, left_out)


class Transports:
    """The transports of one process, in the order in which they are preferred. Safe to use from any thread."""

    def __init__(self, transports: Sequence[Transport], left_out: Sequence[str] = ()) -> None:
        """`left_out` says of others why they are not among them."""
        self._transports = {transport.name: transport for transport in transports}
        self._left_out = left_out
        self._uncounted = list(left_out)

    def listen(self) -> dict[str, bytes]:
        """Endpoints by name of transport, to be told to peers; one that cannot listen is left out and logged."""
        endpoints = {}
        for name, transport in self._transports.items():
            try:
                endpoints[name] = transport.listen()
            except (OSError, TransferError) as error:
                log_once(f"transfer.listen:{name}", "transport %s cannot listen: %s", name, error, logger=logger)
                self._uncounted.append(f"{name}: cannot listen: {error}")
        return endpoints

    def connect(self, endpoints: Mapping[str, bytes], *, deadline_s: float) -> Peer:
        """A connection to the peer that listens at `endpoints`. Raises Unavailable with what stood in each one's way.

        An attempt takes at most half of the time that is left, so that a peer that hangs on one way has another.
        """
        deadline_at = time.monotonic() + deadline_s
        reasons: list[str] = []
        for name, transport in self._transports.items():
            try:
                if name not in endpoints:
                    raise Unavailable("the peer does not offer it")
                left = deadline_at - time.monotonic()
                is_last = name == next(reversed(self._transports))
                peer = transport.connect(endpoints[name], deadline_s=max(0.001, left if is_last else left / 2))
            except Unavailable as error:
                reasons.append(f"{name}: {error}")
                continue
            for reason in reasons:
                log_once(f"transfer.fallback:{kind_of(reason)}", "%s; using %s", reason, name, logger=logger)
            return peer
        reaches_others = any(transport.capabilities.other_host for transport in self._transports.values())
        remedy = "" if reaches_others else "; set transfer_hosts and secret_file on both sides to allow tcp"
        raise Unavailable("no transport reaches the peer: " + "; ".join([*self._left_out, *reasons]) + remedy)

    def take_counts(self) -> dict[str, Mapping[str, int]]:
        """See `Transport.take_counts`; and once, which are not offered and why."""
        counts = {name: of for transport in self._transports.values() for name, of in transport.take_counts().items()}
        if self._uncounted:
            counts["transports_left_out"] = dict.fromkeys(self._uncounted, 1)
            self._uncounted = []
        return counts

    def close(self) -> None:
        """Close all of them. May be called twice."""
        for transport in self._transports.values():
            transport.close()

    def __enter__(self) -> Transports:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
