"""The worker half of PD: this rank's node, told of every step, and what became of its transfers for vLLM.

A request that is given away is reported once, when vLLM has finished it and nothing reads its blocks; one that comes
from elsewhere is reported once, when nothing writes to its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from mooncake_connector.contain import contained, nothing
from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.driver import Ended
from transfer.fetching import Family
from transfer.plan.granularity import Bounds, Granularity
from transfer.plan.layout import RankLayout
from transfer.protocol.orders import Ending
from transfer.session import Node
from vllm_plugin.device_order import DeviceOrder
from vllm_plugin.messages import Announcement, FetchJob, PDStep
from vllm_plugin.stats import ConnectorStats

logger = get_logger(__name__)


@dataclass(slots=True)
class _Given:
    """A request that is given away."""

    transfer: str
    attempt: int = 0
    """Raised when what was computed so far does not count any more."""
    over: bool = False
    ended: bool = False
    """Whether its transfer is; the name may be another request's by now."""
    reported: bool = True
    """Whether vLLM waits for its end."""


@dataclass(slots=True)
class _Awaited:
    """A request that comes from elsewhere."""

    transfer: str
    job: FetchJob | None = None
    dropped: bool = False
    ended: Ended | None = None


@dataclass(slots=True)
class Results:
    """What ended since the last step, by request; `failed_blocks` hold nothing that may be read."""

    sent: set[str] = field(default_factory=set)
    fetched: set[str] = field(default_factory=set)
    unfetched: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


