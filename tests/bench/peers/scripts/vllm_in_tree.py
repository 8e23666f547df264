"""vLLM's own connector for the Mooncake Store, made to run without a GPU; vLLM imports it by this module's name.

It records a CUDA event before it saves. On a CPU everything before has ended by then, so an empty event serves.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector

__all__ = ["MooncakeStoreConnector"]


class _DoneEvent:
    def record(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


if not torch.cuda.is_available():
    torch.cuda.Event = _DoneEvent  # type: ignore[misc, assignment, unused-ignore]
