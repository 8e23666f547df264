"""Figures of a running server, from its `/metrics`, and which engine it is."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer
from prometheus_client.parser import text_string_to_metric_families

from mooncake_connector.errors import MooncakeConnectorError
from mooncake_connector.log import printable
from mooncake_connector.metrics.registry import PREFIX, VLLM_PREFIX

_PATIENCE_S, _QUIET_S = 20.0, 3.0
_MAX_NBYTES = 64 << 20
_INFO_PATHS = ("/server_info", "/get_server_info")
"""Where SGLang says how it was started: today, and formerly."""

Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]


class NoFigures(MooncakeConnectorError):
    """A server that says nothing of itself; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Live:
    """A server as its `/metrics` shows it.

    Args:
        engine: "vllm", "sglang", or "" for neither.
        samples: name -> (labels, value) of each.
    """

    url: str
    engine: str
    samples: Samples

    @property
    def prefix(self) -> str:
        """What our metrics begin with here."""
        return VLLM_PREFIX if self.engine == "vllm" else PREFIX

    @property
    def has_ours(self) -> bool:
        return any(name.startswith(self.prefix) for name in self.samples)

    def total(self, name: str) -> float:
        """Of all its labels together; 0 where it is not there."""
        return sum(value for _, value in self.samples.get(name, ()))

    def ours(self, name: str) -> float:
        """As `total`, of a counter of ours."""
        return self.total(f"{self.prefix}{name}_total")

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """A counter of ours by one of its labels; without what is 0."""
        found: dict[str, float] = defaultdict(float)
        for labels, value in self.samples.get(f"{self.prefix}{name}_total", ()):
            if value:
                found[labels.get(label, "")] += value
        return dict(found)


def look_at(url: str) -> Live:
    """Raises NoFigures for a server that cannot be reached, or has no metrics."""
    base = base_of(url)
    try:
        text = _get(base + "/metrics").decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        raise NoFigures(_without_metrics(base, error.code)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise NoFigures(
            f"{base} cannot be reached: {printable(str(why), 200)}; is the server up, and is this its host and port? A "
            "large model takes minutes to start"
        ) from None
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name].append((sample.labels, sample.value))
    except Exception as error:  # whatever a stranger answers
        raise NoFigures(f"{base}/metrics is no page of metrics: {printable(str(error), 200)}") from None
    names = [name.partition(":")[0] for name in samples]
    engine = next((engine for engine in ("vllm", "sglang") if engine in names), "")
    return Live(base, engine, dict(samples))


def info_of(url: str) -> Mapping[str, Any]:
    """How an SGLang server was started; nothing where it does not say so."""
    for path in _INFO_PATHS:
        try:
            value = json.loads(_get(url + path))
        except (OSError, http.client.HTTPException, ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return {}


def base_of(url: str) -> str:
    """Scheme, host, port, and a path that requests begin with. Raises NoFigures for what is no address of a server."""
    given = url if "://" in url else f"http://{url}"
    try:
        parts = urllib.parse.urlsplit(given)
        is_one_word = url.isprintable() and " " not in url
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and is_one_word
    except ValueError:
        fits = False
    if not fits:
        raise NoFigures(f"{printable(url, 200)!r} is no address of a server: expected http://HOST:PORT")
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def is_here(base: str) -> bool:
    """Whether the server of this address is on this host, as far as its address says."""
    try:
        found = socket.getaddrinfo(urllib.parse.urlsplit(base).hostname, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_is_ours(family, address) for family, _, _, _, address in found)


def _is_ours(family: int, address: Any) -> bool:
    """Only an address of this host can be bound."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as bound:
            bound.bind(address)
            return True
    except OSError:
        return False


def _get(url: str) -> bytes:
    return fetch(urllib.request.Request(url), _PATIENCE_S)


def fetch(request: urllib.request.Request, patience_s: float) -> bytes:
    """The body of what is answered; a person who waits for it is told so. Raises OSError: late, too long."""
    ends_s, parts, nbytes = time.monotonic() + patience_s, [b""], 0
    note = f"waiting for {printable(request.full_url, 200)}, at most {patience_s:.0f} s"
    waits = threading.Timer(_QUIET_S, typer.echo, (note,), {"err": True})
    waits.daemon = True
    waits.start()
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=patience_s) as response:
            while part := response.read1(_MAX_NBYTES):
                parts.append(part)
                nbytes += len(part)
                if time.monotonic() > ends_s or nbytes > _MAX_NBYTES:
                    raise TimeoutError("the answer does not end")
    finally:
        waits.cancel()
    return b"".join(parts)


def _without_metrics(base: str, status: int) -> str:
    if status in (401, 403):
        return (
            f"{base}/metrics answers {status}: it wants to know who asks; ask the engine itself, not what is before it"
        )
    if status == 404 and info_of(base):
        return f"{base} is SGLang without metrics: start it with --enable-metrics"
    return f"{base}/metrics answers {status}: expected vLLM, or SGLang with --enable-metrics; a router has none"
