"""The other process of `bench transfer`, how it is reached, and moving pieces to it.

It grants memory to our transports, and is the far end of the bare system calls. Run as a module it prints one JSON
object with everything that the measuring process needs, and leaves when its standard input is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.transfer_libraries import read_alone
from mooncake_connector.cli.bench.transfer_scale import Int64, Scale
from transfer.control.handshake import Identity
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Completion, Grant, Peer, TransportOptions
from transfer.transports.memory import Memory
from transfer.transports.rdma.rails import Rail, chosen, rails
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.registry import make_transports, names
from transfer.transports.tls import Tls
from transfer.transports.vectors import Vector, read_process

DEADLINE_S = 60.0
START_S = 300.0
"""Of the other process, which an emulated processor has to start as well."""
TLS = "tcp with TLS"
WHAT = "the other process of the benchmark"
FETCH = struct.Struct("<iqq")
"""What the far end of the bare process_vm round trip is told: PID, address, bytes."""


def best_rail() -> Rail | None:
    """The port of an RDMA card that both processes use alone, as perftest's programs take one as well."""
    return next(iter(chosen(rails(), ["127.0.0.1"])), None)


def options() -> TransportOptions:
    """Of both processes."""
    rail = best_rail()
    return TransportOptions(Identity(), rdma=RdmaSettings(ports=[rail.name] if rail is not None else []))


class Far:
    """What the other process said of itself, and how it is reached."""

    def __init__(self, found: dict[str, Any], end: Callable[[], str] = lambda: "") -> None:
        """`end` says with what the process ended; nothing while it runs."""
        self.found = found
        self.end = end
        self.pid: int = found["pid"]
        self.address: int = found["address"]
        self.endpoints = {name: bytes.fromhex(endpoint) for name, endpoint in found["endpoints"].items()}
        self.grant = Grant(bytes.fromhex(found["key"]), np.array([self.address]), np.array([found["nbytes"]]))

    def dial(self, kind: bytes) -> socket.socket:
        """A connection to one of the bare far ends: b"t" takes bytes over TCP, b"v" fetches them, b"l" a library.

        With b"b" it has a busy Python thread, as long as the connection is there."""
        connection = socket.create_connection(("127.0.0.1", self.found["port"]), timeout=DEADLINE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(kind)
        return connection

    @contextlib.contextmanager
    def busy_there(self) -> Iterator[None]:
        """A busy Python thread in the other process."""
        with self.dial(b"b") as connection:
            connection.recv(1)
            yield

    @contextlib.contextmanager
    def busy_here(self) -> Iterator[None]:
        """The same in this process."""
        far_end, near_end = socket.socketpair()
        thread = threading.Thread(target=_be_busy, args=(far_end, None))
        with far_end:
            with near_end:
                thread.start()
                near_end.recv(1)
                yield
            thread.join()

    def pieces(self, source: np.ndarray[Any, Any], scale: Scale) -> tuple[Int64, Int64, Int64]:
        """Where they lie here and there, scattered on both sides, and their sizes."""
        here, there = scale.scattered(source.ctypes.data, seed=1), scale.scattered(self.address, seed=2)
        return here, there, np.full(scale.pieces, scale.piece_nbytes, dtype=np.int64)

    def moves(self, peer: Peer, source: np.ndarray[Any, Any], scale: Scale) -> Callable[[], None]:
        """Each call writes all pieces of `scale` once."""
        here, there, sizes = self.pieces(source, scale)
        return lambda: finish(peer, peer.write(self.grant, here, there, sizes, deadline_s=DEADLINE_S))


def finish(peer: Peer, completion: Completion) -> None:
    """Wait for the outcome of a batch. Raises BenchError unless all of it arrived."""
    outcome = outcome_of(completion)
    if not outcome.ok:
        raise BenchError(f"{peer.transport}: {outcome}")


@contextlib.contextmanager
def far_process(memory_nbytes: int, tls: dict[str, str] | None, only: Collection[str] = ()) -> Iterator[Far]:
    """Start it, with all transports or those of these names, and have it leave at the end."""
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder, tempfile.TemporaryFile() as log:
        said = Path(folder) / "said"
        offered = {"memory_nbytes": memory_nbytes, "tls": tls, "names": [*(only or names())]}
        order = json.dumps({**offered, "said": str(said)})
        with processes.running([sys.executable, "-m", __name__, order], log, grace_s=10) as process:
            processes.wait_until(said.exists, process, log, START_S, WHAT)
            yield Far(json.loads(said.read_text()), lambda: processes.end_of(process, log, WHAT))


def _be_far(order: dict[str, Any]) -> None:
    data = np.ones(order["memory_nbytes"], dtype=np.uint8)
    memory = Memory()
    memory.register(data.ctypes.data, data.nbytes)
    grant = memory.grant(np.array([data.ctypes.data]), np.array([data.nbytes]))
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve, args=(listener, data), daemon=True).start()
    tls = Tls(**order["tls"]) if order["tls"] else None
    with (
        make_transports(order["names"], memory, options()) as transports,
        make_transports(["tcp"] if tls else [], memory, TransportOptions(Identity(), tls=tls)) as secured,
    ):
        endpoints = {name: endpoint.hex() for name, endpoint in transports.listen().items()}
        if tls:
            endpoints[TLS] = secured.listen()["tcp"].hex()
        port = listener.getsockname()[1]
        found = {"pid": os.getpid(), "port": port, "key": grant.key.hex(), "address": data.ctypes.data}
        partial = Path(order["said"] + ".partial")  # its reader looks at any time
        partial.write_text(json.dumps({**found, "nbytes": data.nbytes, "endpoints": endpoints}))
        partial.rename(order["said"])
        sys.stdin.read()


def _serve(listener: socket.socket, data: np.ndarray[Any, Any]) -> None:
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        target = {b"t": _take, b"v": _fetch, b"l": read_alone, b"b": _be_busy}[connection.recv(1)]
        threading.Thread(target=target, args=(connection, data), daemon=True).start()


def _be_busy(connection: socket.socket, data: object) -> None:
    """It gives up the interpreter lock only when asked: each time that it did so by itself and took it again, the
    5 ms of who waits for the lock would begin anew."""
    connection.sendall(b"k")
    said: list[bytes] = []
    listener = threading.Thread(target=lambda: said.append(connection.recv(1)))
    listener.start()
    total = 0
    while not said:
        total += 1
    listener.join()


def _take(connection: socket.socket, data: np.ndarray[Any, Any]) -> None:
    """Bare TCP: 8 bytes of length, the bytes, and one byte back."""
    view = data.data
    while header := connection.recv(8, socket.MSG_WAITALL):
        nbytes, at = int.from_bytes(header, "little"), 0
        while at < nbytes:
            at += connection.recv_into(view[at:nbytes])
        connection.sendall(b"k")


def _fetch(connection: socket.socket, data: np.ndarray[Any, Any]) -> None:
    """Bare process_vm: told where, fetches it, and one byte back."""
    while message := connection.recv(FETCH.size, socket.MSG_WAITALL):
        pid, address, nbytes = FETCH.unpack(message)
        size = np.array([nbytes])
        read_process(pid, Vector.of(np.array([address]), size), Vector.of(np.array([data.ctypes.data]), size))
        connection.sendall(b"k")


if __name__ == "__main__":
    _be_far(json.loads(sys.argv[1]))
