"""A plugin of vLLM and SGLang that has them fork their processes, which then need not import everything anew.

Half of the work of a small server's start is imports: by an API server, an engine core and a worker one after the other
in vLLM, by a server and then by its scheduler and detokenizer in SGLang. Both spawn these on a CPU. For servers of one
thread in each process: OpenMP's threads do not live on in a fork. The demos' servers spawn, as those of users do.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any


def register_vllm() -> None:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_fork(cls: Any, config: Any) -> None:
        check(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_fork)  # type: ignore[method-assign]


def register_sglang() -> None:
    from sglang.srt.entrypoints import engine

    configure = engine._set_envs_and_config

    def configure_and_fork(server_args: Any) -> None:
        configure(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = configure_and_fork
