"""Ports at which the instances of a deployment publish their KV events: one `--kv-events-config` is for all of them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_connector.errors import ConfigError

_FLAG = "--kv-events-config"
_ENDPOINT = re.compile(r"(tcp://.+):([1-9][0-9]{0,4})")
_BY_DEFAULT = "tcp://*:5557"
_RANKS = {
    "vllm": ("--data-parallel-size-local", "-dpl", "--data-parallel-size", "-dp"),
    "sglang": ("--attn-dp-size", "--dp-size", "--data-parallel-size", "--dp"),
}
"""How many data-parallel ranks an instance has here: in vLLM the first that is given of these, in SGLang the most."""
_OTHERS = ("--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr")
"""Of vLLM, where other ranks than the first ones are here."""
_TRUE = ("true", "1", "yes", "on", "t", "y")
"""What vLLM takes for it, in any case of letters."""


@dataclass(frozen=True, slots=True)
class Publishing:
    """What comes of the flags of an instance.

    Args:
        flags: with ports of its own.
        ports: of each data-parallel rank that at which it publishes, and the one at which it replays if it does.
        problem: why nobody here knows where it publishes, though it has such a flag; else empty.
    """

    flags: tuple[str, ...]
    ports: tuple[tuple[int, ...], ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Given:
    """One setting of the flag: the words of it from `at` to `stop`, and what is behind a dot, "" for JSON of all."""

    at: int
    stop: int
    key: str
    text: str


def publishing(engine: str, flags: tuple[str, ...], taken: set[int]) -> Publishing:
    """The flags of one instance with the next ports that are not `taken`, to which they are added.

    As they are where it listens at no port, or the engine will say what is wrong with them. Raises ConfigError.
    """
    given = list(_given(flags))
    if not given:
        return Publishing(flags)
    dotted = [one for one in given if one.key and engine == "vllm"]  # together they take the place of JSON
    try:
        config = {one.key: _value(one.text) for one in dotted} or json.loads(given[-1].text)
        found = {name: _ENDPOINT.fullmatch(config.get(name) or "") for name in ("endpoint", "replay_endpoint")}
    except (ValueError, TypeError, AttributeError):
        return Publishing(flags, problem=f"its {_FLAG} is no JSON object")
    found["endpoint"] = found["endpoint"] or (None if config.get("endpoint") else _ENDPOINT.fullmatch(_BY_DEFAULT))
    if problem := _problem(engine, flags, config, found["endpoint"]):
        return Publishing(flags, problem=problem)
    ranks = range(_num_ranks(engine, flags))
    listening = {name: match for name, match in found.items() if match}
    first = {name: int(match[2]) for name, match in listening.items()}
    every = {port + rank for port in first.values() for rank in ranks}
    if len(every) < len(first) * len(ranks):
        raise ConfigError(
            f"{_FLAG} has the ports {' and '.join(map(str, first.values()))}, but each of {len(ranks)} data-parallel "
            f"ranks takes the next one: set them {len(ranks)} apart"
        )
    further = next(more for more in itertools.count() if taken.isdisjoint(port + more for port in every))
    if max(every) + further > 65535:
        raise ConfigError(f"{_FLAG} has port {max(first.values())}, and up to 65535 there is none for each instance")
    taken.update(port + further for port in every)
    if further:
        moved = {name: f"{match[1]}:{first[name] + further}" for name, match in listening.items()}
        flags = _with_endpoints(flags, given, dotted, moved)
    return Publishing(flags, tuple(tuple(port + further + rank for port in first.values()) for rank in ranks))


def _problem(engine: str, flags: Sequence[str], config: dict[str, Any], endpoint: re.Match[str] | None) -> str:
    """Why nobody here knows where the instance publishes."""
    if engine == "vllm" and str(config.get("enable_kv_cache_events")).lower() not in _TRUE:
        return f"its {_FLAG} has no \"enable_kv_cache_events\": true, so it publishes nothing"
    if config.get("publisher", "zmq" if engine == "vllm" else None) != "zmq":
        return f"its {_FLAG} has no \"publisher\": \"zmq\", so it publishes nothing"
    if endpoint is None or not re.search(r"\*|::", endpoint[1]):
        return f"it publishes at {config.get('endpoint')}, and not at a port of all addresses (tcp://*:PORT)"
    if other := next((word for word in flags if word.partition("=")[0].replace("_", "-") in _OTHERS), None):
        return f"{other.partition('=')[0]} says which of its data-parallel ranks are here"
    return ""


def _given(flags: Sequence[str]) -> Iterator[_Given]:
    at = 0
    while at < len(flags):
        name, equals, text = flags[at].partition("=")
        head, _, key = name.partition(".")
        stop = at + 1 + (not equals)
        if head.replace("_", "-") == _FLAG and stop <= len(flags):
            yield _Given(at, stop, key, text if equals else flags[at + 1])
            at = stop
        else:
            at += 1


def _value(text: str) -> Any:
    """As vLLM reads what is behind a dotted flag."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _with_endpoints(
    flags: tuple[str, ...], given: Sequence[_Given], dotted: Sequence[_Given], moved: dict[str, str]
) -> tuple[str, ...]:
    if dotted:
        left_out = {word for one in dotted if one.key in moved for word in range(one.at, one.stop)}
        kept = (word for at, word in enumerate(flags) if at not in left_out)
        return (*kept, *(f"{_FLAG}.{name}={endpoint}" for name, endpoint in moved.items()))
    last = given[-1]
    value = json.dumps({**json.loads(last.text), **moved}, separators=(",", ":"))
    words = (flags[last.at], value) if last.stop - last.at == 2 else (f"{_FLAG}={value}",)
    return (*flags[: last.at], *words, *flags[last.stop :])


def _num_ranks(engine: str, flags: Sequence[str]) -> int:
    given = dict[str, str]()
    for at, word in enumerate(flags):
        name, equals, text = word.partition("=")
        given[name.replace("_", "-")] = text if equals else "".join(flags[at + 1 : at + 2])
    sizes = [given[name] for name in _RANKS[engine] if name in given]
    counted = sizes[:1] if engine == "vllm" else sizes
    return max((int(size) for size in counted if re.fullmatch(r"[1-9][0-9]{0,3}", size)), default=1)
