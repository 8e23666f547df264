"""SGLang servers that hand requests over, and the routers between them, which nobody here wrote."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.client import ServerError
from e2e.pages import wait_for
from e2e.pd.faulty import PLUGIN, Faulty
from e2e.process import ENVIRONMENTS, FORKS, ServerProcess, free_port, small_environment
from e2e.sglang_server import ONE_CORE, STAND_INS, Role, SGLangClient, SGLangServer

__all__ = ["DEADLINE_S", "KINDS", "LEASE_S", "LIMIT_S", "Both", "Instance", "Router"]

KINDS = ("sglang-router", "mini-lb")
LEASE_S, DEADLINE_S = 10, 30
LIMIT_S = 120.0
"""Beyond all deadlines, on a busy machine as well."""
_PYTHON = ENVIRONMENTS / "routers" / "bin" / "python"


class Instance(SGLangServer, Faulty):
    """One side of a PD pair. `config` is the connector's configuration, given in the environment."""

    def __init__(
        self,
        model: Path,
        role: Role,
        *,
        log: Path,
        config: Mapping[str, object] = {},
        args: Sequence[str] = (),
        env: Mapping[str, str] = {},
    ) -> None:
        Faulty.__init__(self, log)
        self.directory_port = free_port()
        times = {"transfer_lease_s": LEASE_S, "transfer_deadline_s": DEADLINE_S}
        settings = {**times, "transfer_port": self.directory_port, **config}
        variables = {f"MOONCAKE_CONNECTOR_{name.upper()}": str(value) for name, value in settings.items()}
        path = {"PYTHONPATH": f"{STAND_INS}:{PLUGIN}:{FORKS}"}
        SGLangServer.__init__(
            self,
            model,
            log=log,
            way="radix",
            role=role,
            args=["--skip-server-warmup", *args],
            env={**ONE_CORE, **path, **self.fault_variables, **variables, **env},
        )

    def num_chunks(self) -> int:
        """How many batches of prefill it has begun."""
        return self.log_text().count("Prefill batch")

    def holds_nothing(self) -> None:
        """No request is under way, and all pages are free: SGLang ends a server that lacks one when it is idle.

        A server that is asked to wait for that looks when it is woken, and those that routers look after are woken by
        their small requests.
        """

        def is_idle() -> bool:
            try:
                self.flush(within_s=0)
            except ServerError:
                return False
            return True

        wait_for(is_idle, f"{self.log.stem} without a request", deadline_s=LIMIT_S, every_s=0.2)
        self.check_alive()


class Router(ServerProcess, SGLangClient):
    """A router of the package `sglang-router` between one prefill instance and one decode instance."""

    def __init__(self, kind: str, prefill: Instance, decode: Instance, *, log: Path) -> None:
        if not (ENVIRONMENTS / "routers" / ".installed").exists():
            pytest.skip("NOT TESTED: sglang-router could not be installed (`make routers`)")
        port = free_port()
        command = [
            *(str(_PYTHON), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
            *("--pd-disaggregation", "--prefill", prefill.url, str(prefill.bootstrap_port), "--decode", decode.url),
        ]
        if kind == "mini-lb":
            command += ["--mini-lb"]
        else:  # tests ask instances that were away as soon as they are back
            command += ["--policy", "round_robin", "--disable-retries", "--disable-circuit-breaker"]
            command += ["--health-check-interval-secs", "2", "--prometheus-port", str(free_port())]
        is_complaint = re.compile("Traceback|panicked").search
        ServerProcess.__init__(
            self, command, port=port, env=small_environment(), log=log,
            is_complaint=lambda line: is_complaint(line) is not None,
        )  # fmt: skip
        SGLangClient.__init__(self, "127.0.0.1", port)

    def is_healthy(self) -> bool:
        """Whether it answers, and knows by now that both instances are there."""
        try:
            return super().is_healthy() and len(self.ask_whole((1, 2, 3), max_tokens=1)) == 1
        except (ServerError, OSError):
            return False


class Both:
    """A request that is sent to both sides as a router does, and what each of them answers."""

    def __init__(
        self, threads: ThreadPoolExecutor, prefill: Instance, decode: Instance, prompt: Sequence[int], max_tokens: int
    ) -> None:
        self.rid = uuid.uuid4().hex
        body = prefill.body(prompt, max_tokens, rid=self.rid) | {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": random.SystemRandom().getrandbits(62),
        }
        self.prefill = threads.submit(prefill.post, body)
        self.decode = threads.submit(decode.post, body)

    def answer(self) -> tuple[int, ...]:
        """Of the decode instance."""
        return tuple(self.decode.result(LIMIT_S)["output_ids"])

    def failure(self) -> str:
        """What the decode instance answers in place of tokens."""
        with pytest.raises((ServerError, OSError)) as caught:
            self.answer()
        return str(caught.value)
