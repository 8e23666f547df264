"""Hooks around SGLang's lookups and loads of a prompt: where `log_requests` is set, each has one line in the log.

SGLang tells a storage backend which pages it wants, but not of which request; the operation that says so comes by here.
It asks for full pages beyond what it has itself, so these are a prompt's tokens in the line. A prompt of which SGLang
asks for nothing, since it is short or all in its own cache, has no line. The scheduler of a decode instance asks what
is there of a prompt in no request's name, in each of its steps until it has room for it: that counts once, and has no
line; the load that follows has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mooncake_connector.contain import contained, nothing
from mooncake_connector.misses import Miss
from mooncake_connector.request_line import RequestLine
from sglang_backend.calls import our_backend
from sglang_backend.targets import Target

_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_NOBODY = "__storage_hit_query__"
"""In whose name SGLang asks only what is there."""
_LOOKED_UP = "_mooncake_connector_looked_up"
"""On an operation of SGLang's, from its lookup to its load: (seconds, why a page was missing)."""


def _looks_up(query: Callable[..., tuple[list[str], int]], controller: Any, operation: Any) -> tuple[list[str], int]:
    """Around the lookup of a prompt; where SGLang will load nothing, that was all."""
    backend = our_backend(controller)
    if backend is None:
        return query(controller, operation)
    if _name(operation) == _NOBODY:
        with backend.metrics.repeating(_is_asked_again(backend, operation)):
            return query(controller, operation)
    if not backend.logs_requests:
        return query(controller, operation)
    backend.first_miss, began_s = None, time.monotonic()
    found = query(controller, operation)
    _note_lookup(controller, operation, time.monotonic() - began_s, backend.first_miss, found[1])
    return found


def _loads(transfer: Callable[..., Any], controller: Any, operation: Any) -> Any:
    """Around the load of what was found."""
    backend = our_backend(controller)
    if backend is None or not backend.logs_requests:
        return transfer(controller, operation)
    loaded, began_s = backend.loaded_tokens, time.monotonic()
    result = transfer(controller, operation)
    _note_load(operation, backend.loaded_tokens - loaded, time.monotonic() - began_s)
    return result


@contained(bool)
def _is_asked_again(backend: Any, operation: Any) -> bool:
    """Whether the scheduler last asked for the same."""
    key = operation.token_ids
    salts = [getattr(key, name, None) for name in ("extra_key", "cache_salt")]
    former, backend.last_asked = backend.last_asked, (operation.last_hash, salts, list(key))
    return bool(former == backend.last_asked)


def _name(operation: Any) -> str:
    return str(getattr(operation.request_id, "rid", operation.request_id))


@contained(nothing)
def _note_lookup(controller: Any, operation: Any, seconds: float, why: Miss | None, found_tokens: int) -> None:
    local = len(operation.prefix_keys or ()) * controller.page_size
    tokens = local + len(operation.token_ids) // controller.page_size * controller.page_size
    if found_tokens and found_tokens >= controller.prefetch_threshold:
        setattr(operation, _LOOKED_UP, (seconds, why, local, tokens))
    else:
        _line(operation, tokens, local, 0, lookup_s=seconds, miss=why)


@contained(nothing)
def _note_load(operation: Any, hit_tokens: int, load_s: float) -> None:
    seconds, why, local, tokens = getattr(operation, _LOOKED_UP)
    if hit_tokens < operation.storage_hit_count:
        why = Miss.LOAD_FAILED
    _line(operation, tokens, local, hit_tokens, lookup_s=seconds, load_s=load_s, miss=why)


def _line(operation: Any, prompt_tokens: int, local_tokens: int, hit_tokens: int, **said: Any) -> None:
    line = RequestLine(
        id=_name(operation), prompt_tokens=prompt_tokens, local_tokens=local_tokens, hit_tokens=hit_tokens, **said
    )
    line.log()


TARGETS = (
    Target(f"{_CONTROLLER}._storage_hit_query", ("self", "operation"), _looks_up, names=("token_ids", "prefix_keys")),
    Target(f"{_CONTROLLER}._page_transfer", ("self", "operation"), _loads),
)
