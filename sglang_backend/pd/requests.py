"""A request's sender on the prefill instance, and its receiver on the decode instance, as SGLang's scheduler asks them.

SGLang polls: `WaitingForInput` means that it may go on (compute, or give blocks), `Transferring` that it has to wait.
It frees a request's pages as soon as a poll says `Failed` or `Success`; so a receiver says so only when nothing can
write to them any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender

from mooncake_connector.log import get_logger, log_once
from sglang_backend.pd import prompts
from sglang_backend.pd.manager import MooncakeConnectorKVManager
from transfer.control.directory import Address
from transfer.protocol.incoming import Incoming, Where
from transfer.protocol.orders import Ended, Ending, Failed
from transfer.protocol.outgoing import Outgoing
from transfer.serving import Computed
from transfer.transports.base import TransferError

_REVOKED_WITHIN_S = 15.0
"""A transport gives memory back within about ten seconds, whatever its peer does."""
_POLL_S = 0.001
_ANSWERED_WITHIN_S = 30.0
"""By a bootstrap server, which may say a byte now and then for ever."""

logger = get_logger(__name__)


def transfer_name(room: int) -> str:
    """What both sides call the transfer of a request."""
    return f"sglang:{room}"


def _is_taken(manager: MooncakeConnectorKVManager, room: int | None) -> bool:
    """Whether another request has the room; SGLang may not have asked since that one ended."""
    if room in manager.request_status:
        manager.collect()
    return room in manager.request_status


class _Party:
    """What a sender and a receiver share.

    SGLang's tables have one entry a room. So a request whose room is in use by another one fails at once, and leaves
    that one's entries alone; and why a request failed is kept with the request until SGLang asks for it.
    """

    kv_mgr: MooncakeConnectorKVManager
    bootstrap_room: int
    conclude_state: int | None
    _owns_bootstrap_room: bool
    _transfer: Outgoing | Incoming | None
    _cause = ""
    _req: Any = None
    """SGLang's request; None where that is not known."""

    def _refuse_room(self) -> None:
        self._owns_bootstrap_room = False
        self.conclude_state = KVPoll.Failed
        self._cause = f"bootstrap_room {self.bootstrap_room} is in use by another request here: it must be new for each"

    def _fail(self, cause: str) -> None:
        self._cause = self._cause or cause
        self._cancel(cause)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)

    def _cancel(self, cause: str) -> None:
        if self._transfer is not None and not self._transfer.is_over:
            self.kv_mgr.node.cancel(self._transfer, cause)

    def _forget(self) -> None:
        """SGLang has its pages back, and takes the room for free: what the transfer says from now on is of nobody."""
        self.kv_mgr.lines.dropped(self._req)
        if self._transfer is not None:
            self.kv_mgr.unwatch(self._transfer)

    def failure_exception(self) -> None:
        if self._cause and self.bootstrap_room not in self.kv_mgr.failure_records:
            self.kv_mgr.record_failure(self.bootstrap_room, self._cause)
        super().failure_exception()  # type: ignore[misc]


