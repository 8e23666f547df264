"""Hooks around SGLang's lookups and loads of a prompt: where `log_requests` is set, each has one line in the log, and
is left in the pool (`store_client/kept.py`).

SGLang tells a storage backend which pages it wants, but not of which request; the operation that says so comes by here.
It asks for full pages beyond what it has itself, so these are a prompt's tokens in the line. A prompt of which SGLang
asks for nothing, since it is short or all in its own cache, has no line. The scheduler of a decode instance asks what
is there of a prompt in no request's name, in each of its steps until it has room for it: that counts once, and has no
line; the load that follows has one. A prompt that waits behind others is looked up again every few steps where it was
missing: that counts once, and has a line more where something is found after all.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_connector.contain import contained, nothing
from mooncake_connector.misses import Miss
from mooncake_connector.request_line import RequestLine
from sglang_backend.calls import our_backend
from sglang_backend.targets import Target
from sglang_backend.told import Told, waiting
from store_client.kept import Seen

_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_NOBODY = "__storage_hit_query__"
"""In whose name SGLang asks only what is there."""
_ASKED = "_mooncake_connector_asked"
"""On an operation of SGLang's, from its lookup until all ranks have said what they found: an `_Asked`."""
_FOUND = "_mooncake_connector_found"
"""On an operation, from then to its load: a `_Found`."""
_MOST_ASKED = 4096
"""Prompts that SGLang may look up again."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A lookup of this rank; `again`: one that was counted before."""

    again: bool
    lookup_s: float


@dataclass(frozen=True, slots=True)
class _Found:
    """What a lookup said of a prompt, of whose full pages SGLang has the first `local_tokens` itself."""

    prompt_tokens: int
    local_tokens: int
    lookup_s: float
    missed: dict[Miss, int]
    seen: Seen | None


def _looks_up(query: Callable[..., tuple[list[str], int]], controller: Any, operation: Any) -> tuple[list[str], int]:
    """Around the lookup of a prompt by one rank."""
    backend = our_backend(controller)
    if backend is None:
        return query(controller, operation)
    again = _is_asked_again(backend, operation)
    backend.missed.take()
    began_s = time.monotonic()
    with backend.metrics.repeating(again):
        found = query(controller, operation)
    setattr(operation, _ASKED, _Asked(again, time.monotonic() - began_s))
    if _name(operation) == _NOBODY:
        backend.question = operation, found[1]
    return found


def _agrees(agree: Callable[..., int], controller: Any, operation: Any, storage_hit_count: int) -> int:
    """Around what SGLang makes of the lookups of all ranks, the least; where it will load nothing, that was all."""
    tokens = agree(controller, operation, storage_hit_count)
    backend = our_backend(controller)
    asked: _Asked | None = getattr(operation, _ASKED, None)
    if backend is not None and asked is not None:
        _note_lookup(backend, controller, operation, asked, storage_hit_count, tokens)
    return tokens


def _agrees_on_question(ask: Callable[..., int], cache: Any, *args: Any, **kwargs: Any) -> int:
    """Around what the scheduler of a decode instance asks in nobody's name, of which it takes the least as well."""
    controller = cache.cache_controller
    backend = None if controller is None else our_backend(controller)
    if backend is None:
        return ask(cache, *args, **kwargs)
    backend.question = None  # it may not ask at all
    tokens = ask(cache, *args, **kwargs)
    if backend.question is not None:
        _note_question(backend, controller, tokens)
    return tokens


def _loads(transfer: Callable[..., Any], controller: Any, operation: Any) -> Any:
    """Around the load of what was found."""
    backend = our_backend(controller)
    if backend is None or not backend.logs_requests:
        return transfer(controller, operation)
    loaded, began_s = backend.loaded_tokens, time.monotonic()
    result = transfer(controller, operation)
    _note_load(backend, operation, backend.loaded_tokens - loaded, time.monotonic() - began_s)
    return result


@contained(bool)
def _is_asked_again(backend: Any, operation: Any) -> bool:
    """Whether the scheduler last asked for the same, or the request has asked for it before."""
    tokens = array("q", getattr(operation.token_ids, "token_ids", operation.token_ids)).tobytes()
    asked = hash((operation.last_hash, *_salts(operation), tokens))
    if _name(operation) == _NOBODY:
        former, backend.last_asked = backend.last_asked, asked
    else:
        request = hash(operation.handle)  # clients name requests as long as they like
        former = backend.asked_by.pop(request, None)
        backend.asked_by[request] = asked
        if len(backend.asked_by) > _MOST_ASKED:
            del backend.asked_by[next(iter(backend.asked_by))]
    return bool(former == asked)


