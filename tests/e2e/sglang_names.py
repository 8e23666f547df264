"""Run by SGLang's interpreter: the namespaces and page keys that SGLang and the backend make, as JSON on stdout.

Reads `{"instances": {name: arguments of ServerArgs}, "requests": {name: request}}`. A request has `tokens`, and may
have `extra_key`, `cache_salt`, `lora` ([name, path] of `--lora-paths`), `image` ([content digest, first token, length])
and `pairs` (EAGLE's keys).
"""

from __future__ import annotations

import json
import sys
from array import array
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.arg_groups.lora_hook import check_lora_server_args
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, Req
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from mooncake_connector.config.sources import load_config
from sglang_backend.host_pages import plain_format
from sglang_backend.identity import identify

PAGE_TOKENS = 64
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "fp8_e5m2": torch.float8_e5m2}


def namespace(arguments: dict[str, Any]) -> str:
    """Digest of the namespace of an instance of the Qwen3 checkpoints with these arguments."""
    defaults = {"device": "cpu", "attention_backend": "torch_native", "dtype": "bfloat16", "page_size": PAGE_TOKENS}
    args = ServerArgs(**{**defaults, **arguments})
    check_lora_server_args(args)  # turns the texts of --lora-paths into adapters
    runtime_context.publish(args, role="scheduler")
    try:
        pool = host_pool(args)
        identity = identify(load_config({}, {}), STORAGE, pool, plain_format(pool))
        return identity.namespace().digest.hex()
    finally:
        runtime_context.reset_context()


def host_pool(args: ServerArgs) -> MHATokenToKVPoolHost:
    """The host pool that SGLang makes of its device pool, for the shape of the Qwen3 checkpoints."""
    dtype = DTYPES[args.dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype]
    device = MHATokenToKVPool(args.page_size, args.page_size, dtype, 4, 64, 8, "cpu", False, start_layer=0, end_layer=8)
    with host_memory_budget_scope(1 << 30):
        return MHATokenToKVPoolHost(
            device.get_device_pool_infos()[0].buffer_info,
            host_to_device_ratio=0,
            host_size=0,
            page_size=args.page_size,
            layout="page_first",
            pin_memory=False,
            device_capacity_tokens=0,
            start_layer=0,
            end_layer=8,
            host_token_capacity=args.page_size,
        )


def page_keys(request: dict[str, Any]) -> list[str]:
    """What SGLang asks the storage for."""
    tokens = list(request["tokens"])
    if "image" in request:
        content, first, length = request["image"]
        item = MultimodalDataItem(modality=Modality.IMAGE)
        item.set_identity(bytes.fromhex(content))
        tokens[first : first + length] = item.padding_sequence(length)
    lora = request.get("lora")
    made = Req(
        "r",
        "",
        array("q", tokens),
        SamplingParams(),
        extra_key=request.get("extra_key"),
        cache_salt=request.get("cache_salt"),
        lora_id=LoRARef.deterministic_id(*lora) if lora else None,
    )
    whole = RadixKey(
        array("q", tokens), made.extra_key, is_bigram=request.get("pairs", False), cache_salt=made.cache_salt
    )
    pages = len(whole) // PAGE_TOKENS
    keys: list[str] = get_storage_hash_str(whole[: pages * PAGE_TOKENS], page_size=PAGE_TOKENS)
    return keys


STORAGE = HiCacheStorageConfig(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    attn_cp_rank=0,
    attn_cp_size=1,
    is_mla_model=False,
    enable_storage_metrics=False,
    is_page_first_layout=True,
    model_name="served",
)

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    answer = {
        "namespaces": {name: namespace(arguments) for name, arguments in asked["instances"].items()},
        "keys": {name: page_keys(request) for name, request in asked["requests"].items()},
    }
    sys.stdout.write(json.dumps(answer))