class MooncakeConnectorKVSender(_Party, CommonKVSender):
    """Gives a request's KV away. Prefill does not wait for the decode instance: the KV is held for a lease."""

    _transfer: Outgoing
    _transfer_start_time: float | None
    _early_send_wait_event: Any

    def __init__(
        self,
        mgr: MooncakeConnectorKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        is_taken = _is_taken(mgr, bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        self._pages: list[int] = []
        self._is_sent = False
        self._transfer = Outgoing(transfer_name(bootstrap_room), prompt=prompts.current())
        self._req = prompts.current_request()
        if is_taken:
            self._refuse_room()
        elif mgr.check_status(bootstrap_room) != KVPoll.Failed:
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
        """The KV of further pages is there; with the last ones, which may be none, also state and the aux row."""
        if self.conclude_state is not None or self._is_sent:
            return
        if self._transfer_start_time is None:
            self._transfer_start_time = time.perf_counter()
        early, self._early_send_wait_event = self._early_send_wait_event, None
        self._pages.extend(kv_indices.tolist())
        self._record_transfer_indices(kv_indices, state_indices)
        self._is_sent = len(self._pages) >= self.num_kv_indices
        manager = self.kv_mgr
        try:
            tables = manager.memory.tables(self._pages, self.aux_index, state_indices if self._is_sent else None)
        except TransferError as error:
            self._fail(str(error))
            return
        stop = len(self._pages) * manager.memory.page_tokens
        computed = Computed([table.block_ids for table in tables], stop)
        if self._is_sent:
            if manager.aux is not None and self.aux_index is not None:
                manager.aux.take(self.aux_index)
            manager.node.awaited(self._transfer)
            manager.update_status(self.bootstrap_room, KVPoll.Transferring)
        manager.order.then(partial(self._sent, computed, is_last=self._is_sent), manager.until_computed(early))

    def _sent(self, computed: Computed, *, is_last: bool) -> None:
        """The device has computed it."""
        node, memory = self.kv_mgr.node, self.kv_mgr.memory
        for section in memory.kv:
            node.computed(memory.last_layer(section), [(self._transfer, computed)], section)
        if is_last:
            node.finished(self._transfer, computed.stop_token)

    def settled(self, report: Failed | Ended) -> None:
        """Told once, when the decode instance has it all, or will not.

        The room is free from now on: a decode instance that computes a request again asks under its room, maybe before
        SGLang asks here what became of it.
        """
        if self._transfer.ending is Ending.DONE:
            self.kv_mgr.lines.sent(self._transfer, self._req)
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
        else:
            self._fail(self._transfer.cause)
        super()._poll_with_status(self.kv_mgr.check_status)
        self.clear()

    def _poll_with_status(self, check_status: Any) -> int:
        self.kv_mgr.give_way(self.bootstrap_room)
        self.kv_mgr.collect()
        return super()._poll_with_status(check_status)

    def abort(self) -> None:
        """At once: what is still read from the pages by then counts for nothing. SGLang may not ask for it again."""
        if self.conclude_state is None:
            self._cause = "Aborted by AbortReq."
            self.conclude_state = KVPoll.Failed
            self.clear()

    def clear(self) -> None:
        self._cancel("the request ended")
        self._forget()
        if self._owns_bootstrap_room:
            self._owns_bootstrap_room = False
            super().clear()


class MooncakeConnectorKVReceiver(_Party, CommonKVReceiver):
    """Fetches a request's KV."""

    bootstrap_infos: Sequence[Any] = ()
    """SGLang waits for a word from each of these before it takes pages back; here the manager knows."""

    def __init__(
        self, mgr: MooncakeConnectorKVManager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        is_taken = _is_taken(mgr, bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self._transfer: Incoming | None = None
        self._prompt, self._req = prompts.current(), prompts.current_request()
        self._prompt_tokens, self._prefix_tokens = mgr.lines.prompt_tokens(self._req), 0
        self._is_granted = self._is_aborted = False
        self._aux_index: int | None = None
        self._asked: Future[Address] | None = None
        self._answered_until_s = 0.0
        self._unfound = ""
        self._announcing = threading.Lock()
        self._is_ended = False
        if is_taken:
            self._refuse_room()

    def init(self, prefill_dp_rank: int) -> None:
        """Find the directory of the prefill instance, anew for each request: that may have been started again."""
        if self.conclude_state is None:
            self.prefill_dp_rank = prefill_dp_rank
            self._answered_until_s = time.monotonic() + _ANSWERED_WITHIN_S
            find = partial(self._find, prefill_dp_rank)
            self._asked = self.kv_mgr.asking.ask(self.bootstrap_addr, f"{self.bootstrap_addr} {prefill_dp_rank}", find)
            self._asked.add_done_callback(self._announce)

    def _find(self, prefill_dp_rank: int) -> Address:
        row = self._get_bootstrap_info_from_server(prefill_dp_rank, 0, 0, 0)
        try:
            return str(row["rank_ip"]), int(row["rank_port"])
        except (LookupError, TypeError, ValueError):
            said = "nothing" if row is None else repr(row)[:200]
            raise TransferError(
                f"the bootstrap server at {self.bootstrap_addr} does not say where its ranks are, but {said}"
            ) from None

    def _announce(self, asked: Future[Address]) -> None:
        """Once the directory is known, in whichever thread learns it: from now on prefill's lease does not run out.

        SGLang does not poll while it is paused, or while requests that it retracted wait for pages.
        """
        try:
            where = Where(*asked.result(0))
        except Exception as error:
            self._unfound = str(error) or repr(error)
            return
        transfer = Incoming(transfer_name(self.bootstrap_room), prompt=self._prompt, where=where)
        with self._announcing:
            if self._is_ended and time.monotonic() > self._answered_until_s:
                return  # prefill has given up as well
            if not self._is_ended:
                self._transfer = transfer
                self.kv_mgr.watch(transfer, self)
            self.kv_mgr.node.announce(transfer, self.kv_mgr.home)
            if self._is_ended:  # or the prefill instance would hold the KV for a lease
                self.kv_mgr.node.cancel(transfer, self._cause or "the request ended")

    def _cancel(self, cause: str) -> None:
        with self._announcing:
            self._is_ended = True
        super()._cancel(cause)

    def _fail_unfound(self, cause: str) -> None:
        self.kv_mgr.metrics.failed("fetch", "bootstrap")
        self._fail(cause)

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
            return
        self._is_granted, self._prefix_tokens = True, decode_prefix_len or 0
        self.init_time = time.time()
        manager.node.allocated(self._transfer, tables)
        manager.order.then(partial(manager.node.grant, self._transfer, tables))  # what writes to the pages still, has
        self._aux_index = aux_index
        manager.update_status(self.bootstrap_room, KVPoll.Transferring)

    def settled(self, report: Failed | Ended) -> None:
        with self._announcing:
            transfer = self._transfer
        assert transfer is not None
        if transfer.ending is Ending.DONE and not self._is_aborted:
            if self.kv_mgr.aux is not None and self._aux_index is not None:
                self.kv_mgr.aux.give(self._aux_index)
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
        else:
            self._fail(transfer.cause)

    def _fail(self, cause: str) -> None:
        super()._fail(cause)
        if not self._is_aborted:
            self.kv_mgr.forget(self.bootstrap_addr)

    def _poll(self) -> int:
        if self.conclude_state is None:
            if self._asked is not None:
                self._look_for_answer()
            self.kv_mgr.give_way(self.bootstrap_room)
            self.kv_mgr.collect()
        return super()._poll()

    def _look_for_answer(self) -> None:
        with self._announcing:
            is_announced = self._transfer is not None
        if is_announced:
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.WaitingForInput)
        elif self._unfound:
            self._fail_unfound(self._unfound)
        elif time.monotonic() > self._answered_until_s:
            self._fail_unfound(f"the bootstrap server at {self.bootstrap_addr} did not answer")
        else:
            return
        self._asked = None

    def _check_waiting_timeout(self) -> int | None:
        """Never: a transfer has a deadline of its own."""
        return None

    def abort(self) -> None:
        """Pages that SGLang gave come free when the poll says `Failed`, and not before."""
        if self.conclude_state is not None:
            return
        self._is_aborted = True
        is_known = self._asked is not None or self._transfer is not None
        self._cause = self._cause or (
            "Aborted by AbortReq."
            if is_known
            else f"aborted before the bootstrap server at {self.bootstrap_addr} said what its instance is"
        )
        self._cancel(self._cause)
        if not self._is_granted:
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            self.conclude_state = KVPoll.Failed

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Have SGLang hold the pages of a request that failed while they may be written to."""
        self.abort_notified = not self.kv_mgr.is_abort_release_safe(self.bootstrap_room, 0)

    def _clear(self) -> None:
        """SGLang is through with it, maybe because of another rank. It takes the pages back when that is safe, or,
        where a variable of its own forbids that (`SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE`), at once.
        """
        if not self._owns_bootstrap_room:
            return
        self._cancel("the request ended")
        transfer = self._transfer
        if transfer is not None and transfer.ending is Ending.DONE and not self._is_aborted:
            # By now SGLang has restored what it takes from its own caches and the pool as well.
            self.kv_mgr.lines.fetched(transfer, self._req, self._prompt_tokens, self._prefix_tokens)
        if transfer is not None and self._is_granted and not transfer.is_over:
            if self.kv_mgr.enable_deferred_decode_kv_release:
                self.kv_mgr.give_up(self.bootstrap_room, transfer)
            else:
                _wait_for_end(transfer)
        self._forget()
        super()._clear()
        self._owns_bootstrap_room = False


def _wait_for_end(transfer: Incoming) -> None:
    deadline_s = time.monotonic() + _REVOKED_WITHIN_S
    while not transfer.is_over and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    if not transfer.is_over:
        log_once("pd.revoke", "pages of a request are taken back while they may be written to", logger=logger)
