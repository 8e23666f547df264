"""What a fault of a file system means to a tier."""

from __future__ import annotations

import errno

from store_client.tiers.base import TierError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ENXIO, errno.EHOSTDOWN}


def cause_of(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    for cause, numbers in (("full", _FULL), ("denied", _DENIED), ("unavailable", _GONE)):
        if error.errno in numbers:
            return cause
    return "error"


def as_tier_error(tier: str, doing: str, error: OSError) -> TierError:
    """`tier` says which one it is, for people; `doing` what could not be done."""
    return TierError(f"{tier}: {doing} failed: {error.strerror or error}", cause_of(error))
