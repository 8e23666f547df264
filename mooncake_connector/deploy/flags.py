"""Flags that `up` gives to engines and routers itself, and which key of the deployment file is there for each."""

from __future__ import annotations

_OF_SERVERS = {"--ssl-certfile": "", "--ssl-keyfile": ""}
_TP, _PP = "prefill.tp or decode.tp", "prefill.pp or decode.pp"
_KEY_OF = {
    "vllm": {
        "--model": "model",
        "--host": "host",
        "--port": "prefill.port or decode.port",
        "--tensor-parallel-size": _TP,
        "-tp": _TP,
        "--pipeline-parallel-size": _PP,
        "-pp": _PP,
        "--kv-transfer-config": "connector",
        **_OF_SERVERS,
    },
    "sglang": {
        "--model": "model",
        "--model-path": "model",
        "--host": "host",
        "--port": "prefill.port or decode.port",
        "--tensor-parallel-size": _TP,
        "--tp-size": _TP,
        "--tp": _TP,
        "--pipeline-parallel-size": _PP,
        "--pp-size": _PP,
        "--pp": _PP,
        "--page-size": "connector.page_tokens",
        "--disaggregation-mode": "prefill or decode",
        "--disaggregation-transfer-backend": "connector",
        "--disaggregation-bootstrap-port": "prefill.port",
        **_OF_SERVERS,
    },
    "router": {"--host": "router.host", "--port": "router.port", "--tls-cert-path": "", "--tls-key-path": ""},
}
"""By engine; no key where a flag would have servers speak TLS."""


def problem_with(flags: tuple[str, ...], of: str) -> str | None:
    """What is wrong with the first of `flags` that cannot be given; `of` is an engine or "router"."""
    for word in flags:
        flag = word.partition("=")[0]
        key = _KEY_OF[of].get(flag.partition(".")[0].replace("_", "-"))
        if key is not None and word.startswith("-"):
            if key:
                return f"has {flag}, which `up` sets itself: leave it out, and set {key}"
            return f"has {flag}, and `up` asks /health over http: leave it out, and put what speaks TLS before it"
    return None
