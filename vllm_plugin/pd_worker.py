"""The worker half of PD: this rank's node, told of every step, and what became of its transfers for vLLM.

A request that is given away is reported once, when vLLM has finished it and nothing reads its blocks; one that comes
from elsewhere is reported once, when nothing writes to its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.fetching import Family
from transfer.granularity import Bounds, Granularity
from transfer.layout import RankLayout
from transfer.node import Node
from transfer.protocol import Ending
from transfer.shell import Ended
from vllm_plugin.messages import FetchJob, PDStep
from vllm_plugin.stats import ConnectorStats

logger = get_logger(__name__)


@dataclass(slots=True)
class _Given:
    """A request that is given away."""

    transfer: str
    over: bool = False
    ended: bool = False
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
    """

    def __init__(self, node: Node, layout: RankLayout, rank: int, layers: Sequence[str], bounds: Bounds) -> None:
        self._node, self._layout, self._rank, self._bounds = node, layout, rank, bounds
        self._layers = {name: layout.first_layer + number for number, name in enumerate(layers)}
        self._given: dict[str, _Given] = {}
        self._awaited: dict[str, _Awaited] = {}
        self._givers: dict[str, str] = {}
        self._takers: dict[str, str] = {}
        """Name of a transfer -> request, of either kind: one instance may be both ends of a transfer."""
        self._stops: dict[str, int] = {}
        self._stops_by_layer: dict[str, int] = {}

    @property
    def card(self) -> bytes:
        """What the instance's directory says of this rank."""
        return msgspec.msgpack.encode(self._node.card)

    # Steps

    def prepare(self, step: PDStep) -> None:
        """Before the forward pass, and before vLLM gives any block to another request."""
        for req_id in step.preempted:
            self._node.preempted(self._given[req_id].transfer)
        for req_id, transfer in step.opened.items():
            given = self._given[req_id] = _Given(transfer)
            if transfer in self._givers:  # of a request that ended early, and is not over here
                given.ended = True
                continue
            self._givers[transfer] = req_id
            self._node.open(transfer)
        progress = {self._given[req_id].transfer: made for req_id, made in step.progress.items()}
        if progress:
            self._node.blocks({transfer: made.block_ids for transfer, made in progress.items()})
        self._stops = {transfer: made.stop_token for transfer, made in progress.items()}
        self._stops_by_layer = {
            transfer: made.stop_token
            for transfer, made in progress.items()
            if self._bounds.choose(made.prompt_tokens) is Granularity.LAYER
        }

    def layer_computed(self, name: str) -> None:
        """The forward pass has written a layer of this step's tokens."""
        if self._stops_by_layer and name in self._layers:
            self._node.computed(self._layers[name], self._stops_by_layer)

    def step_computed(self) -> None:
        """The forward pass is over."""
        if self._stops:
            self._node.computed(self._layout.layer_stop - 1, self._stops)
            self._stops, self._stops_by_layer = {}, {}

    def start(self, step: PDStep) -> None:
        """What does not have to be said before the forward pass."""
        for req_id, num_tokens in step.finished.items():
            self._given[req_id].over = True
            self._node.finished(self._given[req_id].transfer, num_tokens)
        for req_id, cause in step.cancelled.items():
            self._given[req_id].over = True
            self._given[req_id].reported = req_id not in step.unreported
            self._node.cancel(self._given[req_id].transfer, cause)
        for req_id, wanted in step.announced.items():
            awaited = self._awaited[req_id] = _Awaited(wanted.transfer)
            if wanted.transfer in self._takers:  # of a request that was aborted, and is not over here
                awaited.ended = Ended(wanted.transfer, Ending.FAILED, "the transfer is not over")
                continue
            self._takers[wanted.transfer] = req_id
            family = Family(step.ranks, self._rank)
            self._node.announce(wanted.transfer, wanted.where, family, computed=wanted.computed)
        for req_id, job in step.fetched.items():
            awaited = self._awaited[req_id]
            awaited.job = job  # told or not: whatever ended before counts as failed
            if awaited.ended is None:
                self._node.grant(awaited.transfer, job.first_token, job.stop_token, job.block_ids)
        for req_id, cause in step.dropped.items():
            dropped = self._awaited.get(req_id)
            if dropped is not None:  # otherwise its end and the engine's word of it passed each other
                dropped.dropped = True
                self._node.drop(dropped.transfer, cause)

    # Results

    def take_results(self, stats: ConnectorStats) -> Results:
        """What ended since the last call."""
        for ended in self._node.take_sent():
            req_id = self._givers.pop(ended.transfer, None)
            if req_id is not None:  # otherwise it was said before, and an error here would lose what else ended
                self._given[req_id].ended = True
                _count(stats, "send", ended)
        for ended in self._node.take_fetched():
            req_id = self._takers.pop(ended.transfer, None)
            if req_id is not None:
                self._awaited[req_id].ended = ended
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

    def _conclude(self, req_id: str, awaited: _Awaited, ended: Ended, results: Results, stats: ConnectorStats) -> None:
        job = awaited.job
        if job is None:
            if awaited.dropped:
                del self._awaited[req_id]
            else:
                results.unfetched.add(req_id)  # until the scheduler drops it, or has given it blocks meanwhile
            return
        del self._awaited[req_id]
        results.fetched.add(req_id)
        if ended.ending is Ending.DONE:
            stats.add("fetched_tokens", job.stop_token - job.first_token)
        elif not awaited.dropped:
            results.failed_blocks.update(self._layout.holding(job.block_ids, job.first_token, job.stop_token))

    def close(self) -> None:
        self._node.close()


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
            "a transfer ended after %.3f s: %s; its tokens are computed where they are wanted (said once, see metrics)",
            ended.seconds,
            ended.cause,
            logger=logger,
        )
