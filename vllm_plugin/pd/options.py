"""From configuration and vLLM's settings to what a transfer node needs."""

from __future__ import annotations

import hashlib

import torch

from mooncake_connector.config.schema import Config
from mooncake_connector.kv.namespace import canonical_json
from transfer.plan.granularity import Bounds, Granularity
from transfer.protocol.orders import Timing
from transfer.session import NodeOptions
from vllm_plugin.geometry import Geometry

_FORMAT = 2
"""Raised whenever the same bytes would mean something else."""


def compatibility(geometry: Geometry) -> bytes:
    """Digest of what must be equal for KV to mean the same. The weights are part of each transfer's name."""
    fields = ("num_layers", "num_kv_heads", "k_dim", "v_dim", "itemsize", "kv_dtype", "is_mla")
    described = {name: getattr(geometry, name) for name in fields}
    return hashlib.sha256(canonical_json({"engine": "vllm", "format": _FORMAT, **described}).encode()).digest()


def make_bounds(config: Config) -> Bounds:
    fixed = None if config.granularity == "auto" else Granularity(config.granularity)
    return Bounds(config.granularity_chunk_tokens, config.granularity_layer_tokens, fixed)


def make_options(config: Config) -> NodeOptions:
    lease_s, deadline_s = config.transfer_lease_s, config.transfer_deadline_s
    return NodeOptions(
        transports=config.transports,
        hosts=config.transfer_hosts,
        page_tokens=int(config.page_tokens),
        bounds=make_bounds(config),
        timing=Timing(
            lease_s=lease_s,
            heartbeat_s=min(Timing().heartbeat_s, lease_s / 6),
            deadline_s=deadline_s,
            hold_s=max(Timing().hold_s, lease_s, deadline_s),
        ),
    )


def memory_of(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """`(address, nbytes)` of the storages that tensors lie in, each once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sorted(storages.items())
