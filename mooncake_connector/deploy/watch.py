"""Asks a process of a deployment how it does: `/health`, and the figures of `/metrics` that people want to see."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

POLL_S = 1.0
_PATIENCE_S = 10.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy of the environment has no business between processes of one machine."""

_OF_VLLM: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "done": ("vllm:request_success_total",),
    "hit_tokens": ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"),
    "prompt_tokens": ("vllm:prefix_cache_queries_total",),
    "moved_nbytes": ("vllm:mooncake_connector_fetch_bytes_total", "vllm:mooncake_connector_send_bytes_total"),
}
_OF_SGLANG: Mapping[str, tuple[str, ...]] = {
    "running": ("sglang:num_running_reqs",),
    "waiting": ("sglang:num_queue_reqs",),
    "done": ("sglang:num_requests_total",),
    "hit_tokens": ("sglang:cached_tokens_total",),
    "prompt_tokens": ("sglang:prompt_tokens_total",),
    "moved_nbytes": ("mooncake_connector_transfer_bytes_total",),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one instance since its start. Hits are prompt tokens that it did not compute, wherever they came from."""

    running: int
    waiting: int
    done: int
    hit_tokens: int
    prompt_tokens: int
    moved_nbytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process said when it was asked at `asked_s`; no figures where it has none."""

    asked_s: float
    healthy: bool
    figures: Figures | None


class Watch:
    """Asks one process again and again, in a thread of its own, until `close`."""

    def __init__(self, url: str, engine: str | None) -> None:
        self._url = url
        self._names = {"vllm": _OF_VLLM, "sglang": _OF_SGLANG}.get(engine or "")
        self._closed = threading.Event()
        self.latest = Answer(0.0, False, None)
        threading.Thread(target=self._ask, name=f"watch {url}", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _ask(self) -> None:
        while not self._closed.is_set():
            asked_s = time.monotonic()
            healthy = read(f"{self._url}/health") is not None
            text = read(f"{self._url}/metrics") if healthy and self._names else None
            figures = figures_in(text, self._names) if text and self._names else None
            self.latest = Answer(asked_s, healthy, figures)
            self._closed.wait(POLL_S)


def read(url: str) -> str | None:
    """What is answered with success; None for anything else."""
    try:
        with _OPENER.open(url, timeout=_PATIENCE_S) as reply:
            return str(reply.read().decode(errors="replace"))
    except (OSError, ValueError, urllib.error.URLError):
        return None
    except Exception:  # http.client's, of an answer that is none
        return None


def figures_in(text: str, names: Mapping[str, tuple[str, ...]]) -> Figures:
    """Sums over the labels of each metric."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name and name != "#":
            with contextlib.suppress(ValueError):
                value = float(line.rpartition(" ")[2])
                sums[name] = sums.get(name, 0.0) + (value if math.isfinite(value) else 0.0)
    return Figures(**{key: int(sum(sums.get(one, 0.0) for one in of)) for key, of in names.items()})
