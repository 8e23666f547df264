"""Values of configuration fields that plain types do not describe, and the forms in which they may be written.

Each is checked alone; what must hold between fields is `mooncake_connector.config.together`'s work.
"""

from __future__ import annotations

import ipaddress
import os
import re
import reprlib
from pathlib import Path
from typing import Any

from mooncake_connector.sizes import parse_nbytes

MIN_CAPACITY_NBYTES = 1 << 20
MAX_CAPACITY_NBYTES = 1 << 50
TRANSPORTS = ("cuda_ipc", "cma", "shm", "tcp")
"""Tried by default, in this order. Which others there are, `transfer.transports.registry` knows."""
MAX_TRANSPORTS = 16
_TRANSPORT_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
MAX_HOSTS = 16
MAX_PORTS = 8
_PORT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,63}(:[1-9][0-9]{0,2})?")


class Nbytes(int):
    """A size in bytes; from text it takes the units of `mooncake_connector.sizes`."""


class PageTokens(int):
    """A page size: a power of two from 16 to 1024."""


class Transports(tuple[str, ...]):
    """Names of transports, each once, in the order in which they are tried."""


class IpAddress(str):
    """A literal IP address at which something listens."""

    __slots__ = ()


class Hosts(tuple[str, ...]):
    """Literal IP addresses of this machine, each once."""


class RdmaPorts(tuple[str, ...]):
    """Names of ports of RDMA cards, each once: "mlx5_0", or "mlx5_0:2" for its second one."""


def decode(wanted: type, value: Any, strict: bool) -> Any:
    """msgspec's hook for the types that it does not know; raises ValueError for what is not allowed.

    Where not `strict`, text stands for numbers ("64") and for lists ("cma,tcp").
    """
    if wanted is Path:
        return _decode_path(value)
    if wanted is IpAddress:
        if not isinstance(value, str):
            raise ValueError("expected text")
        return IpAddress(ipaddress.ip_address(value))
    if wanted is Transports:
        names = _decode_names(value, strict, MAX_TRANSPORTS)
        if not names or not all(map(_TRANSPORT_NAME.fullmatch, names)):
            raise ValueError("none, or no name of a transport")
        return Transports(names)
    if wanted is Hosts:
        hosts = Hosts(_decode_names(value, strict, MAX_HOSTS))
        if not all(map(_can_be_told_to_peers, hosts)):
            raise ValueError("no address of a machine")
        return hosts
    if wanted is RdmaPorts:
        ports = RdmaPorts(_decode_names(value, strict, MAX_PORTS))
        if not all(map(_PORT_NAME.fullmatch, ports)):
            raise ValueError("no name of a port")
        return ports
    if not isinstance(value, int | str):
        raise ValueError("expected an integer or text")
    return _decode_nbytes(value) if wanted is Nbytes else _decode_page_tokens(value, strict)


class _Shown(reprlib.Repr):
    """`repr` that stays short and cheap, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = 100
        self.maxlevel = 3

    def repr_int(self, number: int, level: int) -> str:
        if number.bit_length() > 256:
            return f"a number of {number.bit_length()} bits"
        return repr(number)


shown = _Shown().repr
"""A value as an error message shows it."""


def _decode_nbytes(value: int | str) -> Nbytes:
    nbytes = parse_nbytes(value)
    if not MIN_CAPACITY_NBYTES <= nbytes <= MAX_CAPACITY_NBYTES:
        raise ValueError("out of range")
    return Nbytes(nbytes)


def _decode_page_tokens(value: int | str, strict: bool) -> PageTokens:
    if strict and not isinstance(value, int):
        raise ValueError("expected an integer")
    tokens = int(value)
    if not 16 <= tokens <= 1024 or tokens & (tokens - 1):
        raise ValueError("not a power of two in range")
    return PageTokens(tokens)


def _decode_names(value: Any, strict: bool, most: int) -> list[str]:
    """Up to `most` different names."""
    if isinstance(value, str) and not strict:
        value = [name.strip() for name in value.split(",")]
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("expected a list of text")
    if len(value) > most or len(set(value)) < len(value):
        raise ValueError("too many, or one twice")
    return value


def _can_be_told_to_peers(host: str) -> bool:
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return not ((mapped or address).is_unspecified or (mapped or address).is_multicast)


def _decode_path(value: Any) -> Path:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("expected text")
    os.fsencode(value)  # UnicodeEncodeError for what no file can be called
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:  # "~somebody" who does not exist
        raise ValueError(str(error)) from None
    if not path.is_absolute():
        raise ValueError("not absolute")
    return path
