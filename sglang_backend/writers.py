"""Which ranks store KV that all ranks of a model hold alike (MLA): one on each host, since a pool is one host's.

SGLang has rank 0 alone store it, which suits a store that all hosts share.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_server_args


class _Writer(HiCacheStorageConfig):
    is_storage_writer = True


def let_each_host_write(controller: Any) -> None:
    """After storage was attached to a rank's controller: have it store if it is the first of its host."""
    config = controller.storage_config
    if not config.is_storage_writer and is_first_of_its_host(config, get_server_args()):
        controller.storage_config = _Writer(**vars(config))


def is_first_of_its_host(config: HiCacheStorageConfig, args: Any) -> bool:
    """Whether none of the ranks before it on its host holds the same KV. Ranks are numbered host by host; where a group
    of them begins within one host and ends on another, that has none."""
    on_a_host = args.tp_size * args.pp_size // args.nnodes
    if config.tp_size <= on_a_host or config.tp_size % on_a_host or config.attn_cp_size > 1:
        return config.is_storage_writer
    return config.tp_rank % on_a_host < config.dcp_size
