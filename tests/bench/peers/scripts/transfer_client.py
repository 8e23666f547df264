"""One process of a peer of `bench transfer`; run as a script by the interpreter that has the peer's wheel.

It imports nothing of this project: that interpreter need not have it. Argument: one JSON object with engine
("mooncake", "nixl"), install (what pip is told to have it), role, pieces, piece_nbytes, rounds, small_nbytes,
small_rounds, budget_s, outcome (path of the JSON file to write) and, to ``measure``, there (what ``hold`` wrote).
``hold`` offers memory until its standard input is closed.
"""

import base64
import ctypes
import json
import mmap
import random
import sys
import time
from typing import Any

from outcome import write_outcome


def main(order: dict[str, Any]) -> None:
    nbytes = 2 * order["pieces"] * order["piece_nbytes"]
    memory = mmap.mmap(-1, nbytes)
    memory.write(b"\1" * nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    kind: Any = {"mooncake": Mooncake, "nixl": Nixl}[order["engine"]]
    try:
        engine = kind(order["role"], address, nbytes)
    except ImportError as error:
        raise SystemExit(f"{error}: {sys.executable} -m pip install {order['install']}") from None
    if order["role"] == "hold":
        write_outcome(order["outcome"], {**engine.where(), "address": address})
        while sys.stdin.readline():
            pass
        return
    far = order["there"]
    size = order["piece_nbytes"]
    here, there = (
        [base + 2 * size * i for i in random.Random(seed).sample(range(order["pieces"]), order["pieces"])]
        for seed, base in ((1, address), (2, far["address"]))
    )
    engine.prepare(far, here, there, size)
    best, started = float("inf"), time.perf_counter()
    for number in range(order["rounds"] + 1):
        begin = time.perf_counter()
        engine.write()
        taken = time.perf_counter() - begin
        spent = time.perf_counter() - started
        if number or spent > order["budget_s"]:  # the first one warms up, unless it is all that there is time for
            best = min(best, taken)
            write_outcome(order["outcome"], {"scattered": best})
        if spent > order["budget_s"]:
            break
    engine.prepare(far, here[:1], there[:1], order["small_nbytes"])
    many = sorted(seconds_of(engine.write, order["small_rounds"], order["budget_s"] / 4))
    small = [many[int(quantile * (len(many) - 1))] for quantile in (0.5, 0.99)]
    write_outcome(order["outcome"], {"scattered": best, "small": small, "ready": True})


def seconds_of(call: Any, rounds: int, budget_s: float) -> list[float]:
    """Of each of so many calls, or as many as there is time for, the first ones left out."""
    warm = min(rounds // 10, 100)
    taken: list[float] = []
    end = time.perf_counter() + budget_s
    while len(taken) < warm + rounds and (len(taken) <= warm or time.perf_counter() < end):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return taken[warm:]


class Mooncake:
    """Mooncake's Transfer Engine over TCP."""

    def __init__(self, role: str, address: int, nbytes: int) -> None:
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise SystemExit("the Transfer Engine could not be initialised")
        if self._engine.register_memory(address, nbytes) != 0:
            raise SystemExit("the Transfer Engine did not register the memory")

    def where(self) -> dict[str, Any]:
        return {"name": f"127.0.0.1:{self._engine.get_rpc_port()}"}

    def prepare(self, far: dict[str, Any], here: list[int], there: list[int], size: int) -> None:
        self._call = (far["name"], here, there, [size] * len(here))

    def write(self) -> None:
        status = self._engine.batch_transfer_sync_write(*self._call)
        if status != 0:
            raise SystemExit(f"batch_transfer_sync_write gave {status}")


class Nixl:
    """NIXL with its UCX backend."""

    def __init__(self, role: str, address: int, nbytes: int) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._name = role
        self._agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")

    def where(self) -> dict[str, Any]:
        return {"metadata": base64.b64encode(self._agent.get_agent_metadata()).decode()}

    def prepare(self, far: dict[str, Any], here: list[int], there: list[int], size: int) -> None:
        name = self._agent.add_remote_agent(base64.b64decode(far["metadata"]))
        name = name.decode() if isinstance(name, bytes) else name
        local = self._agent.get_xfer_descs([(address, size, 0) for address in here], "DRAM")
        remote = self._agent.get_xfer_descs([(address, size, 0) for address in there], "DRAM")
        self._handle = self._agent.initialize_xfer("WRITE", local, remote, name)

    def write(self) -> None:
        state = self._agent.transfer(self._handle)
        while state == "PROC":
            time.sleep(0)
            state = self._agent.check_xfer_state(self._handle)
        if state != "DONE":
            raise SystemExit(f"the transfer ended with {state}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
