"""The worker side: reads the weights of this rank when the scheduler side asks for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mooncake_connector.contain import contained, nothing
from vllm_plugin.messages import StepMetadata
from vllm_plugin.weights.reading import Reading

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_DEADLINE_S = 5.0
"""A rank that has not read its weights by then gives up. On a device that is a matter of milliseconds."""


class WeightsReader:
    """See the module."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        parallel = vllm_config.parallel_config
        self._pp_rank, self._tp_rank = divmod(
            parallel.rank % (parallel.pipeline_parallel_size * parallel.tensor_parallel_size),
            parallel.tensor_parallel_size,
        )
        speculative = vllm_config.speculative_config
        self._drafts = speculative is not None and speculative.uses_draft_kv_cache()
        self._elsewhere = ""
        if parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe:
            self._elsewhere = "other data-parallel ranks have experts of this model"
        self._engine_worker: Any = None
        self._reading: Reading | None = None

    def remember(self, engine_worker: Any) -> Reading:
        """Read the weights for the first time, of vLLM's worker, which goes on being the one that is read."""
        self._engine_worker = engine_worker
        return self._read(0)

    @contained(nothing)
    def before_step(self, metadata: StepMetadata) -> None:
        """Called before each step, which computes with the weights that are there now."""
        if metadata.read_weights:
            self._reading = self._read(metadata.read_weights)

    def take(self) -> Reading | None:
        reading, self._reading = self._reading, None
        return reading

    def _read(self, number: int) -> Reading:
        from vllm_plugin.weights.digest import sums_of
        from vllm_plugin.weights.layout import Layout

        try:
            if self._elsewhere or self._engine_worker is None:
                return Reading(number, cause=self._elsewhere or "vLLM's worker is not known")
            model = self._engine_worker.get_model()
            layouts = [Layout(model, self._tp_rank)]
            if self._drafts:
                layouts.append(Layout(self._engine_worker.get_draft_model(), self._tp_rank, "draft "))
            pieces = (piece for layout in layouts for piece in layout.pieces())
            sums = sums_of(pieces, time.monotonic() + _DEADLINE_S)
        except Exception as error:  # also what vLLM's layers raise, and a device without memory
            return Reading(number, cause=str(error) or repr(error))
        alike = frozenset({(self._pp_rank, *sums.alike)})
        return Reading(number, 1, sums.parts, alike, any(layout.by_rank for layout in layouts))


@contained(nothing)
def read_weights(engine_worker: Any) -> Reading | None:
    """Sent to each of vLLM's workers by its own call (`collective_rpc`): what that of our connector there reads.

    Where one raised vLLM's executor would leave the others' answers, and take them for those to its next call, a step.
    """
    from vllm.distributed.kv_transfer import kv_transfer_state

    from vllm_plugin.connector import ours

    for connector in ours(kv_transfer_state._KV_CONNECTOR_AGENT):
        if connector._worker is not None:
            return connector._worker.weights.remember(engine_worker)
    return None
