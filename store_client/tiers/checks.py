"""What a tier holds its caller's arguments against: mistakes are ValueErrors, before anything is moved."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_connector.kv.keys import KEY_NBYTES
from store_client.tiers.base import SEAL_NBYTES, Sealed, Target


def check_keys(keys: Sequence[bytes]) -> None:
    for key in keys:
        if len(key) != KEY_NBYTES:
            raise ValueError(f"page key {key.hex()!r} has {len(key)} bytes: expected {KEY_NBYTES}")


def check_targets(targets: Sequence[Target], nbytes: int) -> None:
    check_keys([target.key for target in targets])
    _check_sizes(targets, nbytes)


def check_sealed(pages: Sequence[Sealed], nbytes: int) -> None:
    check_keys([page.key for page in pages])
    _check_sizes(pages, nbytes)
    for page in pages:
        if len(page.seal) != SEAL_NBYTES:
            raise ValueError(f"the seal of page {page.key.hex()} has {len(page.seal)} bytes: expected {SEAL_NBYTES}")


def _check_sizes(pages: Sequence[Target | Sealed], nbytes: int) -> None:
    for page in pages:
        if (held := sum(map(len, page.pieces))) != nbytes:
            raise ValueError(f"the pieces of page {page.key.hex()} hold {held} bytes: expected {nbytes}")
