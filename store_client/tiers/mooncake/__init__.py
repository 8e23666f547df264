"""The tier over a real Mooncake Store cluster, through the client library of Mooncake's own wheel.

The library runs in the agent's process and may crash, which takes the agent along and nothing else. What each file
cures: `link` a master that is down, comes back or does not answer; `memory` what is not registered; `status` codes.
"""

from store_client.tiers.mooncake.tier import MooncakeCluster

__all__ = ["MooncakeCluster"]
