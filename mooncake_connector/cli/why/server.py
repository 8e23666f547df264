"""What a running server says of itself, so that nobody has to: its model, how it keeps KV, and a prompt's tokens."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mooncake_connector.cli.live import NoFigures, base_of, fetch, info_of, look_at
from mooncake_connector.cli.why.prompt import PromptError, token_ids
from mooncake_connector.log import printable
from mooncake_connector.metrics.registry import ENGINE_INFO, VLLM_PREFIX

_PATIENCE_S = 30.0
_DTYPES = {
    "half": "float16", "float16": "float16", "fp16": "float16", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float": "float32", "float32": "float32", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2",
}  # fmt: skip
"""Words of both engines for a dtype that a namespace may have; what is not here, such as "auto", says nothing."""


@dataclass(frozen=True, slots=True)
class Server:
    """One server.

    Args:
        url: without a path that belongs to a request.
        model: the name by which requests ask for it; None where it has none.
        source: the model's folder, or its name on a hub; None where it does not say.
        fields: of its namespace, as far as it tells them.
    """

    url: str
    model: str | None
    source: str | None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def tokens(self, prompt: str, *, chat: bool) -> list[int]:
        """What its own /tokenize says. Raises PromptError."""
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        if self.model is not None:
            asked["model"] = self.model
        return token_ids(_json(f"{self.url}/tokenize", asked).get("tokens"), f"the answer of {self.url}/tokenize")


def look_up(url: str) -> Server:
    """Raises PromptError, and NoFigures where `url` is none of a server."""
    base = base_of(url)
    models = _json(f"{base}/v1/models").get("data")
    first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    name, root = (one if isinstance(one := first.get(key), str) else None for key in ("id", "root"))
    if first.get("owned_by") != "sglang":
        return Server(base, name, root, _of_vllm(base))
    info = info_of(base)
    path = info.get("model_path")
    return Server(base, name, path if isinstance(path, str) else root, _of_sglang(info))


def _of_vllm(base: str) -> dict[str, Any]:
    """vLLM's /metrics have its cache's dtype where it was given one; otherwise it is what the engine computes in, which
    ours say."""
    try:
        samples = look_at(base).samples
    except NoFigures:
        return {}
    cache, ours = (
        next((labels for labels, _ in samples.get(name, ())), {})
        for name in ("vllm:cache_config_info", ENGINE_INFO.series(VLLM_PREFIX))
    )
    kind, page_tokens = cache.get("cache_dtype", "auto"), ours.get("page_tokens", "")
    fields = _kv_dtype(ours.get("dtype") if kind == "auto" else kind)
    return fields | ({"page_tokens": int(page_tokens)} if re.fullmatch("[1-9][0-9]{0,8}", page_tokens) else {})


def _of_sglang(info: Mapping[str, Any]) -> dict[str, Any]:
    """Its fp8 has another name in a namespace, and nobody shares such pages with it."""
    kind, page_tokens = info.get("kv_cache_dtype"), info.get("page_size")
    fields = _kv_dtype(info.get("dtype") if kind == "auto" else kind)
    if fields.get("kv_dtype", "").startswith("fp8"):
        fields = {}
    return fields | ({"page_tokens": page_tokens} if type(page_tokens) is int and page_tokens > 0 else {})


def _kv_dtype(word: object) -> dict[str, Any]:
    return {"kv_dtype": _DTYPES[word]} if isinstance(word, str) and word in _DTYPES else {}


def _json(url: str, asked: Mapping[str, Any] | None = None) -> dict[str, Any]:
    body = None if asked is None else json.dumps(asked).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        answer = json.loads(fetch(request, _PATIENCE_S))
    except urllib.error.HTTPError as error:
        detail = printable(error.read(500).decode(errors="replace").strip(), 200) or error.reason
        raise PromptError(f"{url} answered {error.code}: {detail}; {_hint(error.code)}") from None
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        why = printable(str(getattr(error, "reason", None) or error), 200)
        raise PromptError(f"{url} gives no answer: {why}; is the server up, and is this its host and port?") from None
    if not isinstance(answer, dict):
        raise PromptError(f"{url} answered with no JSON object: is it a server of vLLM or SGLang?")
    return answer


def _hint(status: int) -> str:
    instead = "or leave --url out and name the model's folder with --model DIR"
    if status in (401, 403):
        return f"this server wants an API key: ask an instance that wants none, {instead}"
    if status in (404, 405, 501):
        return f"routers tell no tokens: name the port of an engine behind it, {instead}"
    return instead.removeprefix("or ")
