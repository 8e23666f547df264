"""vLLM inside this process, so that a test can look into its memory, and spoil it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["drain", "scheduler", "vllm_inside"]

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # or log-probabilities have something compiled for a quarter of a minute
}


@contextmanager
def vllm_inside(model: Path, dtype: str, settings: dict[str, Any], **options: Any) -> Iterator[Any]:
    """An `LLM` whose connector has these settings, with one thread, as for servers that others run beside."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        import torch
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

        torch.set_num_threads(1)
        patch.setattr("vllm_plugin.prefix.lookups._LOOKUP_HANGS_S", 60.0)  # however busy the machine is
        transfer = KVTransferConfig(
            kv_connector="MooncakeKVConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=settings,
        )
        llm = LLM(
            str(model), enforce_eager=True, dtype=dtype, max_model_len=1024, kv_transfer_config=transfer, **options
        )
        yield llm
        llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()


def scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def drain(llm: Any) -> None:
    """Let the saves end, as the idle engine of a server does."""
    while scheduler(llm).has_requests():
        llm.llm_engine.engine_core.engine_core.step()
