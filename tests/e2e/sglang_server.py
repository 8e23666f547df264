"""A real SGLang server on the CPU, with HiCache or one side of a PD pair, and a client of its APIs."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from e2e.client import CANDIDATES, Answer, HttpClient, Prompt, ServerError
from e2e.forked import ForkServer
from e2e.process import ENVIRONMENTS, FORKS, ServerProcess, free_port, small_environment

__all__ = ["DYNAMIC", "ONE_CORE", "STAND_INS", "SGLangAnswer", "SGLangClient", "SGLangServer", "Way"]

STAND_INS = Path(__file__).resolve().parents[1] / "stand_ins"
ONE_CORE = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{STAND_INS}:{FORKS}", "TORCHDYNAMO_DISABLE": "1"}
"""For a server that others run beside, as that of vLLM."""
PYTHON, MODULE = ENVIRONMENTS / "sglang" / "bin" / "python", "sglang.launch_server"
FORK_SERVER = ForkServer(PYTHON, MODULE, (MODULE, "sglang.srt.entrypoints.http_server"))
PAGE_TOKENS = 64
ADMIN_KEY = "admin of the tests"

Way = Literal["plain", "radix", "no storage", "name", "dynamic", "takeover", "file"]
"""How the third level gets in: `plain` has no cache at all, `radix` SGLang's own, `no storage` HiCache's two levels."""
Role = Literal["prefill", "decode"]

DYNAMIC = {
    "backend_name": "mooncake_connector",
    "module_path": "sglang_backend.hicache",
    "class_name": "MooncakeConnectorStorage",
    "interface_v1": 1,
}
_BACKEND_OF = {"name": "mooncake_connector", "dynamic": "dynamic", "takeover": "mooncake", "file": "file"}


@dataclass(frozen=True, slots=True)
class SGLangAnswer(Answer):
    """Of the cached tokens, `from_storage` were read from the third level for this request, and `from_host` were in the
    second one alone."""

    from_storage: int
    from_host: int


class SGLangClient(HttpClient):
    """A client of SGLang, or of a router before it."""

    def ask(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 8,
        on_text: Callable[[str], None] | None = None,
        **fields: Any,
    ) -> SGLangAnswer:
        """Stream a greedy completion of `prompt` (a text, or token ids) and measure it.

        `fields` are further ones of `body` or of SGLang's request, such as `cache_salt`.
        """
        body = self.body(
            prompt,
            max_tokens,
            return_logprob=True,
            top_logprobs_num=CANDIDATES,
            stream=True,
            **fields,
        )
        started = time.monotonic()
        first, text, last = None, "", None
        for last in self._events(self._send("POST", "/generate", body)):
            if first is None and last["output_ids"]:
                first = time.monotonic()
            if on_text is not None and len(last["text"]) > len(text):
                on_text(last["text"][len(text) :])
            text = last["text"]
        if first is None or last is None:
            raise ServerError("the stream ended without a token")
        meta = last["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return SGLangAnswer(
            token_ids=tuple(last["output_ids"]),
            text=text,
            steps=tuple({token: value for value, token, _ in step} for step in meta["output_top_logprobs"]),
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            ttft_s=first - started,
            total_s=time.monotonic() - started,
            from_storage=details.get("storage", 0),
            from_host=details.get("host", 0),
        )

    def ask_whole(self, prompt: Prompt, *, max_tokens: int, **fields: Any) -> tuple[int, ...]:
        """The tokens of a greedy answer that is not streamed."""
        return tuple(self.post(self.body(prompt, max_tokens, **fields))["output_ids"])

    def body(
        self, prompt: Prompt, max_tokens: int, *, ignore_eos: bool = True, n: int = 1, **fields: Any
    ) -> dict[str, Any]:
        """A greedy request of the native API."""
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": ignore_eos, "n": n}
        asked = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        return {**asked, "sampling_params": sampling, **fields}

    def chat(self, text: str, *, max_tokens: int) -> tuple[str, list[float]]:
        """The greedy answer in a chat that is not streamed, and the log-probability of each of its tokens."""
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
        }
        choice = self.post(body, "/v1/chat/completions")["choices"][0]
        return choice["message"]["content"], [token["logprob"] for token in choice["logprobs"]["content"]]

    def post(self, body: Any, path: str = "/generate") -> Any:
        """The answer to a request that is not streamed."""
        return json.loads(self._read(self._send("POST", path, body)))

    def leave(self, prompt: Prompt, *, after_s: float, max_tokens: int) -> None:
        """Send a request whose answer is streamed, and close its connection `after_s` seconds later."""
        connection = self._send("POST", "/generate", self.body(prompt, max_tokens, stream=True))
        try:
            time.sleep(after_s)
        finally:
            connection.close()


class SGLangServer(ServerProcess, SGLangClient):
    """One SGLang server and its client.

    `pool` is the folder of our pool, or of SGLang's own `file` backend. Prompts of one page already are looked up in
    the storage (SGLang's own threshold is 256 tokens), and the scheduler waits for what it reads from there. Like
    vLLM's in `e2e.server` it computes in float32, unless `args` say otherwise. With a `role` it is that side of a PD
    pair; a prefill instance has a bootstrap server at `bootstrap_port`. `launcher` and `host` are as in `e2e.server`.
    """

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        pool: Path | None = None,
        way: Way = "name",
        role: Role | None = None,
        layout: str = "page_first",
        io_backend: str = "kernel",
        write_policy: str = "write_through",
        prefetch_policy: str = "wait_complete",
        max_total_tokens: int = 8192,
        extra_config: dict[str, object] | None = None,
        args: Sequence[str] = (),
        env: dict[str, str] | None = None,
        launcher: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        self.model, self.pool = model, pool
        port, self.bootstrap_port = free_port(), free_port()
        command = [
            *launcher,
            *(str(PYTHON), "-m", MODULE),
            *("--model-path", str(model), "--host", host, "--port", str(port), "--page-size", str(PAGE_TOKENS)),
            *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
            *("--disable-cuda-graph", "--disable-overlap-schedule", "--max-total-tokens", str(max_total_tokens)),
            *("--sleep-on-idle", "--skip-server-warmup"),
            *("--enable-cache-report", "--enable-metrics", "--admin-api-key", ADMIN_KEY),
        ]
        environment = {
            **small_environment(),
            "PYTHONPATH": str(STAND_INS),
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin would take the cores from each other where there are few
            "TORCH_EXTENSIONS_DIR": str(ENVIRONMENTS.parent / ".cache" / "torch_extensions"),
        }
        if way == "plain":
            command += ["--disable-radix-cache"]
        elif way != "radix":
            command += ["--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-mem-layout", layout]
            command += ["--hicache-io-backend", io_backend, "--hicache-write-policy", write_policy]
        if way in _BACKEND_OF:
            config = {
                "prefetch_threshold": PAGE_TOKENS,
                **(DYNAMIC if way == "dynamic" else {}),
                **(extra_config or {}),
            }
            command += ["--hicache-storage-backend", _BACKEND_OF[way]]
            command += ["--hicache-storage-prefetch-policy", prefetch_policy]
            command += ["--hicache-storage-backend-extra-config", json.dumps(config)]
        if role is not None:
            command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "mooncake_connector"]
            command += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        if way == "takeover":
            environment["MOONCAKE_CONNECTOR_SGLANG_TAKEOVER"] = "1"
        if pool is not None:
            environment["MOONCAKE_CONNECTOR_POOL"] = str(pool)
        if way == "file":
            environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(pool)
        environment.update(env or {})
        forks = str(FORKS) in environment["PYTHONPATH"].split(":")
        ServerProcess.__init__(
            self, [*command, *args], port=port, env=environment, log=log, is_complaint=_Complaint(), host=host,
            fork_server=FORK_SERVER if forks else None,
        )  # fmt: skip
        SGLangClient.__init__(self, host, port)

    def compute(self, prompt: Sequence[int], **tenant: str | None) -> None:
        """With nothing of the prompt in the server's own cache."""
        self.flush()
        self.ask(prompt, max_tokens=1, **tenant)  # type: ignore[arg-type]

    def abandon(self, prompt: Prompt, *, after_s: float, max_tokens: int = 256) -> None:
        """Send a request, and have it aborted `after_s` seconds later: SGLang notices a closed connection too late."""
        rid = uuid.uuid4().hex
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        connection = self._send("POST", "/generate", {"rid": rid, "input_ids": prompt, "sampling_params": sampling})
        try:
            time.sleep(after_s)
            self.abort(rid)
        finally:
            connection.close()

    def abort(self, rid: str) -> None:
        """End a request by its `rid`."""
        self._read(self._send("POST", "/abort_request", {"rid": rid}, _AUTHORIZED))

    def flush(self, *, within_s: int = 30) -> None:
        """Empty the first two levels; waits until no request is under way."""
        self._read(self._send("POST", f"/flush_cache?timeout={within_s}", headers=_AUTHORIZED))

    def admin(self, method: str, path: str = "", body: Any = None, *, key: str | None = ADMIN_KEY) -> tuple[int, str]:
        """(status, text) of a call of SGLang's API below /hicache/storage-backend, with `key` as the admin's."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        connection = self._send(method, f"/hicache/storage-backend{path}", body, headers)
        try:
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


_AUTHORIZED = {"Authorization": f"Bearer {ADMIN_KEY}"}


class _Complaint:
    """Tracebacks, but for that of a call of the server to itself: without a warm-up it may come before it listens. And
    that several hooks are around one function, of which SGLang warns with each start."""

    def __init__(self) -> None:
        self._is_of_call = False

    def __call__(self, line: str) -> bool:
        if line.startswith("["):
            self._is_of_call = "post-warmup freeze_gc failed" in line
        return "Multiple AROUND hooks" in line or ("Traceback (most recent" in line and not self._is_of_call)
