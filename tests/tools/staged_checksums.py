"""What it costs that a device's KV is checked on its way over `tcp`: processor time, and copies down from the device.

    PYTHONPATH=tests .venv/bin/python tests/tools/staged_checksums.py [rounds]

Two processes hand requests over, in turn with checksums that travel with the bytes (version 8), without (version 7,
where the consumer brings down again what it got), and between host memories. The device is the stand-in for the
driver's library, so its copies are the processor's, and their time is part of the figures.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import simulated.ranks
from simulated.cuda_driver import LIBRARY
from simulated.nodes import NamedNode
from simulated.ranks import Model, make_rank

import transfer.session
from transfer.control import handshake
from transfer.control.connection import Access
from transfer.control.directory import Directory
from transfer.control.handshake import Identity
from transfer.plan.granularity import Bounds, Granularity
from transfer.plan.layout import RankLayout, Table
from transfer.protocol.incoming import Where
from transfer.protocol.orders import Ending
from transfer.session import NodeOptions
from transfer.transports.cuda.driver import Driver

MODEL = Model(layers=32, heads=8, k_dim=128, v_dim=128, itemsize=2)
BLOCK_TOKENS, BLOCKS, REQUESTS = 16, 32, 6
HOST = "127.0.0.1"
TOKENS = BLOCK_TOKENS * BLOCKS
NBYTES = TOKENS * MODEL.layers * MODEL.heads * 2 * 128 * 2
"""Of a request."""
WAYS = {"marks": (0, 8), "no marks": (0, 7), "host memory": (None, 8)}


class Side:
    """One rank, its copies counted in bytes."""

    def __init__(self, seed: int, device: int | None) -> None:
        self.copied: Counter[str] = Counter()
        self.memory = np.random.default_rng(seed).integers(0, 256, NBYTES + 128, dtype=np.uint8)
        address = self.memory.ctypes.data
        section = make_rank(MODEL, range(MODEL.layers), range(MODEL.heads), BLOCK_TOKENS, BLOCKS, "LBNH")
        moved = tuple(start + address for start in section.blocks.layer_addresses)
        section = replace(section, blocks=replace(section.blocks, layer_addresses=moved))
        if device is not None:
            LIBRARY.allocate(address, len(self.memory))
            copy = LIBRARY._copy
            LIBRARY._copy = lambda *piece: (self._count(*piece), copy(*piece))[1]
        self.table = np.random.default_rng(seed).permutation(BLOCKS).tolist()
        options = NodeOptions(transports=["tcp"], hosts=[HOST], bounds=Bounds(fixed=Granularity.LAYER))
        access, regions = Access(Identity(b"sixteen bytes or more")), [(address, len(self.memory))]
        self.node = NamedNode([self.table], RankLayout((section,)), regions, access, options, device)
        self.directory = Directory("e", [self.node.card], 1, (HOST, 0), access)

    def _count(self, target: int, source: int, nbytes: int) -> None:
        self.copied["down" if LIBRARY._range(source) else "up"] += nbytes

    def figures(self, began_s: float) -> str:
        each = REQUESTS * NBYTES / 2**30
        copied = " ".join(f"{way} {self.copied[way] / each / 2**30:.1f}" for way in ("down", "up"))
        return f"processor {(time.process_time() - began_s) / each:.2f} s/GiB, copied {copied}"


def wait(until: Callable[[], Any]) -> None:
    while not until():
        time.sleep(0.002)


def prefill(device: int | None) -> str:
    side = Side(1, device)
    names = [str(number) for number in range(REQUESTS + 1)]
    for name in names:
        side.node.open(name)
    print(side.directory.port, flush=True)
    for name in names:
        for layer in range(MODEL.layers):
            side.node.computed(layer, {name: TOKENS})
        side.node.finished(name, TOKENS)
    ended: list[Any] = []
    wait(lambda: ended.extend(side.node.take_sent()) or ended)
    side.copied.clear()
    began_s = time.process_time()
    wait(lambda: ended.extend(side.node.take_sent()) or len(ended) == len(names))
    return side.figures(began_s)


def decode(device: int | None, port: int) -> str:
    side, began_s = Side(2, device), 0.0
    for number in range(REQUESTS + 1):
        name = str(number)
        home = HOST, side.directory.port
        side.node.announce(name, Where(HOST, port, "e"), home, computed=False)
        side.node.grant(name, Table(0, TOKENS, side.table))
        ended: list[Any] = []
        wait(lambda: ended.extend(side.node.take_fetched()) or ended)  # noqa: B023
        assert ended[0].ending is Ending.DONE, ended[0].cause
        if not number:
            side.copied.clear()
            began_s = time.process_time()
    return side.figures(began_s)


def measure(rounds: int) -> None:
    for _ in range(rounds):
        for way in WAYS:
            first = subprocess.Popen([sys.executable, __file__, way], stdout=subprocess.PIPE, text=True)
            assert first.stdout is not None
            port = first.stdout.readline().strip()
            second = subprocess.run([sys.executable, __file__, way, port], capture_output=True, text=True, check=True)
            for role, said in (("prefill", first.communicate()[0]), ("decode", second.stdout)):
                print(f"{way:12} {role:8} {said.strip()}; load {os.getloadavg()[0]:.0f}", flush=True)


def main(way: str, port: str = "") -> None:
    device, handshake.VERSION = WAYS[way]
    simulated.ranks.SPAN = 2 * NBYTES
    transfer.session.system_driver = lambda: Driver(LIBRARY)
    print(decode(device, int(port)) if port else prefill(device), flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in WAYS:
        main(*sys.argv[1:])
    else:
        measure(int(sys.argv[1]) if sys.argv[1:] else 5)
