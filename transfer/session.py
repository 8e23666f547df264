"""One rank of an engine as its adapter sees it: gives transfers away, fetches transfers, and says what became of them.

A `Node` owns everything that PD needs in the process of a rank: registered memory, transports, both sides of the
protocol, and the thread of the control plane, which alone changes a transfer's record. Its methods are called by the
engine's thread, return at once and never raise for what a peer or the network does; outcomes come through `take_ended`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from mooncake_connector.config.schema import Config
from mooncake_connector.contain import contained, nothing
from mooncake_connector.log import get_logger
from mooncake_connector.threads import DaemonThreads, done_apart
from transfer.control.connection import Access, LoopThread
from transfer.control.directory import Address, RankCard
from transfer.control.listener import Listener, listen
from transfer.driver import RANK_PURPOSE, Driver
from transfer.fetching import Fetching
from transfer.plan.granularity import Bounds, Granularity
from transfer.plan.layout import RankLayout, Table
from transfer.protocol.incoming import Incoming
from transfer.protocol.orders import Ended, Failed, Timing
from transfer.protocol.outgoing import Outgoing
from transfer.serving import MAX_VISITORS, Computed, Serving
from transfer.transports.base import INSTANCE_NBYTES, TransferError, TransportOptions
from transfer.transports.cuda.copier import Staging
from transfer.transports.cuda.driver import system_driver
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.memory import Memory
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.registry import make_transports, names, serving

_START_S = 60.0
"""Engines start where every core may be busy, with compilers for one."""
_NUM_THREADS = MAX_VISITORS + 4
"""Each consumer is connected to in a thread of its own, which may take seconds and must not hold up the others."""
_END_S = 20.0
"""How long an engine that ends waits for the threads that send, check and plan."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Settings of a node.

    Args:
        hosts: literal addresses, one for each network, which need a secret; control connections use the first. Without
            any, peers are processes of this user on this host, and nothing listens on a port.
        page_tokens: tokens that share a checksum; rounded up to what moves together.
        names_return: the engine computes a request again under its old name, as soon as that transfer is over.
    """

    transports: Sequence[str] = field(default_factory=names)
    hosts: Sequence[str] = ()
    rdma: RdmaSettings = field(default_factory=RdmaSettings)
    page_tokens: int = 64
    bounds: Bounds = field(default_factory=Bounds)
    timing: Timing = field(default_factory=Timing)
    names_return: bool = False

    @classmethod
    def configured(cls, config: Config) -> NodeOptions:
        """As the configuration of an instance says."""
        fixed = None if config.granularity == "auto" else Granularity(config.granularity)
        lease_s, deadline_s = config.transfer_lease_s, config.transfer_deadline_s
        return cls(
            transports=config.transports,
            hosts=config.transfer_hosts,
            rdma=RdmaSettings.configured(config),
            page_tokens=int(config.page_tokens),
            bounds=Bounds(config.granularity_chunk_tokens, config.granularity_layer_tokens, fixed),
            timing=Timing(
                lease_s=lease_s,
                heartbeat_s=min(Timing().heartbeat_s, lease_s / 6),
                deadline_s=deadline_s,
                hold_s=max(Timing().hold_s, lease_s, deadline_s),
            ),
        )


class Node:
    """See the module.

    Args:
        layout: what this rank hands over and takes, section by section.
        regions: `(address, nbytes)` of the memory that holds it.
        device: number of the CUDA device that the memory is on; None for memory of the host.

    Raises:
        TransferError: an address cannot be listened at, or needs a secret; no transport serves such memory.
        ValueError: regions overlap.
    """

    def __init__(
        self,
        layout: RankLayout,
        regions: Sequence[tuple[int, int]],
        access: Access,
        options: NodeOptions,
        device: int | None = None,
    ) -> None:
        _require_one_that_serves(options, device)
        self._reports: queue.SimpleQueue[Failed | Ended] = queue.SimpleQueue()
        self._is_closed = False
        # A process of its own to its peers, as one after a restart is: also where this one had a node before.
        identity = replace(access.identity, instance=secrets.token_bytes(INSTANCE_NBYTES))
        access = replace(access, identity=identity)
        self._memory = memory = Memory()
        for region in regions:
            memory.register(*region)
        place = None if device is None else OnDevice(system_driver(), device)
        made_with = TransportOptions(identity, options.hosts, access.tls, place, options.rdma)
        self._transports = make_transports(options.transports, memory, made_with)
        self._staging = [] if place is None else [Staging(place.driver, place.device) for _ in range(2)]
        if self._staging:
            self._staging[0].warm_up()
        for_sums, for_checks = self._staging or (None, None)
        self._executors = [DaemonThreads(1, f"mooncake-connector-{work}") for work in ("send", "verify", "pair")]
        self._thread = LoopThread("mooncake-connector-transfer")
        loop = self._thread.loop
        loop.set_default_executor(ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="mooncake-connector-connect"))
        try:
            endpoints = self._transports.listen()
            self._serving = Serving(
                options.timing, options.names_return, layout, self._transports, options.bounds, options.page_tokens,
                loop, self._executors[0], self._executors[2], for_sums, self._reports.put,
            )  # fmt: skip
            self._fetching = Fetching(
                options.timing, layout, memory, endpoints, access, options.page_tokens,
                loop, self._executors[1], for_checks, self._reports.put,
            )  # fmt: skip
            host = options.hosts[0] if options.hosts else ""
            self._listener: Listener = self._thread.run(
                listen((host, 0), RANK_PURPOSE, access, self._serving.serve), _START_S
            )
        except BaseException:
            self._stop()
            raise
        self.card = RankCard(host, self._listener.port, identity.instance, layout)
        """What the instance's directory says of this rank."""

    # Giving away

    def open(self, transfer: Outgoing) -> None:
        """A request begins whose KV a consumer will want."""
        self._tell(self._serving, self._serving.producer.open, transfer)

    def computed(self, layer: int, progress: Sequence[tuple[Outgoing, Computed]], section: int = 0) -> None:
        """All layers of this rank's section up to `layer` have the KV of each transfer's tokens before its stop.

        Sections that are sent whole are computed when the transfer is `finished`.
        """
        self._tell(self._serving, self._serving.computed, layer, progress, section)

    def preempted(self, transfer: Outgoing) -> None:
        """The engine has the blocks back; what is sent from them after this call does not count."""
        self._tell(self._serving, self._serving.producer.preempted, transfer)

    def awaited(self, transfer: Outgoing) -> None:
        """The engine waits for its end; `finished` comes when the device has computed all of it."""
        self._tell(self._serving, self._serving.producer.awaited, transfer)

    def finished(self, transfer: Outgoing, num_tokens: int) -> None:
        """Prefill is over; the blocks stay as they are until `take_ended` says that the transfer has."""
        self._tell(self._serving, self._serving.producer.finished, transfer, num_tokens)

    # Fetching

    def announce(self, transfer: Incoming, home: Address) -> None:
        """A request that will want this transfer. `home` is where the directory of this rank's own instance is: which
        part of the transfer is for this rank depends on what its others have."""
        self._tell(self._fetching, self._fetching.announce, transfer, home)

    def allocated(self, transfer: Incoming, tables: Sequence[Table]) -> None:
        """The engine has these blocks for it and waits for its end; `grant` comes when the device has left them."""
        self._tell(self._fetching, self._fetching.consumer.allocated, transfer, tables)

    def grant(self, transfer: Incoming, tables: Sequence[Table]) -> None:
        """Fetch into the blocks of these tables, one of each section of this rank, in order; they are the transfer's
        until its end. `first_token` of each is a multiple of the section's block size."""
        self._tell(self._fetching, self._fetching.grant, transfer, tables)

    # Both

    def cancel(self, transfer: Outgoing | Incoming, cause: str) -> None:
        """The engine does not want it any more; blocks are the engine's when it has ended."""
        if isinstance(transfer, Outgoing):
            self._tell(self._serving, self._serving.producer.cancel, transfer, cause)
        else:
            self._tell(self._fetching, self._fetching.consumer.cancel, transfer, cause)

    def take_ended(self) -> list[Failed | Ended]:
        """What became of transfers since the last call.

        Each has one `Ended`, after it was finished, granted or cancelled; before its grant it may have a `Failed`.
        """
        found = []
        while not self._reports.empty():
            found.append(self._reports.get())
        return found

    def take_counts(self) -> Mapping[str, Mapping[str, int]]:
        """What transports counted since the last call: figures of the metrics, each by its label."""
        return self._transports.take_counts()

    def close(self, cause: str = "the instance is closed") -> None:
        """Fail every transfer; when it returns, no thread of the node reads or writes the engine's memory any more.

        What is being hashed is hashed to the end, one batch at most. Where that hangs, as on a device that does, an
        error is logged after `_END_S`, and the engine goes on. May be called twice.
        """
        self._thread.post(self._listener.close)
        self._stop()
        self._is_closed = True
        self._serving.close(cause)
        self._fetching.close(cause)

    def take_over(self, former: Node) -> None:
        """Go on with what a closed node has still to say, and is still to be told, of its transfers."""
        for report in former.take_ended():
            self._reports.put(report)

    def _tell(self, driver: Driver, call: Callable[..., object], *args: object) -> None:
        """In the loop, whose the transfers are; once that is over, they are the engine's thread's."""
        if self._is_closed:
            driver.tell(call, *args)
        else:
            self._thread.post(driver.tell, call, *args)

    def _stop(self) -> None:
        self._thread.close()
        for region in self._memory.regions:
            with contextlib.suppress(TransferError):  # what is still written then, closing cuts off
                self._memory.unregister(region)
        said = "a thread still works on KV that was to be transferred: after %g s the engine gets its memory back"
        done_apart(self._end_threads, _END_S, "transfer.end", said, logger, logging.ERROR)

    @contained(nothing)
    def _end_threads(self) -> None:
        self._transports.close()
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)
        for executor in self._executors:
            executor.shutdown()
        while self._staging:
            self._staging.pop().close()


def _require_one_that_serves(options: NodeOptions, device: int | None) -> None:
    is_device = device is not None
    if not serving(options.transports, device=is_device, hosts=options.hosts):
        kind = "a device" if is_device else "the host"
        fitting = serving(device=is_device, hosts=options.hosts)
        needing_hosts = [name for name in serving(device=is_device, hosts=["any"]) if name not in fitting]
        raise TransferError(
            f"transports {', '.join(options.transports)}: none of them serves memory of {kind}; "
            f"add {' or '.join(fitting)}"
            + (f", or set transfer_hosts for {' or '.join(needing_hosts)}" if needing_hosts else "")
        )