class PDWorker:
    """See the module.

    Args:
        rank: number of this rank in its instance, `pp_rank * tp_size + tp_rank`.
        layers: names of this rank's layers, in order.
        device: makes calls when the device has done what was queued before them.
    """

    def __init__(
        self, node: Node, layout: RankLayout, rank: int, layers: Sequence[str], bounds: Bounds, device: DeviceOrder
    ) -> None:
        self._node, self._layout, self._rank, self._bounds = node, layout, rank, bounds
        self._device = device
        self._layers = {name: layout.shard.layer_start + number for number, name in enumerate(layers)}
        self._given: dict[str, _Given] = {}
        self._awaited: dict[str, _Awaited] = {}
        self._givers: dict[str, _Given] = {}
        self._takers: dict[str, _Awaited] = {}
        """By transfer, of either kind: one instance may be both ends of one. The id of a request that ended early may
        be another's before its transfer is over."""
        self._stops: list[tuple[_Given, int]] = []
        self._stops_by_layer: list[tuple[_Given, int]] = []

    @property
    def card(self) -> bytes:
        """What the instance's directory says of this rank."""
        return msgspec.msgpack.encode(self._node.card)

    # Steps

    def prepare(self, step: PDStep) -> None:
        """Before the forward pass, and before vLLM gives any block to another request."""
        for req_id in step.preempted:
            self._preempted(req_id)
        for req_id, transfer in step.opened.items():
            self._open(req_id, transfer)
        progress = [
            (given, made)
            for req_id, made in step.progress.items()
            if (given := self._given.get(req_id)) is not None and not given.ended
        ]
        if progress:
            self._node.blocks({given.transfer: made.block_ids for given, made in progress})
        self._stops = [(given, made.stop_token) for given, made in progress]
        self._stops_by_layer = [
            (given, made.stop_token)
            for given, made in progress
            if self._bounds.choose(made.prompt_tokens) is Granularity.LAYER
        ]

    def layer_computed(self, name: str) -> None:
        """The forward pass has written a layer of this step's tokens."""
        if self._stops_by_layer and name in self._layers:
            self._computed(self._layers[name], self._stops_by_layer)

    def step_computed(self) -> None:
        """The forward pass is over."""
        if self._stops:
            self._computed(self._layout.shard.layer_stop - 1, self._stops)
            self._stops, self._stops_by_layer = [], []

    def start(self, step: PDStep) -> None:
        """What does not have to be said before the forward pass."""
        for req_id, num_tokens in step.finished.items():
            self._finished(req_id, num_tokens)
        for req_id, cause in step.cancelled.items():
            self._cancelled(req_id, cause, reported=req_id not in step.unreported)
        for req_id, wanted in step.announced.items():
            self._announced(req_id, wanted, Family(step.ranks, self._rank))
        for req_id, job in step.fetched.items():
            self._granted(req_id, job)
        for req_id, cause in step.dropped.items():
            self._dropped(req_id, cause)

    # Requests: what fails for one of them costs no other its transfer

    @contained(nothing)
    def _preempted(self, req_id: str) -> None:
        given = self._given[req_id]
        with self._device.lock:
            given.attempt += 1
        if not given.ended:
            self._node.preempted(given.transfer)

    @contained(nothing)
    def _open(self, req_id: str, transfer: str) -> None:
        given = self._given[req_id] = _Given(transfer)
        if transfer in self._givers:  # of a request that ended early, and is not over here
            given.ended = True
            return
        self._givers[transfer] = given
        self._node.open(transfer)

    def _computed(self, layer: int, stops: Sequence[tuple[_Given, int]]) -> None:
        told = [(given, given.attempt, stop_token) for given, stop_token in stops]

        def tell() -> None:
            current = {
                given.transfer: stop_token
                for given, attempt, stop_token in told
                if given.attempt == attempt and not given.ended
            }
            if current:
                self._node.computed(layer, current)

        self._device.then(tell)

    @contained(nothing)
    def _finished(self, req_id: str, num_tokens: int) -> None:
        """After all that was computed."""
        given = self._given[req_id]
        given.over, attempt = True, given.attempt

        def tell() -> None:
            if given.attempt == attempt and not given.ended:
                self._node.finished(given.transfer, num_tokens)

        self._device.then(tell)

    @contained(nothing)
    def _cancelled(self, req_id: str, cause: str, *, reported: bool) -> None:
        given = self._given.get(req_id)
        if given is None:  # its end and the engine's word of it passed each other
            return
        given.over, given.reported = True, reported
        with self._device.lock:
            given.attempt += 1
        if not given.ended:
            self._node.cancel(given.transfer, cause)

    @contained(nothing)
    def _announced(self, req_id: str, wanted: Announcement, family: Family) -> None:
        awaited = self._awaited[req_id] = _Awaited(wanted.transfer)
        if wanted.transfer in self._takers:  # of a request that was aborted, and is not over here
            awaited.ended = Ended(wanted.transfer, Ending.FAILED, "the transfer is not over")
            return
        self._takers[wanted.transfer] = awaited
        self._node.announce(wanted.transfer, wanted.where, family, computed=wanted.computed)

    @contained(nothing)
    def _granted(self, req_id: str, job: FetchJob) -> None:
        """After what a former owner of the blocks still computes into them."""
        awaited = self._awaited[req_id]
        awaited.job = job  # told or not: whatever ended before counts as failed
        if awaited.ended is not None:
            return

        def tell() -> None:
            if awaited.ended is None:  # else the name may belong to another request by now
                self._node.grant(awaited.transfer, job.first_token, job.stop_token, job.block_ids)

        self._device.then(tell)

    @contained(nothing)
    def _dropped(self, req_id: str, cause: str) -> None:
        awaited = self._awaited.get(req_id)
        if awaited is None:  # its end and the engine's word of it passed each other
            return
        awaited.dropped = True
        if awaited.ended is None:  # else the name may belong to another request by now
            self._node.drop(awaited.transfer, cause)

    # Results

    def take_results(self, stats: ConnectorStats) -> Results:
        """What ended since the last call."""
        for ended in self._node.take_sent():
            given = self._givers.pop(ended.transfer, None)
            if given is not None:  # otherwise it was said before
                with self._device.lock:
                    given.ended = True
                _count(stats, "send", ended)
        for ended in self._node.take_fetched():
            awaited = self._takers.pop(ended.transfer, None)
            if awaited is not None:
                with self._device.lock:
                    awaited.ended = ended
                _count(stats, "fetch", ended)
        results = Results()
        for req_id, given in list(self._given.items()):
            if given.over and given.ended:
                del self._given[req_id]
                if given.reported:
                    results.sent.add(req_id)
        for req_id, awaited in list(self._awaited.items()):
            if awaited.ended is not None:
                self._conclude(req_id, awaited, awaited.ended, results, stats)
        return results

    def fetching(self, req_id: str) -> bool:
        """Whether blocks of a request may still be written to by a transfer."""
        awaited = self._awaited.get(req_id)
        return awaited is not None and awaited.job is not None

    @contained(nothing)
    def _conclude(self, req_id: str, awaited: _Awaited, ended: Ended, results: Results, stats: ConnectorStats) -> None:
        job = awaited.job
        if job is None:
            if awaited.dropped:
                del self._awaited[req_id]
            else:
                results.unfetched.add(req_id)  # until the scheduler drops it, or has given it blocks meanwhile
            return
        if ended.ending is Ending.DONE:
            stats.add("fetched_tokens", job.stop_token - job.first_token)
        elif not awaited.dropped:
            results.failed_blocks.update(self._layout.holding(job.block_ids, job.first_token, job.stop_token))
        del self._awaited[req_id]
        results.fetched.add(req_id)

    def stop(self, cause: str) -> None:
        """End every transfer; when this returns, the node touches no memory any more."""
        self.close()
        for given in self._given.values():
            given.ended = True
        for awaited in self._awaited.values():
            awaited.ended = awaited.ended or Ended(awaited.transfer, Ending.FAILED, cause)
        self._givers, self._takers, self._stops, self._stops_by_layer = {}, {}, [], []

    def take_over(self, former: PDWorker) -> None:
        """Report to vLLM what became of the requests of one that was stopped."""
        self._given, self._awaited = former._given, former._awaited

    def close(self) -> None:
        self._device.close()
        self._node.close()


@contained(nothing)
def _count(stats: ConnectorStats, kind: str, ended: Ended) -> None:
    stats.add(f"{kind}s" if kind == "send" else f"{kind}es")
    stats.add(f"{kind}_seconds", ended.seconds)
    stats.add(f"{kind}_bytes", ended.nbytes)
    if ended.transport:
        stats.travelled(ended.transport, ended.nbytes)
    if ended.ending in (Ending.FAILED, Ending.EXPIRED):
        stats.fail(f"{kind}_{ended.ending.value}")
        log_once(
            f"pd.{kind}:{kind_of(ended.cause)}",
            "a transfer failed after %.3f s: %s (logged once per cause, counted in the metrics)",
            ended.seconds,
            ended.cause,
            logger=logger,
        )