def _name(operation: Any) -> str:
    return str(getattr(operation.request_id, "rid", operation.request_id))


def _salts(operation: Any) -> list[str | None]:
    """What a request has beside its tokens."""
    return [getattr(operation.token_ids, name, None) for name in ("extra_key", "cache_salt")]


@contained(nothing)
def _note_lookup(
    backend: Any, controller: Any, operation: Any, asked: _Asked, own_tokens: int, found_tokens: int
) -> None:
    """`own_tokens`: what this rank found, of which all have so many."""
    page_tokens, first = controller.page_size, len(operation.prefix_keys or ())
    if found_tokens < own_tokens:
        if operation.is_terminated():
            return  # another rank had heard of that, and looked up nothing
        _note_disagreement(backend, operation, found_tokens // page_tokens, own_tokens - found_tokens, asked.again)
    if not backend.logs_requests:
        return
    tokens = (first + len(operation.token_ids) // page_tokens) * page_tokens
    seen = backend.records.look(operation.all_hash_values, first)
    found = _Found(tokens, first * page_tokens, asked.lookup_s, backend.missed.take(), seen)
    if found_tokens and found_tokens >= controller.prefetch_threshold:
        setattr(operation, _FOUND, found)
    elif not asked.again:
        _tell(backend, operation, found, {Miss.BELOW_MIN_HIT: found_tokens} if found_tokens else {})


def _note_disagreement(backend: Any, operation: Any, first: int, tokens: int, again: bool) -> None:
    """This rank found so many tokens, from page `first` of those asked for, that another one did not."""
    if backend.counts_lookups:
        why = backend.records.why_not_everywhere(operation.all_hash_values[first])
        backend.missed.note(why, tokens)
        with backend.metrics.repeating(again):
            backend.metrics.missed(why, tokens)


@contained(nothing)
def _note_question(backend: Any, controller: Any, found_tokens: int) -> None:
    operation, own_tokens = backend.question
    if found_tokens < own_tokens:
        first, again = found_tokens // controller.page_size, getattr(operation, _ASKED).again
        _note_disagreement(backend, operation, first, own_tokens - first * controller.page_size, again)


@contained(nothing)
def _note_load(backend: Any, operation: Any, hit_tokens: int, load_s: float) -> None:
    found = getattr(operation, _FOUND, None)
    if found is None:  # a pipeline goes through the load of what was not found as well
        return
    lost = operation.storage_hit_count - hit_tokens
    failed = {Miss.LOAD_FAILED: lost} if lost > 0 else {}
    _tell(backend, operation, found, failed, hit_tokens, load_s)


def _tell(
    backend: Any, operation: Any, found: _Found, unloaded: dict[Miss, int], hit_tokens: int = 0, load_s: float = 0.0
) -> None:
    """`unloaded`: of what was found."""
    missed = Counter(unloaded)
    missed.update(found.missed)
    line = RequestLine(
        id=_name(operation), prompt_tokens=found.prompt_tokens, local_tokens=found.local_tokens, hit_tokens=hit_tokens,
        lookup_s=found.lookup_s, load_s=load_s, miss=next(iter(missed), None),
    )  # fmt: skip

    seen, has_salt = found.seen, any(_salts(operation))

    def leave(line: RequestLine, missed: Mapping[Miss, int]) -> None:
        if seen is not None:
            backend.records.keep(line, seen, missed, has_salt=has_salt)

    waiting.add(Told(line, missed, leave))


TARGETS = (
    Target(
        f"{_CONTROLLER}._storage_hit_query",
        ("self", "operation"),
        _looks_up,
        names=("token_ids", "prefix_keys", "all_hash_values"),
    ),
    Target(f"{_CONTROLLER}._sync_prefetch_hit_query", ("self", "operation", "storage_hit_count"), _agrees),
    Target(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.query_storage_hit_length",
        (
            "self", "last_host_node_id", "new_input_tokens", "last_hash", "prefix_keys", "extra_key", "cache_salt",
        ),
        _agrees_on_question,
    ),
    Target(f"{_CONTROLLER}._page_transfer", ("self", "operation"), _loads),
)  # fmt: skip
