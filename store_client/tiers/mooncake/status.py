"""Mooncake's status codes: which of them are misses, which mean that the master or a node is in trouble, and words."""

from __future__ import annotations

NO_SPACE, LEASE_EXPIRED, TRANSFER_FAILED, RPC_FAILED, RPC_TIMEOUT = -200, -707, -800, -900, -901

_WORDS = {
    -1: "internal error",
    NO_SPACE: "no node has room",
    -300: "the master speaks another version",
    -600: "invalid parameters",
    -601: "the master does not take this client for the owner",
    -703: "not complete yet",
    -704: "not found",
    -706: "has a lease",
    LEASE_EXPIRED: "the lease expired while it was read",
    -714: "in use",
    TRANSFER_FAILED: "the transfer from or to its node failed",
    -801: "wrong checksum",
    RPC_FAILED: "the master was not reached, or did not understand",
    RPC_TIMEOUT: "the master did not answer in time",
    -1700: "the tenant's quota is used up",
    -1701: "the tenant has no quota",
}


def words(code: int) -> str:
    return f"{_WORDS.get(code, 'unknown status')} ({code})"


def is_masters(code: int) -> bool:
    """Whether a call failed as a whole, between the client and the master: RPC and leader election."""
    return -1100 < code <= -900


def is_nodes(code: int) -> bool:
    """Whether the bytes of a page did not come over, which is its node's trouble or the network's."""
    return code in (TRANSFER_FAILED, LEASE_EXPIRED)
