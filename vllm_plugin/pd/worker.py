"""The worker side of PD: tells this rank's node what each step does to transfers, and vLLM what became of them.

A request whose KV is given away is reported once, when vLLM has finished it and nothing reads its blocks; one whose KV
comes from elsewhere is reported once, when nothing writes to its blocks. The transfers themselves are the node's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from mooncake_connector.config.schema import Config
from mooncake_connector.contain import contained, nothing
from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.control.connection import Access
from transfer.control.directory import Address
from transfer.device_order import DeviceOrder
from transfer.plan.granularity import Bounds, Granularity
from transfer.plan.layout import Table
from transfer.protocol.incoming import Incoming
from transfer.protocol.orders import Ending, Failed
from transfer.protocol.outgoing import Outgoing
from transfer.serving import Computed
from transfer.session import Node, NodeOptions
from transfer.transports.base import TransferError
from vllm_plugin.kv_memory import KVMemory
from vllm_plugin.messages import Announcement, Ended, StepMetadata, Timing
from vllm_plugin.pd.sections import RankSections
from vllm_plugin.stats import ConnectorStats

logger = get_logger(__name__)
_T = TypeVar("_T")


def open_worker(memory: KVMemory, config: Config, access: Access, stats: ConnectorStats) -> PDWorker | None:
    """Set transfers up over KV memory that was registered; None, and one line that says why, where they cannot be."""
    device = memory.device
    assert device is not None
    if device.type not in ("cpu", "cuda"):
        logger.warning("KV transfers are off: no transport can move KV blocks in %s memory", device.type)
        return None
    options = NodeOptions.configured(config)
    if memory.sleeps:  # what is behind its addresses changes, and a card would go on with what was
        options = replace(options, rdma=replace(options.rdma, no_gpudirect="vLLM's sleep mode is on"))
    try:
        sections = RankSections(memory)
        node = Node(sections.layout, memory.storages, access, options, device.index)
    except (TransferError, ValueError, OSError) as error:
        logger.error("KV transfers are off: %s", error)
        return None
    device_order = DeviceOrder(memory.record)
    return PDWorker(
        node, sections, options.bounds, device_order, stats,
        logs_requests=config.log_requests, is_first_rank=memory.is_first_rank,
    )  # fmt: skip


class PDWorker:
    """See the module; `stats` takes what is counted.

    Args:
        sections: what this rank hands over.
        device: makes calls when the device has done what was queued before them.
        logs_requests: whether the scheduler's process wants to know what transfers took.
        is_first_rank: of the instance: it counts tokens, of which each rank fetches a part.
    """

    def __init__(
        self,
        node: Node,
        sections: RankSections,
        bounds: Bounds,
        device: DeviceOrder,
        stats: ConnectorStats,
        *,
        logs_requests: bool,
        is_first_rank: bool,
    ) -> None:
        self._node, self._sections, self._bounds = node, sections, bounds
        self._logs_requests, self._is_first_rank = logs_requests, is_first_rank
        self._device, self._stats = device, stats
        self._transfers: dict[str, Outgoing | Incoming] = {}
        """Whose end vLLM waits for, by request. The id of one that ended early may be another's by then."""
        self._is_stopped = False
        self._progress: list[tuple[Outgoing, Computed]] = []
        self._progress_by_layer: list[tuple[Outgoing, Computed]] = []

    @property
    def card(self) -> bytes | None:
        """What the instance's directory says of this rank; None once it is stopped."""
        return None if self._is_stopped else msgspec.msgpack.encode(self._node.card)

    # Steps

    def before_step(self, metadata: StepMetadata) -> None:
        """Before the forward pass, and before vLLM gives any block to another request."""
        step = metadata.pd
        self._progress, self._progress_by_layer = [], []
        for req_id in step.preempted:
            self._preempted(req_id)
        for req_id, name in step.opened.items():
            self._opened(req_id, name)
        for req_id, (computed, prompt_tokens) in step.computed.items():
            transfer = self._transfers.get(req_id)
            if isinstance(transfer, Outgoing):
                computed = replace(computed, block_tables=self._here(computed.block_tables))
                self._progress.append((transfer, computed))
                if self._bounds.choose(prompt_tokens) is Granularity.LAYER:
                    self._progress_by_layer.append((transfer, computed))

    def layer_computed(self, name: str) -> None:
        """The forward pass has written a layer of this step's tokens."""
        if self._progress_by_layer and name in self._sections.layers:
            section, layer = self._sections.layers[name]
            self._computed(section, layer, self._progress_by_layer)

    def step_computed(self, metadata: StepMetadata) -> None:
        """The forward pass is over."""
        if self._progress:
            for section, layer in self._sections.last_layers:
                self._computed(section, layer, self._progress)
            self._progress, self._progress_by_layer = [], []

    def start(self, metadata: StepMetadata) -> None:
        """What does not have to be said before the forward pass."""
        step = metadata.pd
        for req_id, num_tokens in step.finished.items():
            self._finished(req_id, num_tokens)
        for req_id, announced in step.announced.items():
            self._announced(req_id, announced, step.home)
        for req_id, tables in step.granted.items():
            self._granted(req_id, tables)
        for req_id, cause in step.cancelled.items():
            self._cancelled(req_id, cause, reported=req_id not in step.unreported)

    # Requests: what fails for one of them costs no other its transfer

    @contained(nothing)
    def _preempted(self, req_id: str) -> None:
        self._node.preempted(self._outgoing(req_id))

    @contained(nothing)
    def _opened(self, req_id: str, name: str) -> None:
        transfer = self._transfers[req_id] = Outgoing(name, req_id)
        self._node.open(transfer)

    def _computed(self, section: int, layer: int, progress: list[tuple[Outgoing, Computed]]) -> None:
        self._device.then(lambda: self._node.computed(layer, progress, section))

    @contained(nothing)
    def _finished(self, req_id: str, num_tokens: int) -> None:
        """After all that was computed; vLLM waits from now on, whatever the device does."""
        transfer = self._outgoing(req_id)
        self._node.awaited(transfer)
        self._device.then(lambda: self._node.finished(transfer, num_tokens))

    @contained(nothing)
    def _announced(self, req_id: str, announced: Announcement, home: Address) -> None:
        transfer = Incoming(announced.transfer, req_id, where=announced.where, computed=announced.computed)
        self._transfers[req_id] = transfer
        self._node.announce(transfer, home)

    @contained(nothing)
    def _granted(self, req_id: str, tables: Sequence[Table]) -> None:
        """After what a former owner of the blocks still computes into them; vLLM waits from now on."""
        transfer = self._transfers[req_id]
        assert isinstance(transfer, Incoming)
        own = self._here(tables)
        self._node.allocated(transfer, own)
        self._device.then(lambda: self._node.grant(transfer, own))

    @contained(nothing)
    def _cancelled(self, req_id: str, cause: str, *, reported: bool) -> None:
        transfer = self._transfers.get(req_id)
        if transfer is None:  # its end and the engine's word of it passed each other
            return
        if not reported:
            del self._transfers[req_id]
        self._node.cancel(transfer, cause)

    def _here(self, tables: Sequence[_T]) -> list[_T]:
        """Of what there is for each group that of this rank's sections."""
        return [tables[position] for position in self._sections.positions]

    def _outgoing(self, req_id: str) -> Outgoing:
        transfer = self._transfers[req_id]
        assert isinstance(transfer, Outgoing)
        return transfer

    # What became of them

    def take_ended(self, ended: Ended) -> None:
        """Enter transfers that ended since the last call, and announced ones of which nothing will come."""
        self._stats.count_each(self._node.take_counts())
        for report in self._node.take_ended():
            transfer = report.transfer
            if not isinstance(report, Failed):
                self._end(transfer, ended)
            elif self._transfers.get(transfer.request) is transfer:
                ended.report.failed_transfers.add(transfer.request)

    def fills(self, req_id: str) -> bool:
        """Whether blocks of a request may still be written to by a transfer."""
        return isinstance(self._transfers.get(req_id), Incoming)

    @contained(nothing)
    def _end(self, transfer: Outgoing | Incoming, ended: Ended) -> None:
        _count(self._stats, transfer)
        if self._transfers.get(transfer.request) is not transfer:
            return
        del self._transfers[transfer.request]
        if self._logs_requests:
            ended.report.took(transfer.request, _timing(transfer))
        if isinstance(transfer, Outgoing):
            ended.sent.add(transfer.request)
            return
        ended.arrived.add(transfer.request)
        if transfer.ending is Ending.DONE:
            if self._is_first_rank:
                self._stats.add("fetched_tokens", _fetched_tokens(transfer))
        elif transfer.ending is not Ending.CANCELLED and transfer.tables:
            self._failed(transfer, ended)

    def _failed(self, transfer: Incoming, ended: Ended) -> None:
        """Of a model with several groups vLLM takes whole requests only."""
        if self._sections.is_hybrid:
            ended.refused.add(transfer.request)
            return
        (section,), (table,) = self._sections.layout.sections, transfer.tables
        ended.failed_blocks.update(section.holding(table.block_ids, table.first_token, table.stop_token))

    def stop(self, cause: str) -> None:
        """End every transfer, and each that begins later; when this returns, the node touches no memory any more."""
        self._is_stopped = True
        self._device.close()
        self._node.close(cause)
        self._progress, self._progress_by_layer = [], []

    def take_over(self, former: PDWorker) -> None:
        """Report to vLLM what became of the requests of one that was stopped."""
        self._transfers = former._transfers
        self._node.take_over(former._node)


