"""What becomes of a client's request on its way to an instance, as docs/disaggregation.md has it."""

from __future__ import annotations

import secrets
from typing import Any

Body = dict[str, Any]


def prefill_body(body: Body, more: Body) -> Body:
    """vLLM's prefill request: one token, not streamed, and to hand over what was computed."""
    found = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")}
    found |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in body:
        found["max_completion_tokens"] = 1
    return {**found, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **more}}


def paired_body(body: Body, host: str, port: int, rid: str) -> Body:
    """SGLang's, for both: where they meet. Several prompts in one request need a room each."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    if not several:
        room = {"bootstrap_room": secrets.randbits(63), "rid": rid}
        return {**body, **room, "bootstrap_host": host, "bootstrap_port": port}
    count = len(prompt) if isinstance(prompt, list) else 0
    return {
        **body,
        "bootstrap_host": [host] * count,
        "bootstrap_port": [port] * count,
        "bootstrap_room": [secrets.randbits(63) for _ in range(count)],
    }
