"""Asks a process of a deployment how it does: `/health`, and the figures of `/metrics` that people want to see.

`python -m mooncake_connector.deploy.watch LIMIT_S URL...` waits until each answers /health; status 1: one does not.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

POLL_S = 1.0
_PATIENCE_S = 10.0
_MAX_NBYTES = 64 << 20
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
    """What a process said when it was asked at `asked_s`: the HTTP status of /health, 0 for none; maybe figures."""

    asked_s: float
    status: int
    figures: Figures | None

    @property
    def healthy(self) -> bool:
        return self.status == 200


class Watch:
    """Asks one process again and again, in a thread of its own, until `close`.

    Args:
        ready_path: what is asked until it has answered with success once; `/health` is after that.
    """

    def __init__(self, url: str, engine: str | None, ready_path: str = "/health") -> None:
        self._url, self._path = url, ready_path
        self._names = {"vllm": _OF_VLLM, "sglang": _OF_SGLANG}.get(engine or "")
        self._closed = threading.Event()
        self.latest = Answer(0.0, 0, None)
        threading.Thread(target=self._ask, name=f"watch {url}", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _ask(self) -> None:
        while not self._closed.is_set():
            asked_s = time.monotonic()
            status = status_of(f"{self._url}{self._path}")
            if status == 200:
                self._path = "/health"
            text = read(f"{self._url}/metrics") if status == 200 and self._names else None
            figures = figures_in(text, self._names) if text and self._names else None
            self.latest = Answer(asked_s, status, figures)
            self._closed.wait(POLL_S)


def status_of(url: str) -> int:
    """The HTTP status of an answer; 0 where there is none."""
    try:
        with _OPENER.open(url, timeout=_PATIENCE_S) as reply:
            reply.read()
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except Exception:
        return 0


def read(url: str) -> str | None:
    """What is answered with success; None for anything else, and for what is far too long."""
    try:
        with _OPENER.open(url, timeout=_PATIENCE_S) as reply:
            said = reply.read(_MAX_NBYTES + 1)
            return None if len(said) > _MAX_NBYTES else str(said.decode(errors="replace"))
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


def wait_for(urls: list[str], limit_s: float) -> bool:
    """Whether each has answered /health within the limit; each is asked at least once."""
    until_s = time.monotonic() + limit_s
    while left := [url for url in urls if read(f"{url}/health") is None]:
        if time.monotonic() > until_s:
            print(f"no answer from {' '.join(left)} within {limit_s:g} s", file=sys.stderr)
            return False
        time.sleep(POLL_S)
    return True


if __name__ == "__main__":
    sys.exit(not wait_for(sys.argv[2:], float(sys.argv[1])))
