"""The worker half of an instance whose KV only the worker knows to be unusable.

The scheduler sees a simplified description of the KV cache (one spec a group where the worker has one a layer), so it
may plan loads and saves all the same. Each of them ends here at once, as failed: a load that nobody answers would keep
its request waiting for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from vllm_plugin.messages import SaveResult, StepMetadata, WorkerReport

if TYPE_CHECKING:
    import torch

    from vllm_plugin.stats import ConnectorStats


class RefusingHalf:
    """Same methods as :class:`vllm_plugin.prefix.worker.WorkerHalf`."""

    def __init__(self) -> None:
        self.pd = None
        self._refused: set[str] = set()
        self._report = WorkerReport()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """They are not touched."""

    def before_step(self, metadata: StepMetadata) -> None:
        """No save reads a block."""

    def unregister(self) -> None:
        """They never were."""

    def restore(self) -> None:
        """See above."""

    def start_loads(self, metadata: StepMetadata) -> None:
        self._refused |= {job.req_id for job in metadata.loads}
        self._report.failed_loads |= self._refused

    def start_saves(self, metadata: StepMetadata) -> None:
        self._report.saves.update({job.job_id: SaveResult(1, 0) for job in metadata.saves})

    def transfer_results(self) -> KVConnectorTransferResults:
        refused, self._refused = self._refused, set()
        return KVConnectorTransferResults(finished_recving=refused, failed_recving=set(refused))

    def take_failed_blocks(self) -> set[int]:
        return set()

    def take_report(self) -> WorkerReport | None:
        if self._report.is_empty:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def take_stats(self) -> ConnectorStats | None:
        return None

    def close(self) -> None:
        """Nothing was opened."""
