"""What the parts of the connector say to each other, once a step.

Plain data. vLLM carries these objects between its own processes; nothing here is read from a socket of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from mooncake_connector.kv.namespace import Namespace
from transfer.control.directory import Address
from transfer.plan.layout import Table
from transfer.protocol.incoming import Where
from transfer.serving import Computed
from vllm_plugin.weights.reading import Reading


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill the blocks of one request and group of layers with pages from the pool.

    A request is loaded when all its jobs have ended, and if one failed, none of them counts.

    Args:
        keys: page keys, consecutive in the chain.
        first_token: the request's token where the first page begins (a multiple of page_tokens).
        skip_tokens: tokens of the first page that are not to be written: a local prefix-cache hit holds them in blocks
            that are shared, or they lie before the window, where a block table has vLLM's null block.
        block_ids: the request's whole block table of this group.
        num_coming: pages, the last ones, that are on their way to the pool yet.
        group: position among the groups of `Geometry`.
    """

    req_id: str
    keys: list[bytes]
    first_token: int
    skip_tokens: int
    block_ids: list[int]
    num_coming: int = 0
    group: int = 0


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Store full pages of one request and group of layers, as far as their blocks are copied before they are others'.

    Args:
        parent: key of the page before the first one, or None at the root.
        first_token: token where the first page begins, counted from the first token of `block_ids`.
        block_ids: the blocks that hold the pages, consecutive in the block table.
        computed: steps before this one have computed them, and it may already write other KV there.
        group: position among the groups of `Geometry`.
    """

    job_id: int
    keys: list[bytes]
    parent: bytes | None
    first_token: int
    block_ids: list[int]
    computed: bool
    group: int = 0


@dataclass(frozen=True, slots=True)
class SaveResult:
    """How a save ended on some workers.

    Args:
        workers: how many.
        pages: fewest pages that one of them has in the pool.
        overtaken: the first page that one of them could not copy before its blocks were given away, if there is one.
    """

    workers: int
    pages: int
    overtaken: int | None = None

    def merge(self, other: SaveResult) -> SaveResult:
        overtaken = [first for first in (self.overtaken, other.overtaken) if first is not None]
        pages = min(self.pages, other.pages)
        return SaveResult(self.workers + other.workers, pages, min(overtaken, default=None))


@dataclass(frozen=True, slots=True)
class Announcement:
    """A request whose KV a prefill instance has or will have; see `transfer.protocol.incoming.Incoming`."""

    transfer: str
    where: Where
    computed: bool


@dataclass(slots=True)
class PDStep:
    """Scheduler to worker: what happens to transfers in this step, all by request.

    Args:
        opened: outgoing: a request whose KV another instance will want -> name of the transfer.
        preempted: outgoing: their KV does not count any more, or vLLM takes their blocks back in this step.
        computed: outgoing: what this step computes of them, with the block table of each group, and the tokens of their
            prompt.
        finished: outgoing: their prefill is over -> tokens.
        announced: incoming: a request whose KV comes from elsewhere.
        granted: incoming: they have blocks now, for these tokens (or this state) of each group.
        cancelled: either: they need nothing (more) -> why.
        unreported: of those, the ones whose end vLLM does not wait for.
        home: where this instance's own directory is.
    """

    opened: dict[str, str] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    computed: dict[str, tuple[Computed, int]] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    announced: dict[str, Announcement] = field(default_factory=dict)
    granted: dict[str, list[Table]] = field(default_factory=dict)
    cancelled: dict[str, str] = field(default_factory=dict)
    unreported: set[str] = field(default_factory=set)
    home: Address = ("", 0)


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """Scheduler to worker. `namespace`, the instance's, is set wherever there are jobs of the pool.

    Args:
        given_away: blocks that this step writes to, or a load that begins in it, although saves of steps before it may
            still read them; None where that is not known, so it may be all.
        read_weights: number of a request to read the weights in memory before the step; 0 for none.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    given_away: frozenset[int] | None = None
    namespace: Namespace | None = None
    pd: PDStep = field(default_factory=PDStep)
    read_weights: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """What a request's load and transfer took on the slowest worker, by what the latter came, and how many tokens."""

    load_s: float = 0.0
    transfer_s: float = 0.0
    transport: str = ""
    fetched_tokens: int = 0

    def merge(self, other: Timing) -> Timing:
        return Timing(
            max(self.load_s, other.load_s),
            max(self.transfer_s, other.transfer_s),
            self.transport or other.transport,
            max(self.fetched_tokens, other.fetched_tokens),
        )


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Worker to scheduler: saves that ended, by job id, and what failed.

    Args:
        failed_loads: requests of which at least one worker could not load a page -> the token up to which vLLM goes on
            with what was loaded.
        stalled: whether a load was given up at its deadline, since the pool hangs, or the device hangs or refuses each
            copy.
        late: of the failed loads those whose pages may be on their way all the same: the pool is well.
        not_landed: whether one of these waited in vain until its deadline for pages that were said to be coming.
        failed_transfers: announced requests of which nothing will come, and that had no blocks then.
        timings: of loads and transfers that ended, where each request has a line in the log (`log_requests`).
        weights: those in memory, where they were asked for.
    """

    saves: dict[int, SaveResult] = field(default_factory=dict)
    failed_loads: dict[str, int] = field(default_factory=dict)
    stalled: bool = False
    late: set[str] = field(default_factory=set)
    not_landed: bool = False
    failed_transfers: set[str] = field(default_factory=set)
    timings: dict[str, Timing] = field(default_factory=dict)
    weights: Reading | None = None

    def failed_load(self, req_id: str, kept: int) -> None:
        """Enter a load that failed, with the token up to which it counts."""
        self.failed_loads[req_id] = min(kept, self.failed_loads.get(req_id, kept))

    def took(self, req_id: str, timing: Timing) -> None:
        self.timings[req_id] = self.timings.get(req_id, timing).merge(timing)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        saves = dict(self.saves)
        for job_id, result in other.saves.items():
            saves[job_id] = saves[job_id].merge(result) if job_id in saves else result
        merged = WorkerReport(
            saves,
            dict(self.failed_loads),
            self.stalled or other.stalled,
            self.late | other.late,
            self.not_landed or other.not_landed,
            self.failed_transfers | other.failed_transfers,
            dict(self.timings),
            self.weights if other.weights is None else other.weights.merge(self.weights or Reading(0, 0)),
        )
        for req_id, kept in other.failed_loads.items():
            merged.failed_load(req_id, kept)
        for req_id, timing in other.timings.items():
            merged.took(req_id, timing)
        return merged


@dataclass(slots=True)
class Ended:
    """What ended on a worker since the last step, by request.

    Args:
        arrived: from the pool or elsewhere: that source has brought its part, or will not.
        failed_blocks: they hold nothing that may be read.
        sent: outgoing: nothing reads their blocks any more.
        refused: of those that arrived, the ones of which nothing may be read. Of a model with several groups that is
            the only way to fail: vLLM takes failed blocks from models with one group alone.
    """

    arrived: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    report: WorkerReport = field(default_factory=WorkerReport)
    sent: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
