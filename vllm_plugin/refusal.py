"""The worker of an instance whose KV only the worker knows to be unusable, in place of `prefix.worker`.

The scheduler sees a simplified description of the KV cache (one spec a group where the worker has one a layer), so it
may plan loads and saves all the same. Each of them ends here at once, as failed: a load that nobody answers would keep
its request waiting for ever.
"""

from __future__ import annotations

from vllm_plugin.messages import Ended, SaveResult, StepMetadata


class RefusingWorker:
    """What a step asks of :class:`vllm_plugin.prefix.worker.PrefixWorker`."""

    def __init__(self) -> None:
        self._loads: set[str] = set()
        self._saves: dict[int, SaveResult] = {}

    def before_step(self, metadata: StepMetadata) -> None:
        """No save reads a block."""

    def start(self, metadata: StepMetadata) -> None:
        self._loads.update(job.req_id for job in metadata.loads)

    def step_computed(self, metadata: StepMetadata) -> None:
        self._saves.update({job.job_id: SaveResult(1, 0) for job in metadata.saves})

    def take_ended(self, ended: Ended) -> None:
        for refused in (ended.arrived, ended.refused, ended.report.failed_loads):
            refused |= self._loads
        ended.report.saves.update(self._saves)
        self._loads, self._saves = set(), {}

    def fills(self, req_id: str) -> bool:
        return False

    def stop(self, cause: str) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing was opened."""
