"""What the comparison of prefill and decode asks of one vLLM server."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_connector.cli.bench.measure import BenchError

_LIMIT_S = 300.0
_FETCHED = re.compile(r'^vllm:prompt_tokens_by_source_total\{.*source="external_kv_transfer".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Instance:
    """A server on the loopback interface; `transfer_port` is where its connector can be asked for."""

    port: int
    transfer_port: int
    model = "model"

    def is_healthy(self) -> bool:
        try:
            return self._call("GET", "/health")[0] == 200
        except OSError:
            return False

    def ask(self, prompt: list[int], answer_tokens: int, params: Mapping[str, Any] | None = None) -> list[int]:
        """The tokens of a greedy answer. Raises BenchError."""
        answer = self._complete(prompt, answer_tokens, params)
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    def prefill(self, prompt: list[int], more: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the prompt for another instance; what that has to be told. Raises BenchError."""
        answer = self._complete(prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False, **more})
        params: dict[str, Any] = answer.get("kv_transfer_params") or {}
        return params

    def tokens_from_connector(self) -> float:
        """Prompt tokens that came from another instance since the start."""
        _, content = self._call("GET", "/metrics")
        return sum(float(value) for value in _FETCHED.findall(content.decode()))

    def _complete(self, prompt: list[int], max_tokens: int, params: Mapping[str, Any] | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if params is not None:
            body["kv_transfer_params"] = params
        try:
            status, content = self._call("POST", "/v1/completions", body)
        except OSError as error:
            raise BenchError(f"vLLM on port {self.port} did not answer: {error}") from error
        if status != 200:
            raise BenchError(f"vLLM on port {self.port} answered {status}: {content[:300]!r}")
        answer: dict[str, Any] = json.loads(content)
        return answer

    def _call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_LIMIT_S)
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"}
            )
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()
