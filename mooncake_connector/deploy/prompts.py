"""A request's prompt as a router sees it without a tokenizer: its text, cut into chunks, and about how long it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from mooncake_connector.deploy.bodies import Body

CHUNK_NBYTES = 512
TOKEN_NBYTES = 4
"""Of a text, for one token, more or less; token ids have as many here, so these are counted exactly."""
_MOST_CHUNKS = 1 << 14
CHUNK_TOKENS = CHUNK_NBYTES // TOKEN_NBYTES


def text_of(body: Body) -> bytes:
    """What an engine makes a prompt of: equal beginnings for equal prefixes, in one request and the next.

    Tools come first, as in most chat templates. What is no text, an image say, counts as its digest.
    """
    prompt = body.get("prompt")
    try:
        if prompt is None:
            return b"".join(_pieces(body.get("tools"), body.get("messages")))
        if isinstance(prompt, str):
            return _encoded(prompt)
        if isinstance(prompt, list) and are_tokens(prompt):
            return np.asarray(prompt, dtype="<u4").tobytes()
        return _encoded(json.dumps(prompt))
    except RecursionError:  # lists in lists, which no engine takes for a prompt
        return b""


def are_tokens(values: list[Any]) -> bool:
    return all(type(one) is int and 0 <= one < 1 << 32 for one in values)


def tokens_in(text: bytes) -> int:
    return -(-len(text) // TOKEN_NBYTES)


def chunks_of(text: bytes) -> list[int]:
    """A hash for each full chunk, of everything up to its end."""
    state, found = xxhash.xxh3_64(), []
    for end in range(CHUNK_NBYTES, min(len(text), _MOST_CHUNKS * CHUNK_NBYTES) + 1, CHUNK_NBYTES):
        state.update(text[end - CHUNK_NBYTES : end])
        found.append(state.intdigest())
    return found


def _pieces(tools: Any, messages: Any) -> Iterator[bytes]:
    if tools:
        yield _encoded(json.dumps(tools))
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        rest = {key: value for key, value in message.items() if key != "content"}
        yield _encoded(json.dumps(rest))
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            yield _encoded(text) if isinstance(text, str) else xxhash.xxh3_128_digest(_encoded(json.dumps(part)))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON may hold halves of a pair
