"""Eviction policies: which pages go when the pool is full. Each is a file; `POLICIES` has them by name.

A pool names its policy by a number in the header of its page table, so that all its processes use the same one.
"""

from store_client.embedded.policies.base import Arrivals, Candidates, Policy
from store_client.embedded.policies.hints import Hints, hints_nbytes
from store_client.embedded.policies.lru import Lru
from store_client.embedded.policies.returns import Returns
from store_client.embedded.policies.s3_fifo import S3Fifo

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Lru, S3Fifo, Returns)}

DEFAULT_POLICY = "lru"
"""Of a new pool, where nothing else is asked for."""


def policy_number(name: str) -> int:
    """As the table's header has it; numbers stay, also of policies to come."""
    return list(POLICIES).index(name)


def policy_name(number: int) -> str:
    """Of the policy with this number; of the first one where this version knows none."""
    names = list(POLICIES)
    return names[number] if number < len(names) else names[0]


__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "Arrivals",
    "Candidates",
    "Hints",
    "Policy",
    "hints_nbytes",
    "policy_name",
    "policy_number",
]
