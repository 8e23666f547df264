"""Pages between a pool and a Mooncake cluster through the flow, beside a bare client that makes the same calls.

`python -m bench.tiers.mooncake FOLDER` prints what it measures: a master and two nodes on the loopback, the
pool in FOLDER. The flow writes what the pool gets and fetches what it lacks, with checksum and seal; the bare client
moves the same bytes between the cluster and one registered buffer, with as many calls at once of the same size.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from bench.tiers.measure import Measured, Rates, Scale, compare, side_by_side
from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.config.tiers import MooncakeTier
from store_client import EmbeddedStore, Put
from store_client.agent.flow import Flow
from store_client.agent.wish import Wish, Word
from store_client.base import Bytes
from store_client.testing import SHARD, chain, namespace
from store_client.tiers.base import SpaceName
from store_client.tiers.mooncake import MooncakeCluster
from store_client.tiers.mooncake.cluster import free_ports, master_command, node_command

_NODES = 2
_ROOM_NBYTES = 128 << 20
_START_S = 60.0
_DEADLINE_S = 300.0
_PROMPTS = 8
_SEVERAL = f"read for {_PROMPTS} prompts at once"
_LEASES = ("--default_kv_lease_ttl=10000", "--client_ttl=60")


def measure(folder: Path, scale: Scale, say: Callable[[str], None] = lambda line: None) -> list[Rates]:
    """Writes and reads of each page size. Raises BenchError, and TierError where Mooncake's wheel is missing."""
    with cluster(2 * scale.nbytes + _ROOM_NBYTES) as (master, _), Bare(master, scale.nbytes) as bare:

        def ours(where: Path, nbytes: int, number: int) -> Measured:
            return flow_rates(where, master, nbytes, scale.nbytes, f"{nbytes} {number}")

        def theirs(where: Path, nbytes: int, number: int) -> Measured:
            return bare.rates(nbytes, f"{nbytes} {number}")

        return compare("mooncake", scale, folder, ours, theirs, say)


