"""One rank of an engine as its adapter sees it: gives transfers away, fetches transfers, and says what became of them.

A `Node` owns everything that PD needs in the process of a rank: registered memory, transports, both halves of the
protocol, and the thread of the control plane. Its methods are called by the engine's thread, return at once and never
raise for what a peer or the network does; outcomes come through `take_ended`.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from transfer.control.connection import Access, LoopThread
from transfer.control.directory import RankCard
from transfer.control.listener import Listener, listen
from transfer.driver import RANK_PURPOSE, Ended
from transfer.fetching import Family, Fetching, Where
from transfer.plan.granularity import Bounds
from transfer.plan.layout import RankLayout
from transfer.protocol.orders import Timing
from transfer.serving import MAX_VISITORS, Serving
from transfer.transports.base import TransferError, TransportOptions
from transfer.transports.cuda.driver import system_driver
from transfer.transports.cuda.staging import Staging
from transfer.transports.memory import Memory
from transfer.transports.registry import make_transports, names, serving

_START_S = 60.0
"""Engines start where every core may be busy, with compilers for one."""
_NUM_THREADS = MAX_VISITORS + 4
"""Each consumer is connected to in a thread of its own, which may take seconds and must not hold up the others."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Settings of a node.

    Args:
        hosts: literal addresses, one for each network, which need a secret; control connections use the first. Without
            any, peers are processes of this user on this host, and nothing listens on a port.
        page_tokens: tokens that share a checksum; rounded up to what moves together.
    """

    transports: Sequence[str] = field(default_factory=names)
    hosts: Sequence[str] = ()
    page_tokens: int = 64
    bounds: Bounds = field(default_factory=Bounds)
    timing: Timing = field(default_factory=Timing)


class Node:
    """See the module.

    Args:
        layout: this rank's KV memory.
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
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._sent: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._memory = memory = Memory()
        for region in regions:
            memory.register(*region)
        generation = time.time_ns()
        driver = None if device is None else system_driver()
        made_with = TransportOptions(access.identity, options.hosts, access.tls, driver)
        self._transports = make_transports(options.transports, memory, made_with)
        self._staging = [] if driver is None or device is None else [Staging(driver, device) for _ in range(2)]
        for_sums, for_checks = self._staging or (None, None)
        self._executors = [
            ThreadPoolExecutor(1, thread_name_prefix=f"mooncake-connector-{work}")
            for work in ("send", "verify", "pair")
        ]
        self._thread = LoopThread("mooncake-connector-transfer")
        loop = self._thread.loop
        loop.set_default_executor(ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="mooncake-connector-connect"))
        try:
            endpoints = self._transports.listen()
            self._serving = Serving(
                generation, options.timing, layout, self._transports, options.bounds, options.page_tokens,
                loop, self._executors[0], self._executors[2], for_sums, self._sent.put,
            )  # fmt: skip
            self._fetching = Fetching(
                generation, options.timing, layout, memory, endpoints, access, options.page_tokens,
                loop, self._executors[1], for_checks, self._ended.put,
            )  # fmt: skip
            host = options.hosts[0] if options.hosts else ""
            self._listener: Listener = self._thread.run(
                listen((host, 0), RANK_PURPOSE, access, self._serving.serve), _START_S
            )
        except BaseException:
            self._stop()
            raise
        self.card = RankCard(host, self._listener.port, access.identity.instance, generation, layout)
        """What the instance's directory says of this rank."""

    # Giving away

    def open(self, transfer: str) -> None:
        """A request begins whose KV a consumer will want. It will be among `take_sent` once."""
        self._thread.post(self._serving.open, transfer)

    def blocks(self, tables: Mapping[str, Sequence[int]]) -> None:
        """The block tables of transfers that are being computed, before what is computed into them is told."""
        self._thread.post(self._serving.blocks, tables)

    def computed(self, layer: int, stops: Mapping[str, int]) -> None:
        """All layers of this rank up to `layer` have the KV of each transfer's tokens before its stop."""
        self._thread.post(self._serving.computed, layer, stops)

    def finished(self, transfer: str, num_tokens: int) -> None:
        """Prefill is over; the blocks stay as they are until the transfer is among `take_sent`."""
        self._thread.post(self._serving.finished, transfer, num_tokens)

    def cancel(self, transfer: str, cause: str) -> None:
        """The engine wants the blocks back; they are its own when the transfer is among `take_sent`."""
        self._thread.post(self._serving.cancel, transfer, cause)

    def preempted(self, transfer: str) -> None:
        """The engine has the blocks back, now; what was being sent from them does not count."""
        self._serving.void.add(transfer)
        self._thread.post(self._serving.preempted, transfer)

    def take_sent(self) -> list[Ended]:
        """Transfers given away that ended since the last call, each exactly once."""
        return _drain(self._sent)

    # Fetching

    def announce(self, transfer: str, where: Where, family: Family, *, computed: bool) -> None:
        """A request that will want this transfer. It will be among `take_fetched` once.

        Args:
            computed: the request was at the producer first, which must know the transfer.
        """
        self._thread.post(self._fetching.announce, transfer, where, family, computed)

    def grant(self, transfer: str, first_token: int, stop_token: int, block_ids: Sequence[int]) -> None:
        """Fetch tokens `[first_token, stop_token)` of it into a block table, whose blocks are the transfer's until its
        end. `first_token` is a multiple of the block size."""
        self._thread.post(self._fetching.grant, transfer, first_token, stop_token, block_ids)

    def drop(self, transfer: str, cause: str) -> None:
        """The engine does not want it any more; blocks are the engine's when it is among `take_fetched`."""
        self._thread.post(self._fetching.drop, transfer, cause)

    def take_fetched(self) -> list[Ended]:
        """Announced transfers that ended since the last call, each exactly once."""
        return _drain(self._ended)

    def close(self) -> None:
        """Give everything up; when it returns, no thread of the node reads or writes the engine's memory any more.

        What is being hashed is hashed to the end, one batch at most. May be called twice.
        """
        with contextlib.suppress(AttributeError):
            self._thread.post(self._listener.close)
        self._stop()

    def _stop(self) -> None:
        self._thread.close()
        for region in self._memory.regions:
            with contextlib.suppress(TransferError):  # what is still written then, closing cuts off
                self._memory.unregister(region)
        self._transports.close()
        for executor in self._executors:
            executor.shutdown(cancel_futures=True)
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


def _drain(ended: queue.SimpleQueue[Ended]) -> list[Ended]:
    found = []
    while not ended.empty():
        found.append(ended.get())
    return found
