"""Mooncake's Transfer Engine, for clusters that have it deployed: TCP with its connection pool, or RDMA.

`MOONCAKE_PROTOCOL` (tcp, rdma) and `MOONCAKE_DEVICE` are Mooncake's own variables, as are the many `MC_...`, topology
among them. Each piece is a batch of its own: of a longer one it only tells the end to who keeps a core busy for it.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from transfer.transports.base import Numbers, Region, TransferError, Unavailable
from transfer.transports.libraries.reader import READ_S, Patience, Reader
from transfer.transports.libraries.transport import LibraryTransport
from transfer.transports.vectors import SMALL_NBYTES

MAX_PIECES, _MAX_READS = 256, 3
"""Pieces under way of one read, and reads of one peer, of which its pool takes 1,024 pieces."""
_SPIN_S, _MAX_PAUSE_S = 0.0002, 0.001
"""Its own threads move the bytes, and have enough to do meanwhile, since another read waits for its turn."""
_MAX_NAME_NBYTES = 256


class MooncakeTransport(LibraryTransport):
    """See the module."""

    name = "mooncake"

    def _load(self, hosts: Sequence[str]) -> Reader:
        return MooncakeReader(hosts[0])


class MooncakeReader(Reader):
    """One engine of the library, which serves and reads."""

    def __init__(self, host: str) -> None:
        """Raises Unavailable."""
        protocol = os.environ.get("MOONCAKE_PROTOCOL", "tcp")
        if protocol == "tcp":
            os.environ.setdefault("MC_FORCE_TCP", "1")  # else it takes a card where there is one
            os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")  # else each read has a connection of its own
        self._host = f"[{host}]" if ":" in host else host
        self._lock = threading.Lock()
        self._turns: defaultdict[str, threading.Semaphore] = defaultdict(lambda: threading.Semaphore(_MAX_READS))
        """By peer."""
        self._engine: Any = _library().TransferEngine()
        status = self._engine.initialize(host, "P2PHANDSHAKE", protocol, os.environ.get("MOONCAKE_DEVICE", ""))
        if status != 0:
            raise Unavailable(f"Mooncake's engine did not start with protocol {protocol} at {host}: status {status}")

    def offer(self, region: Region) -> None:
        self._register(region.address, region.nbytes)

    def withdraw(self, region: Region) -> None:
        with self._lock:
            if self._engine is not None:
                self._engine.unregister_memory(region.address)

    def origin(self) -> bytes:
        return f"{self._host}:{self._running().get_rpc_port()}".encode()

    def stage(self, address: int, nbytes: int) -> None:
        self._register(address, nbytes)

    def meet(self, origin: bytes) -> str:
        try:
            if not 0 < len(origin) <= _MAX_NAME_NBYTES:
                raise ValueError(f"{len(origin)} bytes")
            return origin.decode("ascii")
        except ValueError as error:
            raise TransferError(f"name of an engine that cannot be read: {error}") from None

    def part(self, name: str) -> None:
        self._turns.pop(name, None)

    def read(self, name: str, remote: Numbers, local: Numbers, nbytes: Numbers) -> None:
        engine, is_small = self._running(), sum(nbytes) <= SMALL_NBYTES
        under_way: deque[int] = deque()
        with self._turn(name):
            patience = Patience("Mooncake", spin_s=_SPIN_S if is_small else 0.0, max_pause_s=_MAX_PAUSE_S)
            for there, here, size in zip(remote, local, nbytes, strict=True):
                if len(under_way) == MAX_PIECES:
                    self._finish(engine, under_way.popleft(), patience, name)
                batch = engine.batch_transfer_async_read(name, [int(here)], [int(there)], [int(size)])
                if not batch:
                    raise TransferError(f"Mooncake could not begin to read from the engine {name}")
                under_way.append(batch)
            while under_way:
                self._finish(engine, under_way.popleft(), patience, name)

    def close(self) -> None:
        with self._lock:
            self._engine = None

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        turns = self._turns[name]
        if not turns.acquire(timeout=READ_S):
            raise TransferError(f"Mooncake is still reading from the engine {name} what it was asked for before")
        try:
            yield
        finally:
            turns.release()

    @staticmethod
    def _finish(engine: Any, batch: int, patience: Patience, name: str) -> None:
        while not (status := engine.transfer_check_status(batch)):
            patience.wait()
        if status < 0:
            raise TransferError(f"Mooncake could not read from the engine {name}: status {status}")

    def _register(self, address: int, nbytes: int) -> None:
        with self._lock:
            if (status := self._running().register_memory(address, nbytes)) != 0:
                raise TransferError(f"Mooncake does not register {nbytes} bytes: status {status}")

    def _running(self) -> Any:
        engine = self._engine
        if engine is None:
            raise TransferError("Mooncake's engine is closed")
        return engine


def _library() -> Any:
    """Raises Unavailable where it is missing or cannot be loaded."""
    try:
        return import_module("mooncake.engine")
    except ImportError as error:
        if "shared object" in str(error):
            needed = "a system library is missing: apt-get install libibverbs1 libnuma1 librdmacm1 liburing2 libcurl4"
        else:
            needed = "pip install 'mooncake-connector[mooncake]', or its wheel that fits this machine"
        raise Unavailable(f"Mooncake's Transfer Engine cannot be loaded ({error}): {needed}") from None
