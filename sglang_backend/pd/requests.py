"""A request's sender on the prefill instance, and its receiver on the decode instance, as SGLang's scheduler asks them.

SGLang polls: `WaitingForInput` means that it may go on (compute, or give blocks), `Transferring` that it has to wait.
It frees a request's pages as soon as a poll says `Failed` or `Success`; so a receiver says so only when nothing can
write to them any more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender

from mooncake_connector.log import get_logger, log_once
from sglang_backend.pd.manager import MooncakeConnectorKVManager
from transfer.control.directory import Address
from transfer.protocol.consumer import Incoming, Where
from transfer.protocol.orders import Ended, Ending, Failed
from transfer.protocol.producer import Outgoing
from transfer.serving import Computed
from transfer.transports.base import TransferError

_REVOKED_WITHIN_S = 15.0
"""A transport gives memory back within about ten seconds, whatever its peer does."""
_POLL_S = 0.001

logger = get_logger(__name__)


def transfer_name(room: int) -> str:
    """What both sides call the transfer of a request."""
    return f"sglang:{room}"


class MooncakeConnectorKVSender(CommonKVSender):
    """Gives a request's KV away. Prefill does not wait for the decode instance: the KV is held for a lease."""

    kv_mgr: MooncakeConnectorKVManager
    conclude_state: int | None
    _transfer_start_time: float | None

    def __init__(
        self,
        mgr: MooncakeConnectorKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        self._pages: list[int] = []
        self._transfer = Outgoing(transfer_name(bootstrap_room))
        if mgr.check_status(bootstrap_room) != KVPoll.Failed:
            mgr.watch(self._transfer, self)
            mgr.node.open(self._transfer)
            mgr.update_status(bootstrap_room, KVPoll.WaitingForInput)

    def send(
        self,
        kv_indices: Any,
        state_indices: Sequence[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: object | None = None,
    ) -> None:
        """The KV of further pages is there; with the last ones also state and the aux row."""
        if self.conclude_state is not None:
            return
        if self._transfer_start_time is None:
            self._transfer_start_time = time.perf_counter()
        self._pages.extend(kv_indices.tolist())
        self._record_transfer_indices(kv_indices, state_indices)
        is_last = len(self._pages) == self.num_kv_indices
        manager = self.kv_mgr
        try:
            tables = manager.memory.tables(self._pages, self.aux_index, state_indices if is_last else None)
        except TransferError as error:
            self._fail(str(error))
            return
        stop = len(self._pages) * manager.memory.page_tokens
        computed = Computed([table.block_ids for table in tables], stop)
        for section in manager.memory.kv:
            manager.node.computed(manager.memory.last_layer(section), [(self._transfer, computed)], section)
        if is_last:
            manager.node.awaited(self._transfer)
            manager.node.finished(self._transfer, stop)
            manager.update_status(self.bootstrap_room, KVPoll.Transferring)

    def settled(self, report: Failed | Ended) -> None:
        """Told once, when the decode instance has it all, or will not."""
        if self._transfer.ending is Ending.DONE:
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
        else:
            self._fail(self._transfer.cause)

    def _fail(self, cause: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, cause)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)

    def _poll_with_status(self, check_status: Any) -> int:
        self.kv_mgr.collect()
        return super()._poll_with_status(check_status)

    def abort(self) -> None:
        """At once: what is still read from the pages by then counts for nothing."""
        super().abort()
        self._cancel("aborted")

    def clear(self) -> None:
        self._cancel("the request ended")
        super().clear()

    def _cancel(self, cause: str) -> None:
        if not self._transfer.is_over:
            self.kv_mgr.node.cancel(self._transfer, cause)


class MooncakeConnectorKVReceiver(CommonKVReceiver):
    """Fetches a request's KV."""

    kv_mgr: MooncakeConnectorKVManager
    conclude_state: int | None

    def __init__(
        self, mgr: MooncakeConnectorKVManager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self._transfer: Incoming | None = None
        self._is_granted = False
        self._asked: Future[Address] | None = None

    def init(self, prefill_dp_rank: int) -> None:
        """Find the directory of the prefill instance, anew for each request: that may have been started again."""
        if self.conclude_state is None:
            self.prefill_dp_rank = prefill_dp_rank
            self._asked = self.kv_mgr.ask(partial(self._find, prefill_dp_rank))

    def _find(self, prefill_dp_rank: int) -> Address:
        row = self._get_bootstrap_info_from_server(prefill_dp_rank, 0, 0, 0)
        if row is None:
            raise TransferError(f"the bootstrap server at {self.bootstrap_addr} does not say where its ranks are")
        return str(row["rank_ip"]), int(row["rank_port"])

    def _announce(self) -> None:
        """Once the directory is known: from now on prefill's lease does not run out."""
        assert self._asked is not None
        asked, self._asked = self._asked, None
        try:
            where = Where(*asked.result(0))
        except Exception as error:
            self._fail(str(error) or repr(error))
            return
        self._transfer = Incoming(transfer_name(self.bootstrap_room), where=where)
        self.kv_mgr.watch(self._transfer, self)
        self.kv_mgr.node.announce(self._transfer, self.kv_mgr.home)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.WaitingForInput)

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """SGLang has pages for it."""
        if self.conclude_state is not None or self._transfer is None:
            return
        manager = self.kv_mgr
        try:
            if destination != KVTransferDestination.DEVICE or device_kv_indices is not None:
                raise TransferError("KV is received into the pages of the KV pool only")
            pages = kv_indices.tolist()
            tables = manager.memory.tables(pages, aux_index, state_indices, decode_prefix_len or 0)
        except TransferError as error:
            self._fail(str(error))
            manager.node.cancel(self._transfer, str(error))
            return
        self._is_granted = True
        self.init_time = time.time()
        manager.node.allocated(self._transfer, tables)
        manager.node.grant(self._transfer, tables)
        manager.update_status(self.bootstrap_room, KVPoll.Transferring)

    def settled(self, report: Failed | Ended) -> None:
        assert self._transfer is not None
        if isinstance(report, Failed):
            self.kv_mgr.node.cancel(self._transfer, self._transfer.cause)
        if self._transfer.ending is Ending.DONE:
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
        else:
            self._fail(self._transfer.cause)

    def _fail(self, cause: str) -> None:
        if self.bootstrap_room not in self.kv_mgr.failure_records:
            self.kv_mgr.record_failure(self.bootstrap_room, cause)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.kv_mgr.forget(self.bootstrap_addr)

    def _poll(self) -> int:
        if self.conclude_state is None:
            if self._asked is not None and self._asked.done():
                self._announce()
            self.kv_mgr.collect()
        return super()._poll()

    def _check_waiting_timeout(self) -> int | None:
        """Never: a transfer has a deadline of its own."""
        return None

    def abort(self) -> None:
        """Pages that SGLang gave come free when the poll says `Failed`, and not before."""
        if self.conclude_state is not None:
            return
        cause = self.kv_mgr.refused.get(self.bootstrap_addr, "Aborted by AbortReq.")
        self.kv_mgr.record_failure(self.bootstrap_room, cause)
        if self._transfer is not None:
            self.kv_mgr.node.cancel(self._transfer, cause)
        if not self._is_granted:
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            self.conclude_state = KVPoll.Failed

    def _clear(self) -> None:
        """SGLang takes the pages back, also where only another rank has failed."""
        transfer = self._transfer
        if transfer is not None and not transfer.is_over:
            self.kv_mgr.node.cancel(transfer, "the request ended")
            deadline_s = time.monotonic() + _REVOKED_WITHIN_S
            while self._is_granted and not transfer.is_over and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
            if self._is_granted and not transfer.is_over:
                log_once("pd.revoke", "pages of a request are taken back while they may be written to", logger=logger)
        super()._clear()
