"""What `doctor vllm` says of transfers: addresses, secret, certificates, and what reaches a neighbour.

The transports are tried with a process of this user on this host: permissions differ from machine to machine and from
container to container, and only trying tells.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec

from mooncake_connector.checks import Check, failed, ok, warning
from mooncake_connector.config import Config
from mooncake_connector.errors import ConfigError
from transfer.base import TransferError, Unavailable
from transfer.choose import HOST_NAMES, make_transports
from transfer.control import Access
from transfer.handshake import Identity
from transfer.memory import Memory

_PATIENCE_S = 20.0


def transfer_checks(config: Config) -> Iterator[Check]:
    """Raises nothing that a configuration may cause."""
    try:
        access = Access.configured(config)
        identity, tls = access.identity, access.tls
        if tls:
            tls.context(server=True)
        make_transports(config.transports, Memory(), identity, hosts=config.transfer_hosts, tls=tls).close()
        for host in config.transfer_hosts:
            _listen(host)
    except (ConfigError, TransferError, ValueError) as error:
        yield failed("transfers", str(error))
        return
    kept = "secret" if identity.secret else "no secret: this host only"
    yield ok("transfers", f"at {', '.join(config.transfer_hosts)} ({kept}{', TLS' if tls else ''})")
    for name in config.transports:
        if name in HOST_NAMES:  # the others need the engine's device
            yield _reaches_neighbour(name)


def _listen(host: str) -> None:
    """Raises ConfigError where the address is not this machine's."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ConfigError(f"transfer_hosts has {host}, where nobody can listen here: {error.strerror}") from None


def _reaches_neighbour(name: str) -> Check:
    command = [sys.executable, "-m", __name__, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as neighbour:
        try:
            assert neighbour.stdout is not None
            endpoints = msgspec.json.decode(neighbour.stdout.readline(), type=dict[str, bytes])
            with make_transports([name], Memory(), Identity()) as here:
                here.connect(endpoints, deadline_s=_PATIENCE_S).close()
        except (Unavailable, OSError, msgspec.DecodeError) as error:
            return warning(name, f"does not work here, others are used: {error}")
        finally:
            neighbour.kill()
    return ok(name, "reaches other processes of this user on this host")


def _be_neighbour(name: str) -> None:
    """Listen until the standard input ends."""
    with make_transports([name], Memory(), Identity()) as transports:
        sys.stdout.buffer.write(msgspec.json.encode(transports.listen()) + b"\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    _be_neighbour(sys.argv[1])
