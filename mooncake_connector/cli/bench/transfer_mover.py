"""A third process of `bench transfer`: moves the same pieces to the other one, again and again, until it is killed.

So a transfer can be had that shares the machine with the measuring process, but not its interpreter. Argument: one JSON
object with transport, scale, and far, what `transfer_child` said. Prints a line once the first transfer is over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.transfer_far import DEADLINE_S, Far
from mooncake_connector.cli.bench.transfer_scale import TransferScale
from transfer.control.handshake import Identity
from transfer.transports.memory import Memory
from transfer.transports.registry import make_transports


def main(order: dict[str, Any]) -> None:
    scale, far = TransferScale(**order["scale"]), Far(order["far"])
    source = np.ones(scale.memory_nbytes, dtype=np.uint8)
    memory = Memory()
    memory.register(source.ctypes.data, source.nbytes)
    with make_transports([order["transport"]], memory, Identity()) as transports:
        move = far.moves(transports.connect(far.endpoints, deadline_s=DEADLINE_S), source, scale)
        move()
        print(flush=True)
        while True:
            move()


@contextlib.contextmanager
def moving_elsewhere(transport: str, far: Far, scale: TransferScale) -> Iterator[None]:
    """Meanwhile a third process moves, over this transport."""
    order = json.dumps({"transport": transport, "scale": dataclasses.asdict(scale), "far": far.found})
    command = [sys.executable, "-m", "mooncake_connector.cli.bench.transfer_mover", order]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        try:
            if not process.stdout.readline():
                raise BenchError(f"{transport}: no transfer between two other processes: their messages are above")
            yield
        finally:
            process.kill()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
