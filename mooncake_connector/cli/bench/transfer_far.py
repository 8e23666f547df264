"""The other process of `bench transfer`, and moving pieces to it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.transfer_scale import Int64, TransferScale
from transfer.transports.base import Grant, Peer

DEADLINE_S = 60.0


class Far:
    """What `transfer_child` said of itself, and how it is reached."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found
        self.pid: int = found["pid"]
        self.address: int = found["address"]
        self.port: int = found["port"]
        self.endpoints = {name: bytes.fromhex(endpoint) for name, endpoint in found["endpoints"].items()}
        self.grant = Grant(bytes.fromhex(found["key"]), np.array([self.address]), np.array([found["nbytes"]]))

    def dial(self, kind: bytes) -> socket.socket:
        """A connection to one of the bare far ends."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(kind)
        return connection

    def pieces(self, source: np.ndarray[Any, Any], scale: TransferScale) -> tuple[Int64, Int64, Int64]:
        """Where they lie here and there, scattered on both sides, and their sizes."""
        here, there = scale.scattered(source.ctypes.data, seed=1), scale.scattered(self.address, seed=2)
        return here, there, np.full(scale.pieces, scale.piece_nbytes, dtype=np.int64)

    def moves(self, peer: Peer, source: np.ndarray[Any, Any], scale: TransferScale) -> Callable[[], None]:
        """Each call writes all pieces of `scale` once."""
        here, there, sizes = self.pieces(source, scale)

        def move() -> None:
            outcome = peer.write(self.grant, here, there, sizes, deadline_s=DEADLINE_S).wait()
            if not outcome.ok:
                raise BenchError(f"{peer.transport}: {outcome}")

        return move


@contextlib.contextmanager
def far_process(scale: TransferScale, tls: dict[str, str] | None) -> Iterator[Far]:
    """Start it, and have it leave at the end."""
    order = json.dumps({"memory_nbytes": scale.memory_nbytes, "tls": tls})
    command = [sys.executable, "-m", "mooncake_connector.cli.bench.transfer_child", order]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    try:
        line = process.stdout.readline()
        if not line:
            raise BenchError("the other process of the benchmark did not start: its messages are above")
        yield Far(json.loads(line))
    finally:
        process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
