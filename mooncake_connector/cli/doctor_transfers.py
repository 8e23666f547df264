"""What `doctor vllm` says of transfers: what listens where, secret, certificates, and what reaches a neighbour.

The transports are tried with a process of this user on this host: permissions differ from machine to machine and from
container to container, and only trying tells.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec

from mooncake_connector.checks import Check, failed, ok, warning
from mooncake_connector.config.schema import Config
from mooncake_connector.errors import ConfigError
from transfer.control.connection import Access
from transfer.control.handshake import Identity
from transfer.transports.base import TransferError, TransportOptions, Unavailable
from transfer.transports.memory import Memory
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.registry import check_configured, make_transports, serving
from transfer.transports.tls import Tls
from transfer.transports.unix import listen_at_port, port_name, reach

_PATIENCE_S = 20.0


def transfer_checks(config: Config) -> Iterator[Check]:
    """Raises nothing that a configuration may cause."""
    hosts = config.transfer_hosts
    try:
        access = Access.configured(config)
        if access.tls:
            access.tls.context(server=True)
        check_configured(config.transports, hosts)
        options = TransportOptions(access.identity, hosts, access.tls, rdma=RdmaSettings.configured(config))
        make_transports(config.transports, Memory(), options).close()
        for host in hosts:
            _listen(host)
        if not hosts:
            _reach_oneself()
    except (ConfigError, TransferError, ValueError, OSError) as error:
        yield failed("transfers", str(error))
        return
    yield ok("transfers", _what_listens(config, access))
    if config.transfer_port:
        yield _port(hosts[0] if hosts else "", config.transfer_port)
    # the others need the engine's device
    for name in serving(config.transports, hosts=hosts, encrypted=access.tls is not None):
        yield _reaches_neighbour(name, options)


def _what_listens(config: Config, access: Access) -> str:
    user = f"Unix sockets for processes of user {os.geteuid()} on this host"
    secret = ", with the secret" if access.identity.secret else ""
    if not config.transfer_hosts:
        return f"{user}{secret}; no TCP port (for other hosts or containers set transfer_hosts and secret_file)"
    port = config.transfer_port or "any"
    tls = ", TLS" if access.tls else ""
    listed = ", ".join(config.transfer_hosts)
    return f"TCP at {listed} (secret{tls}): port {port} to be asked at, free ones for control and data; {user} for data"


def _port(host: str, port: int) -> Check:
    try:
        if host:
            _listen(host, port)
        else:
            listen_at_port(port, 1)[0].close()
    except (OSError, ConfigError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return warning("transfer_port", f"{port} cannot be taken now, by an instance that runs perhaps: {reason}")
    return ok("transfer_port", f"{port} is free")


def _listen(host: str, port: int = 0) -> None:
    """Raises ConfigError where the address is not this machine's, or the port is taken."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ConfigError(f"transfer_hosts has {host}, where nobody can listen here: {error.strerror}") from None


def _reach_oneself() -> None:
    """Raises OSError where Unix sockets are forbidden, Unavailable where nobody can say whose a process is."""
    listener, port = listen_at_port(0, 1)
    with listener, socket.socket(socket.AF_UNIX) as connection:
        reach(connection, port_name(port), time.monotonic() + _PATIENCE_S)


class _Order(msgspec.Struct, frozen=True):
    """What the neighbour is told, by its standard input: a secret is in no command line."""

    transport: str
    hosts: tuple[str, ...]
    secret: bytes
    tls: Tls | None
    rdma: RdmaSettings


def _reaches_neighbour(name: str, options: TransportOptions) -> Check:
    order = _Order(name, tuple(options.hosts), options.identity.secret, options.tls, options.rdma)
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as neighbour:
        patience = threading.Timer(_PATIENCE_S, neighbour.kill)
        patience.start()
        try:
            assert neighbour.stdin is not None and neighbour.stdout is not None
            neighbour.stdin.write(msgspec.json.encode(order) + b"\n")
            if not (said := neighbour.stdout.readline()):
                return warning(name, "does not work here, others are used: the other process did not answer")
            endpoints = msgspec.json.decode(said, type=dict[str, bytes])
            with make_transports([name], Memory(), options) as here:
                here.connect(endpoints, deadline_s=_PATIENCE_S).close()
        except (Unavailable, OSError, msgspec.DecodeError) as error:
            return warning(name, f"does not work here, others are used: {error}")
        finally:
            patience.cancel()
            neighbour.kill()
    where = f" at {', '.join(options.hosts)}" if name == "tcp" else ""
    return ok(name, f"reaches other processes of this user on this host{where}")


def _be_neighbour() -> None:
    """Listen until the standard input ends."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Order)
    options = TransportOptions(Identity(order.secret), order.hosts, order.tls, rdma=order.rdma)
    with make_transports([order.transport], Memory(), options) as transports:
        sys.stdout.buffer.write(msgspec.json.encode(transports.listen()) + b"\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    _be_neighbour()
