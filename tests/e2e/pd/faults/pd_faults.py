"""A plugin of vLLM and SGLang that lets a test spoil or stop the transfers of one server while it runs.

A fault is on while a file of its name is in the folder `PD_FAULTS`; `NAME.seen` appears beside it once it has had its
effect. `batches.sent` has one line for each batch: first layer, number of layers, first token, stop token.

| fault | of | effect |
|---|---|---|
| falsify | prefill | what is sent is not what was computed, and its checksums are those of the wrong bytes |
| hold | prefill | the first batch goes out, unless it is all there is; others wait |
| corrupt | decode | every batch has one wrong byte when it has landed |
| corrupt-once | decode | the first batch alone |
| fail | SGLang | with the probability in the file, what SGLang's scheduler is told of a transfer is that it failed |
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

HOLD_LIMIT_S = 300.0
SLEEP_MS = 10


def register_vllm() -> None:
    _spare_the_cores()
    register()


def register_sglang() -> None:
    """SGLang has the last fault itself, for the whole life of a server."""
    from sglang.srt.disaggregation import utils
    from sglang.srt.environ import envs

    faults = _Faults(Path(os.environ["PD_FAULTS"]))
    poll = utils._poll_with_failure_injection

    def faulty_poll(pollers: Any) -> Any:
        with envs.SGLANG_TEST_DISAGG_FAILURE_PROB.override(faults.value("fail")):
            return poll(pollers)

    utils._poll_with_failure_injection = faulty_poll
    register()


def register() -> None:
    import transfer.fetching as fetching
    import transfer.serving as serving

    faults = _Faults(Path(os.environ["PD_FAULTS"]))
    send, check = serving._send, fetching._check

    def faulty_send(visitor: Any, peer: Any, order: Any, block_tables: Any, *rest: Any) -> Any:
        if faults.is_on("hold"):
            whole = (len(visitor.pairings[0][1].layers), 0, order.granted.tables[0].stop_token)
            faults.hold((order.batch.num_layers, order.batch.first_token, order.batch.stop_token) == whole)
        batch = order.batch
        if faults.is_on("falsify") and not visitor.layout.sections[batch.section].is_whole:
            own, pairing = visitor.pairings[batch.section]
            tables = block_tables[own], order.granted.tables[batch.section].block_ids
            copies = pairing.copies(batch.layers, batch.first_token, batch.stop_token, *tables)
            for address, nbytes in zip(copies.source.tolist(), copies.nbytes.tolist(), strict=True):
                _elements(address, nbytes)[:] = _elements(address, nbytes)[::-1].copy()
            faults.note("falsify")
        sent = send(visitor, peer, order, block_tables, *rest)
        faults.record(batch)
        return sent

    def faulty_check(origin: Any, landed: Any, tables: Any, page_tokens: int, *rest: Any) -> Any:
        if faults.is_on("corrupt") or faults.take("corrupt-once"):
            pairing, part = origin.pairings[landed.section][1], landed.part
            table = tables[landed.section].block_ids, pairing.checksum_tokens(page_tokens)
            pages = pairing.destination_pages(part.layers, part.first_token, part.stop_token, *table)
            _bytes(int(pages.addresses[0]), 1)[0] ^= 1
            faults.note("corrupt")
        return check(origin, landed, tables, page_tokens, *rest)

    serving._send, fetching._check = faulty_send, faulty_check


def _spare_the_cores() -> None:
    """Let vLLM's processes sleep while they wait, for each other or for a transfer.

    They spin for a second after every message, and an engine that waits for a transfer steps a thousand times a second.
    On two cores that leaves the instance that computes next to nothing: it was seen to wait half a minute for a core.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.v1.engine.core import EngineCoreProc

    wait, step = SpinCondition.wait, EngineCoreProc._process_engine_step

    def sleepy_wait(self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = 0
        # Of two messages within a millisecond vLLM announces the first alone; it would see the second while it spins.
        wait(self, SLEEP_MS if timeout_ms is None else min(timeout_ms, SLEEP_MS))

    def sleepy_step(self: Any) -> bool:
        has_computed: bool = step(self)
        if not has_computed:
            time.sleep(SLEEP_MS / 1000)
        return has_computed

    SpinCondition.wait, EngineCoreProc._process_engine_step = sleepy_wait, sleepy_step


class _Faults:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def is_on(self, kind: str) -> bool:
        return (self._folder / kind).exists()

    def value(self, kind: str) -> float:
        """The number in its file, 0 while it is off."""
        try:
            return float((self._folder / kind).read_text())
        except (FileNotFoundError, ValueError):
            return 0.0

    def take(self, kind: str) -> bool:
        """Whether it is on; from now on it is not."""
        try:
            (self._folder / kind).unlink()
        except FileNotFoundError:
            return False
        return True

    def note(self, kind: str) -> None:
        (self._folder / f"{kind}.seen").touch()

    def record(self, batch: Any) -> None:
        with open(self._folder / "batches.sent", "a") as file:
            file.write(f"{batch.first_layer} {batch.num_layers} {batch.first_token} {batch.stop_token}\n")

    def hold(self, is_whole: bool) -> None:
        if not is_whole and not (self._folder / "hold.passed").exists():
            (self._folder / "hold.passed").touch()
            return
        self.note("hold")
        end = time.monotonic() + HOLD_LIMIT_S
        while self.is_on("hold") and time.monotonic() < end:
            time.sleep(0.02)


def _bytes(address: int, nbytes: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _elements(address: int, nbytes: int) -> Any:
    """Numbers of four bytes, as float32 is."""
    return _bytes(address, nbytes).view(np.uint32)
