"""Which layers of each KV-cache group every stage of a pipeline has.

vLLM shows its scheduler the first stage's layers alone, and each worker its own, which may be none of a group. Where a
stage's layers lie in a page only somebody can say who knows all. EngineCore makes the configurations of all workers in
one call (`get_kv_cache_configs`), and copies or sends them from there. So that function is wrapped: each configuration
carries the layers of all stages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from mooncake_connector.contain import contained, nothing
from vllm_plugin.unsupported import Unsupported
from vllm_plugin.wrapping import wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

Stages: TypeAlias = tuple[tuple[tuple[str, ...], ...], ...]
"""Stage, group -> vLLM's names of the layers."""

_FIELD = "_mooncake_connector_stages"


@contained(nothing)
def watch() -> None:
    """Have vLLM's configurations tell; safe to call again. Where they do not, `stages_of` knows nothing."""
    from vllm.v1.core import kv_cache_utils

    # EngineCore has the function under a name of its own, once it is imported. Nobody else calls it.
    for module in (kv_cache_utils, sys.modules.get("vllm.v1.engine.core")):
        wrap(module, "get_kv_cache_configs", _telling)


def _telling(call: Callable[..., Any], vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
    configs = call(vllm_config, *args, **kwargs)
    tell(vllm_config, configs)
    return configs


@contained(nothing)
def tell(vllm_config: VllmConfig, configs: Sequence[KVCacheConfig]) -> None:
    """Write the layers of all stages into the configuration of each worker; `configs` are in the order of the ranks."""
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    a_stage, rest = divmod(len(configs), num_stages)
    if num_stages == 1 or rest:
        return
    stages = tuple(tuple(tuple(group.layer_names) for group in one.kv_cache_groups) for one in configs[::a_stage])
    for config in configs:
        setattr(config, _FIELD, stages)


def stages_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Stages | None:
    """The layers of all stages; None where they are not known."""
    own = tuple(tuple(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size == 1:
        return (own,)
    stages: Stages | None = getattr(kv_cache_config, _FIELD, None)
    stage = parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size
    if stages is None or len(stages) != parallel.pipeline_parallel_size or stages[stage] != own:
        return None
    return stages


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a group.

    Args:
        own: vLLM's names of this rank's, in layer order.
        numbers: the model's numbers of all, in order.
        count: of all.
        stages: how many each stage has; empty where there is one.
    """

    own: tuple[str, ...]
    numbers: tuple[int, ...]
    count: int
    stages: tuple[int, ...]


def layers_of(own: Sequence[str], stages: Sequence[Sequence[str]]) -> Layers:
    """Of a group of which this rank has `own`, and each of the stages so many.

    Raises:
        Unsupported: the layers of a stage do not follow those of the stage before it.
    """
    in_order = [sorted(names, key=layer_order) for names in stages]
    every = [name for names in in_order for name in names]
    if sorted(every, key=layer_order) != every:
        raise Unsupported(f"layers of a later pipeline stage come before those of an earlier one: {in_order}")
    numbers = tuple(layer_order(name)[0] for name in every if layer_order(name))
    counts = tuple(map(len, stages)) if len(stages) > 1 else ()
    return Layers(tuple(sorted(own, key=layer_order)), numbers, len(every), counts)


def layer_order(name: str) -> tuple[int, ...]:
    """Numbers of a layer's name: `model.layers.10.self_attn.attn` comes after `model.layers.9.self_attn.attn`."""
    return tuple(int(part) for part in name.split(".") if part.isdigit())
