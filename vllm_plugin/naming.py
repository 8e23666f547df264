"""How the key chain names a request's tokens: where it starts, and what stands for an image.

Two requests share a page if and only if their names agree up to its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mooncake_connector.kv.keys import adapter_root_digest, content_tokens, root_digest

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_plugin.adapters import AdapterKeys


def chain_root(request: Request, adapters: AdapterKeys) -> bytes | None:
    """Where a request's key chain starts: its salt and its LoRA adapter. None: its KV cannot be named by tokens."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None or request.resumable:
        return None
    if request.lora_request is None:
        return root_digest(None, request.cache_salt)
    adapter = adapters.key(request.lora_request)
    return None if adapter is None else adapter_root_digest(adapter, request.cache_salt)


def named_tokens(request: Request, start: int, stop: int) -> list[int] | npt.NDArray[np.uint64]:
    """Tokens `[start, stop)` as the key chain sees them: multimodal placeholders are replaced by their content."""
    tokens = request.all_token_ids[start:stop]
    overlaps = [
        (feature.mm_position.offset, feature.mm_position.length, feature.identifier)
        for feature in request.mm_features
        if feature.mm_position.offset < stop and feature.mm_position.offset + feature.mm_position.length > start
    ]
    if not overlaps:
        return tokens
    named = np.asarray(tokens, dtype=np.uint64)
    for offset, length, identifier in overlaps:
        first, last = max(offset, start), min(offset + length, stop)
        named[first - start : last - start] = content_tokens(identifier, last - first, start=first - offset)
    return named
