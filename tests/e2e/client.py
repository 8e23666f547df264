"""Small clients that report what tests are about: tokens, margins, times, cached tokens. This one's API is vLLM's."""

from __future__ import annotations

import http.client
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["CANDIDATES", "Answer", "Client", "HttpClient", "Prompt", "ServerError"]

Prompt = str | Sequence[int]
CANDIDATES = 4
"""Likeliest tokens of a step that are asked for."""


class ServerError(AssertionError):
    """The server answered with an error, or ended a stream without its last event."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy completion.

    `steps[i]` has the log-probabilities of the likeliest tokens of step i; `cached_tokens` counts the prompt tokens
    that were not computed, whether they came from the engine's own cache or from the connector.
    """

    token_ids: tuple[int, ...]
    text: str
    steps: tuple[dict[int, float], ...]
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float

    @property
    def smallest_gap(self) -> float:
        """How far the chosen token was ahead of the next best one where it was least so, in nats."""
        ranked = (sorted(step.values(), reverse=True) for step in self.steps)
        return min((best - second for best, second, *_ in ranked), default=math.inf)


class HttpClient:
    """Talks to one server; every call opens a connection of its own, so a client may be shared by threads."""

    def __init__(self, host: str, port: int, *, timeout_s: float = 300.0) -> None:
        self._host, self._port, self._timeout_s = host, port, timeout_s

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples called `name`, as /metrics prints it, with these labels; 0.0 where there are none."""
        text = self._read(self._send("GET", "/metrics")).decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def _send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> http.client.HTTPConnection:
        """A connection on which a request with the JSON of `body` was sent; its answer is still to be read."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        payload = b"" if body is None else json.dumps(body).encode()
        connection.request(method, path, payload, {"Content-Type": "application/json", **(headers or {})})
        return connection

    def _read(self, connection: http.client.HTTPConnection) -> bytes:
        try:
            response = connection.getresponse()
            content = response.read()
            if response.status != 200:
                raise ServerError(f"the server answered {response.status}: {content[:2000]!r}")
            return content
        finally:
            connection.close()

    def _events(self, connection: http.client.HTTPConnection) -> Iterator[Any]:
        """The JSON events of a stream, up to its [DONE]."""
        try:
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(f"the server answered {response.status}: {response.read()[:2000]!r}")
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(f"the stream ended with an error: {event['error']}")
                yield event
            raise ServerError("the stream ended without [DONE]")
        finally:
            connection.close()


class Client(HttpClient):
    """A client of vLLM's completions API."""

    def __init__(self, host: str, port: int, model: str) -> None:
        super().__init__(host, port)
        self._model = model

    def ask(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 8,
        cache_salt: str | None = None,
        ignore_eos: bool = True,
        on_text: Callable[[str], None] | None = None,
    ) -> Answer:
        """Stream a greedy completion of `prompt` (a text, or token ids) and measure it.

        `on_text` is called with every piece of the text as it arrives.
        """
        started = time.monotonic()
        return _gather(started, self._events(self._complete(prompt, max_tokens, cache_salt, ignore_eos)), on_text)

    def chat(self, text: str, *, max_tokens: int = 8) -> Answer:
        """Stream the greedy answer to what a user says."""
        body = {
            **self.chat_body(text, max_tokens),
            "logprobs": True,
            "top_logprobs": CANDIDATES,
            "return_tokens_as_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.monotonic()
        return _gather(started, self._events(self._send("POST", "/v1/chat/completions", body)))

    def chat_body(self, text: str, max_tokens: int) -> dict[str, Any]:
        """A request of the chat completions API, not streamed."""
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_completion_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def abandon(self, prompt: Prompt, *, after_s: float, max_tokens: int = 256) -> None:
        """Send a request, and close its connection `after_s` seconds later without reading: the engine aborts it."""
        connection = self._complete(prompt, max_tokens, None, True)
        try:
            time.sleep(after_s)
        finally:
            connection.close()

    def reset_prefix_cache(self, *, connector: bool = False) -> None:
        """Empty the engine's own prefix cache and, if asked, the connector's; waits until no request holds a block."""
        deadline = time.monotonic() + 120
        while not self.resets(connector=connector):
            if time.monotonic() > deadline:
                raise ServerError("the engine did not reset its prefix cache within 120 s")
            time.sleep(0.1)

    def compute(self, prompt: Sequence[int], **tenant: str | None) -> None:
        """With nothing of the prompt in the server's own cache."""
        self.reset_prefix_cache()
        self.ask(prompt, max_tokens=1, cache_salt=tenant.get("cache_salt"))

    def resets(self, *, connector: bool = False, running: bool = False) -> bool:
        """Ask once for a reset; vLLM refuses it while a block is held."""
        path = f"/reset_prefix_cache?reset_external={connector}&reset_running_requests={running}".lower()
        return bool(json.loads(self._read(self._send("POST", path)))["success"])

    def load_weights(self, checkpoint: Path) -> None:
        """Replace the weights in memory, as an update of a policy does."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
        self._read(self._send("POST", "/collective_rpc", body))

    def tokens_from_connector(self) -> int:
        """Prompt tokens that this server has taken from its KV connector since it started, by its own count."""
        return int(self.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer"))

    def _complete(
        self, prompt: Prompt, max_tokens: int, cache_salt: str | None, ignore_eos: bool
    ) -> http.client.HTTPConnection:
        body = {
            "model": self._model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": ignore_eos,
            "logprobs": CANDIDATES,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        return self._send("POST", "/v1/completions", body)


def _gather(started: float, events: Iterator[Any], on_text: Callable[[str], None] | None = None) -> Answer:
    """The answer that a stream of completions, or of chat completions, brings; it was asked for at `started`."""
    first = None
    texts: list[str] = []
    token_ids: list[int] = []
    steps: list[dict[int, float]] = []
    usage: dict[str, Any] = {}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            if choice.get("token_ids") and first is None:
                first = time.monotonic()
            texts.append(text)
            if on_text is not None and text:
                on_text(text)
            token_ids.extend(choice.get("token_ids") or ())
            steps.extend(_steps(choice["logprobs"]))
    if first is None:
        raise ServerError(f"the stream ended without a token; usage: {usage}")
    return Answer(
        token_ids=tuple(token_ids),
        text="".join(texts),
        steps=tuple(steps),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        ttft_s=first - started,
        total_s=time.monotonic() - started,
    )


def _steps(logprobs: dict[str, Any] | None) -> list[dict[int, float]]:
    """vLLM's candidates, named "token_id:7", by token."""
    if not logprobs:
        return []
    if "content" in logprobs:  # of a chat
        steps = [{one["token"]: one["logprob"] for one in step["top_logprobs"]} for step in logprobs["content"] or ()]
    else:
        steps = logprobs["top_logprobs"]
    return [{int(name.removeprefix("token_id:")): value for name, value in step.items()} for step in steps]
