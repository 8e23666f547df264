"""Cost of a connector that has nothing to do, in vLLM's scheduler step; run by the interpreter that has vLLM.

Argument: one JSON object: model (folder), transfer (``--kv-transfer-config``), num_requests, rounds, outcome (path of
the JSON file to write). Real schedulers, without and with the connector, decode the same requests in turn; the
forward pass is left out. No request fills a page or finds one, so nothing is loaded or saved. A step is `schedule` and
`update_from_output`, which includes what vLLM itself does for any connector; a third scheduler, with a connector that
does nothing, shows how much that is.
"""

import copy
import gc
import json
import random
import statistics
import sys
import time
from typing import Any

from outcome import write_outcome

_BLOCK_TOKENS = 16
_PROMPT_TOKENS = 8
_DECODE_STEPS = 40
"""Prompt and answer stay below the smallest page of 64 tokens."""
_EMPTY = {"kv_connector": "EmptyConnector", "kv_connector_module_path": "vllm_empty", "kv_role": "kv_both"}


def main(order: dict[str, Any]) -> None:
    """Writes ``without_s``, ``with_s`` and ``empty_s``: for each round the median seconds of a step."""
    config = base_config(order)
    engines = {
        "without_s": make_scheduler(config, None),
        "with_s": make_scheduler(config, order["transfer"]),
        "empty_s": make_scheduler(config, _EMPTY),
    }
    outcome: dict[str, list[float]] = {name: [] for name in engines}
    gc.collect()
    gc.freeze()  # what vLLM has loaded would be walked through in every collection
    gc.disable()
    for number in range(order["rounds"] + 1):
        turns = list(engines)
        random.Random(number).shuffle(turns)
        for name in turns:
            gc.collect()
            requests = make_requests(order["num_requests"], number, _PROMPT_TOKENS)
            seconds = decode(engines[name], requests)
            if number:
                outcome[name].append(seconds)
    for scheduler in engines.values():
        scheduler.shutdown()
    write_outcome(order["outcome"], {**outcome, "ready": True})


def base_config(order: dict[str, Any]) -> Any:
    """A configuration for the model, without a connector."""
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # as every process of vLLM does: it registers the connector
    count = order["num_requests"]
    return VllmConfig(
        model_config=ModelConfig(model=order["model"], dtype="bfloat16", skip_tokenizer_init=True, max_model_len=1024),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=8192, max_num_seqs=count, max_model_len=1024, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=_BLOCK_TOKENS, enable_prefix_caching=True),
    )


def make_scheduler(base: Any, transfer: dict[str, Any] | None) -> Any:
    """vLLM's own scheduler over a KV cache that nobody allocates."""
    import torch
    from vllm.config import KVTransferConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = copy.copy(base)
    config.cache_config = copy.copy(base.cache_config)
    config.cache_config.num_gpu_blocks = 8192
    config.kv_transfer_config = KVTransferConfig(**transfer) if transfer else None
    model = config.model_config
    spec = FullAttentionSpec(
        block_size=_BLOCK_TOKENS,
        num_kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        dtype=torch.bfloat16,
    )
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(model.get_num_layers(config.parallel_config))]
    cache = KVCacheConfig(num_blocks=8192, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)])
    return Scheduler(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=_BLOCK_TOKENS,
        log_stats=False,
    )


def answer(names: list[str]) -> Any:
    """What a forward pass would say of these requests: the same token to all of them."""
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[7] for _ in names],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def decode(scheduler: Any, requests: list[Any]) -> float:
    """Take requests from their arrival to their end; the median seconds of a step in which all of them decode."""
    for request in requests:
        scheduler.add_request(request)
    steps = []
    while scheduler.has_requests():
        start = time.perf_counter()
        scheduled = scheduler.schedule()
        planned = time.perf_counter()
        names = list(scheduled.num_scheduled_tokens)
        output = answer(names)
        computed = time.perf_counter()
        scheduler.update_from_output(scheduled, output)
        if scheduled.total_num_scheduled_tokens == len(requests):
            steps.append(planned - start + time.perf_counter() - computed)
    return statistics.median(steps)


def make_requests(count: int, number: int, prompt_tokens: int) -> list[Any]:
    """Different prompts in every round: no prefix is ever found."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(_BLOCK_TOKENS, sha256)
    params = SamplingParams(max_tokens=_DECODE_STEPS, ignore_eos=True)
    draw = random.Random(number)
    return [
        Request(
            request_id=f"{number}-{index}",
            prompt_token_ids=[draw.randrange(1000, 20000) for _ in range(prompt_tokens)],
            sampling_params=params,
            pooling_params=None,
            block_hasher=hasher,
        )
        for index in range(count)
    ]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
