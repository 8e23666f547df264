"""Connections of which nobody knows yet who is at the other end: few in all, and fewer from one address.

Where the places are taken, the oldest from the address that has the most goes, so that a newcomer always gets in and
an address that takes many places loses its own.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Generic, TypeVar

MAX_PENDING = 64
MAX_FROM_ONE = 32
"""Of one address, or one process of this host."""
_NETWORK_BITS = 64
"""An IPv6 host has as many addresses as it likes below this."""
TOO_MANY = "too many connections have not finished their handshake"

_T = TypeVar("_T")


class PendingHandshakes(Generic[_T]):
    """See the module. Used by one thread."""

    def __init__(self) -> None:
        self._origins: dict[_T, str] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._origins)

    def all(self) -> list[_T]:
        """The oldest first."""
        return list(self._origins)

    def enter(self, newcomer: _T, origin: str) -> _T | None:
        """Count one more; the one that has to go for it, which is not counted any more."""
        self._origins[newcomer] = origin
        self._counts[origin] += 1
        busiest = origin
        if self._counts[origin] <= MAX_FROM_ONE:
            if len(self._origins) <= MAX_PENDING:
                return None
            busiest = max(self._counts, key=self._counts.__getitem__)
        oldest = next(other for other, where in self._origins.items() if where == busiest)
        self.leave(oldest)
        return oldest

    def leave(self, newcomer: _T) -> None:
        """It is known now, or gone; nothing where it does not count."""
        origin = self._origins.pop(newcomer, None)
        if origin is not None:
            self._counts[origin] -= 1
            if not self._counts[origin]:
                del self._counts[origin]


def origin_of(host: str) -> str:
    """What counts as one address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(address), _NETWORK_BITS), strict=False))
    return host
