"""Whether an endpoint is on this host."""

from __future__ import annotations

import ipaddress
import re
import socket

_TCP = re.compile(r"tcp://(?P<host>\[[^\]]*\]|[^:]*):\d+")


def is_here(endpoint: str) -> bool:
    """Of a name only "localhost" and this host's own are known to be; no name server is asked."""
    match = _TCP.fullmatch(endpoint)
    if match is None:
        return True  # none at all, or a Unix socket
    host = match["host"].strip("[]")
    if host in ("localhost", "*", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as own:  # only an own address can be bound to
            own.bind((host, 0))
    except OSError:
        return False
    return True
