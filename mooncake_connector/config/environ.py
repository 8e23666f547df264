"""Tells our environment variables from those that Kubernetes makes of a Service's name.

A Service called `mooncake-connector`, or `mooncake-connector-decode`, puts `MOONCAKE_CONNECTOR_PORT=tcp://10.0.0.1:80`
and the like into every container of its namespace. Both the name and the value must fit: a slip of a person's stays an
error.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


_PORT = r"PORT_[0-9]+_(?:TCP|UDP|SCTP)"
_FORMS: tuple[tuple[str, Callable[[str], object]], ...] = (
    ("SERVICE_HOST", _is_address),
    (r"SERVICE_PORT(?:_\w+)?", re.compile(r"[0-9]{1,5}").fullmatch),
    (rf"PORT|{_PORT}", re.compile(r"(?:tcp|udp|sctp)://\S+:[0-9]{1,5}").fullmatch),
    (f"{_PORT}_PROTO", re.compile("tcp|udp|sctp").fullmatch),
    (f"{_PORT}_PORT", re.compile("[0-9]{1,5}").fullmatch),
    (f"{_PORT}_ADDR", _is_address),
)
_SERVICE_VARIABLES = [(re.compile(rf"\w+?_(?:{name})"), fits) for name, fits in _FORMS]


def is_service_variable(variable: str, environ: Mapping[str, str], ours: bool) -> bool:
    """Whether Kubernetes made `variable`; one with the name of a field (`ours`) needs its Service's address as well."""
    if len(variable) > 512 or (ours and f"{variable.removesuffix('_PORT')}_SERVICE_HOST" not in environ):
        return False
    return any(name.fullmatch(variable) and fits(environ[variable]) for name, fits in _SERVICE_VARIABLES)