def _fetched_tokens(transfer: Incoming) -> int:
    return max((len(table.tokens) for table in transfer.tables), default=0)


def _timing(transfer: Outgoing | Incoming) -> Timing:
    fetched = 0
    if isinstance(transfer, Incoming) and transfer.ending is Ending.DONE:
        fetched = _fetched_tokens(transfer)
    return Timing(transfer_s=transfer.seconds, transport=transfer.transport, fetched_tokens=fetched)


@contained(nothing)
def _count(stats: ConnectorStats, transfer: Outgoing | Incoming) -> None:
    kind, plural = ("send", "sends") if isinstance(transfer, Outgoing) else ("fetch", "fetches")
    stats.add(plural)
    stats.add(f"{kind}_seconds", transfer.seconds)
    stats.add(f"{kind}_bytes", transfer.nbytes)
    if kind == "fetch":
        stats.took("fetch_duration_seconds", transfer.seconds)
    if transfer.transport:
        stats.travelled(transfer.transport, transfer.nbytes)
    if transfer.ending in (Ending.FAILED, Ending.EXPIRED):
        stats.fail(f"{kind}_{transfer.ending.value}")
        said = "a transfer failed after %.3f s: %s (logged once per cause, counted in the metrics)"
        log_once(f"pd.{kind}:{kind_of(transfer.cause)}", said, transfer.seconds, transfer.cause, logger=logger)
