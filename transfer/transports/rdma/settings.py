"""What can be set of RDMA, for all cards and peers of a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_connector.config.schema import Config

MAX_RETRIES = 7


@dataclass(frozen=True, slots=True)
class RdmaSettings:
    """Args:
    ports: names of the ports to use ("mlx5_0", or "mlx5_0:2" for its second one); without any, topology decides.
    gid_index: entry of each port's GID table; None for the one that serves best.
    traffic_class: of what is sent, 8 bits; DSCP is the upper six. The same at both sides.
    service_level: of what is sent, 4 bits.
    pkey_index: entry of each port's table of partitions.
    retries: how often a card says again what is not acknowledged.
    lost_after_s: what a card does not acknowledge for about this long, at least half of it, counts as lost.
    no_gpudirect: why memory of a device goes through stages; empty where cards may have what they can.
    no_windows: why peers read by the keys of whole regions; empty where they have windows if cards do.
    """

    ports: Sequence[str] = ()
    gid_index: int | None = None
    traffic_class: int = 0
    service_level: int = 0
    pkey_index: int = 0
    retries: int = MAX_RETRIES
    lost_after_s: float = 5.0
    no_gpudirect: str = ""
    no_windows: str = ""

    @classmethod
    def configured(cls, config: Config) -> RdmaSettings:
        """As the configuration of an instance says."""
        return cls(
            config.rdma_ports, config.rdma_gid_index, config.rdma_traffic_class, config.rdma_service_level,
            config.rdma_pkey_index, config.rdma_retries, config.rdma_lost_after_s,
            "rdma_gpudirect is off" if config.rdma_gpudirect == "off" else "",
            "rdma_windows is off" if config.rdma_windows == "off" else "",
        )  # fmt: skip