@contextmanager
def cluster(nbytes: int) -> Iterator[tuple[str, int]]:
    """A master and two nodes with room for so much together; the master's address and the number of its process."""
    ports = iter(free_ports(2 + 2 * _NODES))
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        port = next(ports)
        commands = [master_command(port, next(ports), *_LEASES)]
        commands += [node_command(number, port, next(ports), next(ports), nbytes // _NODES) for number in range(_NODES)]
        pids = []
        for command in commands:
            process = stack.enter_context(processes.running(command.arguments, log, {**os.environ, **command.env}))
            answers = f"{command.url}/health"
            processes.wait_until(lambda: _answers(answers), process, log, _START_S, command.name)  # noqa: B023
            pids.append(process.pid)
        yield f"127.0.0.1:{port}", pids[0]


def _answers(url: str) -> bool:
    from mooncake_connector.deploy.watch import read

    return read(url) is not None


def _settings(master: str) -> MooncakeTier:
    return MooncakeTier(master=master, protocol="tcp", host="127.0.0.1", timeout_s=60.0)


def flow_rates(where: Path, master: str, nbytes: int, total: int, name: str) -> Measured:
    """From a pool that has all pages until the tier has them, and from the question until the pool has them again."""
    keys, name_space = chain(name, total // nbytes), namespace(name)
    tier = _Counting(_settings(master), len(keys))
    space_name = SpaceName(name_space.digest, SHARD)
    tier.contains(space_name, keys[:1], nbytes=nbytes, deadline_s=_DEADLINE_S)  # waits for the client
    with EmbeddedStore(where / "pool", total + (64 << 20)) as pool:
        space = pool.space(name_space, SHARD)
        source: Bytes = np.arange(nbytes, dtype=np.uint32).view(np.uint8)[:nbytes]

        def fill(number: int, page: Bytes) -> None:
            page[:] = source

        parents = [None, *keys[:-1]]
        # So that the pool has its memory, as the bare client has.
        space.write(keys, fill, nbytes=nbytes, parents=parents, deadline_s=_DEADLINE_S)
        space.clear()
        flow = Flow(pool, [(_settings(master), tier)], b"")
        try:
            done = space.write(keys, fill, nbytes=nbytes, parents=parents, deadline_s=_DEADLINE_S)
            if done != [Put.STORED] * len(keys):
                raise BenchError("the pool did not take all pages")
            started_s = time.perf_counter()
            tier.takes.set()
            if not tier.has_all.wait(_DEADLINE_S):
                raise BenchError(f"the cluster does not have all pages within {_DEADLINE_S:g} s")
            yield "write", total / (time.perf_counter() - started_s)
            for what, prompts in (("read", 1), (_SEVERAL, _PROMPTS)):
                space.clear()
                step = len(keys) // prompts
                wishes = [
                    Wish(
                        namespace=name_space, shard=SHARD, keys=keys[first : first + step], parent=None, nbytes=nbytes,
                        deadline_s=_DEADLINE_S,
                    )
                    for first in range(0, step * prompts, step)
                ]  # fmt: skip
                started_s = time.perf_counter()
                _fetch(flow, wishes)
                yield what, step * prompts * nbytes / (time.perf_counter() - started_s)
            flow.clear(name_space.digest, set())
        finally:
            flow.close()


def _fetch(flow: Flow, wishes: Sequence[Wish]) -> None:
    """All at once, until all of their pages are there."""
    words: SimpleQueue[Word] = SimpleQueue()
    for wish in wishes:
        flow.ask(wish, words.put)
    landed = ended = 0
    while ended < len(wishes):
        try:
            word = words.get(timeout=_DEADLINE_S)
        except Empty:
            raise BenchError(f"not all pages came back within {_DEADLINE_S:g} s") from None
        if word.done:
            landed, ended = landed + word.landed, ended + 1
    if landed != sum(len(wish.keys) for wish in wishes):
        raise BenchError(f"not all pages came back: {word}")


class _Counting(MooncakeCluster):
    """Takes pages once the pool has them all, and knows when it has so many."""

    def __init__(self, settings: MooncakeTier, expected: int) -> None:
        super().__init__(settings)
        self._missing, self._count = expected, threading.Lock()
        self.takes, self.has_all = threading.Event(), threading.Event()

    def write(self, *args: Any, **named: Any) -> list[Put]:
        self.takes.wait(_DEADLINE_S)
        puts = super().write(*args, **named)
        with self._count:
            self._missing -= puts.count(Put.STORED)
            if not self._missing:
                self.has_all.set()
        return puts


class Bare:
    """A client of Mooncake's own with one registered buffer."""

    def __init__(self, master: str, nbytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        os.environ.setdefault("MC_FORCE_TCP", "1")
        os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")
        os.environ.setdefault("MC_TCP_LANES_PER_PEER", "8")
        self._client: Any = MooncakeDistributedStore()
        self._config = ReplicateConfig()
        if self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master) != 0:
            raise BenchError(f"the bare client cannot be set up with the master at {master}")
        self._memory: Bytes = np.zeros(nbytes, dtype=np.uint8)
        self._memory[:] = 7
        if self._client.register_buffer(self._memory.ctypes.data, nbytes) != 0:
            raise BenchError("the bare client registers no memory")

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *raised: object) -> None:
        self._client.close()

    def rates(self, nbytes: int, name: str) -> Measured:
        count = len(self._memory) // nbytes
        names = [f"bare {name} {number}" for number in range(count)]
        at = {one: self._memory.ctypes.data + number * nbytes for number, one in enumerate(names)}
        tier = MooncakeCluster

        def put(_: int, some: Sequence[str]) -> None:
            codes = self._client.batch_put_from(
                list(some), [at[one] for one in some], [nbytes] * len(some), self._config
            )
            if any(codes):
                raise BenchError(f"the bare client could not put: {codes}")

        def get(_: int, some: Sequence[str]) -> None:
            codes = self._client.batch_get_into(list(some), [at[one] for one in some], [nbytes] * len(some))
            if codes != [nbytes] * len(some):
                raise BenchError(f"the bare client could not get: {codes}")

        batch = max(1, tier.batch_nbytes // nbytes)
        for what, work in (("write", put), ("read", get), (_SEVERAL, get)):
            started_s = time.perf_counter()
            side_by_side(work, names, batch, tier.parallel)
            yield what, count * nbytes / (time.perf_counter() - started_s)
        self._client.remove_by_regex(f"^bare {name} ", True)


if __name__ == "__main__":
    scale = Scale(nbytes=512 << 20, rounds=int(os.environ.get("ROUNDS", "5")), pages=(256 << 10, 1 << 20))
    if "tiny" in sys.argv[2:]:
        scale = Scale(nbytes=16 << 20, rounds=1, pages=(1 << 20,))
    measure(Path(sys.argv[1]), scale, lambda line: print(line, flush=True))
    os._exit(0)  # the library takes long to be unloaded
