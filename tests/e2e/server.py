"""A real vLLM server, with the connector or without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from e2e.client import Client
from e2e.forked import ForkServer
from e2e.process import ENVIRONMENTS, FORKS, ServerProcess, free_port, small_environment

__all__ = ["KV_TRANSFER", "ONE_CORE", "Server"]

PYTHON, MODULE = ENVIRONMENTS / "vllm" / "bin" / "python", "vllm.entrypoints.openai.api_server"

# What the README tells a person to pass to vLLM, word for word.
KV_TRANSFER = {"kv_connector": "MooncakeKVConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}

ONE_CORE = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(FORKS),
    "TORCHDYNAMO_DISABLE": "1",
}
"""For a server that others run beside: one thread for each rank, wherever there is a core, and a quick start.

On few cores, threads that wait for each other after every operation of every layer wait for all the others as well.
Nothing is compiled: that of log-probabilities, at the first request for them, would take longer than the start.
"""
FORK_SERVER = ForkServer(PYTHON, MODULE, (MODULE, "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"))


class Server(ServerProcess, Client):
    """One vLLM server and its client.

    `pool` is the connector's pool folder; without one the server runs plain vLLM. `launcher` is a command that runs
    the rest of its arguments, such as `ip netns exec NAME`; `host` is the address that the server then listens on.
    It computes in float32, unless `args` say otherwise: without AVX-512 or AMX, bfloat16 prefills five times slower.
    vLLM is started as a module because the `vllm` command of the CPU build looks for a distribution called `vllm` and
    does not start.
    """

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        pool: Path | None = None,
        args: Sequence[str] = (),
        env: dict[str, str] | None = None,
        kv_transfer: dict[str, object] | None = None,
        launcher: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        self.model, self.pool = model, pool
        port = free_port()
        command = [
            *launcher,
            *(str(PYTHON), "-m", MODULE),
            *("--model", str(model), "--served-model-name", model.name),
            *("--host", host, "--port", str(port)),
            *("--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details"),
            *args,
        ]
        environment = {
            **small_environment(),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin would take the cores from whatever runs beside
        }
        if pool is not None:
            command += ["--kv-transfer-config", json.dumps(kv_transfer or KV_TRANSFER)]
            environment["MOONCAKE_CONNECTOR_POOL"] = str(pool)
        environment.update(env or {})
        forks = str(FORKS) in environment.get("PYTHONPATH", "").split(":")
        ServerProcess.__init__(
            self, command, port=port, env=environment, log=log, is_complaint=_is_complaint, host=host,
            fork_server=FORK_SERVER if forks else None,
        )  # fmt: skip
        Client.__init__(self, host, port, model.name)


def _is_complaint(line: str) -> bool:
    return " ERROR " in line or "Traceback (most recent" in line
