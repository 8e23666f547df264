"""One line at start-up: how many tokens the pool holds beside the engine's own cache."""

from __future__ import annotations

from mooncake_connector.log import get_logger
from mooncake_connector.sizes import human_nbytes
from vllm_plugin.geometry import Geometry

logger = get_logger(__name__)


def log_sizes(pool_nbytes: int, geometry: Geometry, page_tokens: int, num_blocks: int) -> None:
    """`num_blocks`: blocks of the engine's own cache, over all groups of layers."""
    own_tokens = num_blocks * geometry.main.block_tokens
    own_tokens //= len({group.index for group in geometry.groups})  # a block is one table's at a time
    full = [group for group in geometry.groups if group.kind == "full"]  # the others are stored here and there
    shards = [(group, shard) for group in full for shard in group.shards()]
    page_nbytes = sum(group.page_format(shard, page_tokens).nbytes for group, shard in shards)
    pool_tokens = pool_nbytes // page_nbytes * page_tokens
    sizes = f"the pool holds {pool_tokens:,} tokens of this model in {human_nbytes(pool_nbytes)}"
    hint = ""
    if pool_tokens < own_tokens:
        wanted = human_nbytes(2 * -(-own_tokens // page_tokens) * page_nbytes)
        hint = f": what that drops is often gone here too; `capacity` should be {wanted} where there is memory for it"
    logger.info("%s, vLLM's own KV cache %s%s", sizes, f"{own_tokens:,}", hint)
