"""Instances that hand requests over, the proxy between them, and what both are asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from e2e.client import Client, Prompt
from e2e.pages import wait_for
from e2e.pd.faulty import PLUGIN, Faulty
from e2e.process import FORKS, ServerProcess, free_port, small_environment
from e2e.server import KV_TRANSFER, ONE_CORE, Server

__all__ = ["PREFIX", "Instance", "PDClient", "Proxy"]

PREFIX = "vllm:mooncake_connector_"
PROXY = Path(__file__).parent / "proxy.py"


class PDClient(Client):
    """A client of vLLM's API, or of a proxy before it."""

    def ask_whole(self, prompt: Sequence[int], *, max_tokens: int) -> tuple[int, ...]:
        """The tokens of a greedy answer that is not streamed."""
        choice = self.post(self.body(prompt, max_tokens))["choices"][0]
        return tuple(choice["token_ids"])

    def body(self, prompt: Prompt, max_tokens: int, **more: Any) -> dict[str, Any]:
        """A request of the completions API, not streamed."""
        return {
            "model": self._model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }

    def chat_whole(self, text: str, *, max_tokens: int) -> tuple[tuple[int, ...], str]:
        """Tokens and text of a greedy answer in a chat that is not streamed."""
        choice = self.post(self.chat_body(text, max_tokens), path="/v1/chat/completions")["choices"][0]
        return tuple(choice["token_ids"]), choice["message"]["content"]

    def post(self, body: Mapping[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        reply: dict[str, Any] = json.loads(self._read(self._send("POST", path, body)))
        return reply

    def limit(self, seconds: float) -> None:
        """Wait no longer than this for each piece of an answer."""
        self._timeout_s = seconds


class Instance(Server, PDClient, Faulty):
    """A vLLM server that hands requests over and takes them.

    `config` is the connector's part of the configuration. Where it has no `prefix_reuse`, the pool is left out. The
    instance's own files for faults (`faults/pd_faults.py`) lie in a folder beside its log.
    """

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        pool: Path,
        config: Mapping[str, object] = {},
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        host: str = "127.0.0.1",
        transfer_host: str = "",
    ) -> None:
        self.transfer_host, self.transfer_port = transfer_host or "127.0.0.1", free_port()
        address = {"transfer_hosts": [transfer_host]} if transfer_host else {}
        settings = {"prefix_reuse": False, "transfer_port": self.transfer_port, **address, **config}
        Faulty.__init__(self, log)
        Server.__init__(
            self,
            model,
            log=log,
            pool=pool,
            args=args,
            env={
                **ONE_CORE,
                "PYTHONPATH": f"{PLUGIN}:{FORKS}",
                **self.fault_variables,
                **(env or {}),
            },
            kv_transfer={**KV_TRANSFER, "kv_connector_extra_config": settings},
            launcher=launcher,
            host=host,
        )

    @property
    def directory(self) -> str:
        """Where the instance's ranks can be asked for."""
        return f"{self.transfer_host}:{self.transfer_port}"

    def figure(self, name: str, **labels: str) -> float:
        """Sum of one of the connector's own counters."""
        return self.metric(f"{PREFIX}{name}_total", **labels)

    def holds_no_block(self) -> None:
        """After one more small request no request has a block of the KV cache."""

        def is_free() -> bool:
            self.ask_whole((1, 2, 3), max_tokens=1)
            return self.metric("vllm:kv_cache_usage_perc") == 0 and self._count("running") + self._count("waiting") == 0

        wait_for(is_free, f"no block held in {self.log.stem}", deadline_s=60)

    def _count(self, state: str) -> float:
        return self.metric(f"vllm:num_requests_{state}")


class Proxy(ServerProcess, PDClient):
    """The proxy of `proxy.py` in a process of its own."""

    def __init__(
        self,
        prefills: Sequence[Instance],
        decodes: Sequence[Instance],
        *,
        log: Path,
        order: str = "sequential",
        limits: Sequence[str] = (),
    ) -> None:
        port = free_port()
        command = [sys.executable, str(PROXY), "--port", str(port), "--order", order, *limits]
        for prefill in prefills:
            command += ["--prefill", f"{prefill.url},{prefill.directory}"]
        for decode in decodes:
            command += ["--decode", decode.url]
        ServerProcess.__init__(
            self, command, port=port, env=small_environment(), log=log, is_complaint=lambda line: "Traceback" in line
        )
        Client.__init__(self, "127.0.0.1", port, decodes[0].model.name)
