"""What becomes of a client's request on its way to an instance, as docs/disaggregation.md has it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
import uuid
from typing import Any

Body = dict[str, Any]
_FIND_LIMIT_S = 5.0


def prompts_of(body: Body) -> list[Any] | None:
    """Where a request brings a list of prompts; None where it brings one, of text or of tokens."""
    prompt = body.get("prompt")
    return prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else None


def prefill_body(body: Body, more: Body) -> Body:
    """vLLM's prefill request: one token of one sample, not streamed, and to hand over what was computed."""
    dropped = ("stream_options", "min_tokens", "n", "best_of")
    found = {key: value for key, value in body.items() if key not in dropped}
    found |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in body:
        found["max_completion_tokens"] = 1
    return {**found, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **more}}


def paired_body(body: Body, host: str, port: int) -> Body:
    """SGLang's, for both: where they meet. Several prompts in one request need a room and a name each."""

    def meeting() -> Body:
        room, name = secrets.randbits(63), uuid.uuid4().hex
        return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room, "rid": name}

    prompts = prompts_of(body)
    if prompts is None:
        return {**body, **meeting()}
    meetings = [meeting() for _ in prompts]
    return {**body, **{key: [one[key] for one in meetings] for key in meetings[0]}}


async def address_of(host: str) -> str:
    """A literal address, which is all that instances connect to; a name that nobody knows in time stays."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    with contextlib.suppress(OSError, UnicodeError, asyncio.TimeoutError):
        finding = asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return str((await asyncio.wait_for(finding, _FIND_LIMIT_S))[0][4][0])
    return host
