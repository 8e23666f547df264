"""What is measured of one model: rates, hits beside prefill, decode steps beside saves, and whether bytes are right."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from store_client.base import Store
from vllm_plugin.device.bench import limits
from vllm_plugin.device.bench.cache import Cache
from vllm_plugin.device.bench.models import PAGE_TOKENS, Model
from vllm_plugin.device.bench.moves import MeasureError, Moves
from vllm_plugin.device.bench.stack import Stack

DECODED = 64
"""Requests in a decode step."""
_PREFILLS = 3


@dataclass(frozen=True, slots=True)
class Hit:
    """What a prompt's hit takes, and what computing it would."""

    num_tokens: int
    load_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Rates in bytes a second; medians, except for p99 and for the limits, which are the best that was seen.

    Args:
        step_alone_ms, step_beside_ms: p99 of a decode step, alone and beside saves at full speed.
        save_beside: rate of those saves.
        load_cpu_s, save_cpu_s: processor seconds of all threads for a GiB.
        checked_nbytes: loaded bytes that were held against what was saved.
        locked_nbytes: of the pool, that the device copies from and to in place.
    """

    limits: limits.Limits
    load: float
    save: float
    both: float
    hits: tuple[Hit, ...]
    step_alone_ms: float
    step_beside_ms: float
    save_beside: float
    load_cpu_s: float
    save_cpu_s: float
    checked_nbytes: int
    locked_nbytes: int


def use(ordinal: int) -> torch.device:
    """The device, which is this thread's current one from now on."""
    device = torch.device("cuda", ordinal)
    torch.cuda.set_device(device)
    return device


def describe(device: torch.device) -> dict[str, str | int | float | None]:
    """For the report's machine."""
    found = torch.cuda.get_device_properties(device)
    return {"gpu": found.name, "gpu_memory_gib": round(found.total_memory / 2**30, 1)}


def measure(
    model: Model,
    store: Store,
    device: torch.device,
    *,
    num_tokens: int,
    hit_tokens: Sequence[int],
    rounds: int,
    num_steps: int,
    progress: Callable[[str], None],
) -> Figures:
    """Fill `store` with one request's pages out of device memory, and load them into another's blocks.

    Raises MeasureError where pages are lost or their bytes wrong.
    """
    page_nbytes = model.fmt.nbytes
    progress("plain copies")
    limit = limits.measure(device, page_nbytes, max(1, (1 << 30) // page_nbytes))
    progress(f"{num_tokens:,} tokens of KV")
    cache = Cache(model, device, num_tokens)
    with Moves(store, cache) as moves:
        progress("saves and loads")
        moves.save("kept")
        moves.check_pages("kept")
        locked = moves.wait_for_locks()
        checked = _check_load(moves, cache)
        saves = [_timed(lambda: moves.save("again"), prepare=lambda: moves.clear("again")) for _ in range(rounds)]
        loads = [_timed(lambda: moves.load("kept")) for _ in range(rounds)]
        both = [_timed(lambda: moves.both("kept", "again"), lambda: moves.clear("again")) for _ in range(rounds)]
        moves.clear("again")
        progress("prefill")
        longest = max(hit_tokens)
        stack = Stack(model, device, longest)
        hits = tuple(_hit(stack, moves, device, count, rounds) for count in hit_tokens)
        checked += _check_load(moves, cache)
        progress("decode steps beside saves")
        step = stack.decode(DECODED)
        alone = limits.milliseconds(device, step, num_steps)
        with _saving(moves) as saved:
            beside = limits.milliseconds(device, step, num_steps)
        alone += limits.milliseconds(device, step, num_steps)
    nbytes = cache.num_pages * page_nbytes
    return Figures(
        limits=limit,
        load=nbytes / statistics.median(one.wall_s for one in loads),
        save=nbytes / statistics.median(one.wall_s for one in saves),
        both=2 * nbytes / statistics.median(one.wall_s for one in both),
        hits=hits,
        step_alone_ms=float(np.percentile(alone, 99)),
        step_beside_ms=float(np.percentile(beside, 99)),
        save_beside=saved.rate(nbytes),
        load_cpu_s=statistics.median(one.cpu_s for one in loads) * 2**30 / nbytes,
        save_cpu_s=statistics.median(one.cpu_s for one in saves) * 2**30 / nbytes,
        checked_nbytes=checked,
        locked_nbytes=locked,
    )


@dataclass(frozen=True, slots=True)
class _Took:
    wall_s: float
    cpu_s: float


def _timed(work: Callable[[], object], prepare: Callable[[], object] | None = None) -> _Took:
    if prepare is not None:
        prepare()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return _Took(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def _check_load(moves: Moves, cache: Cache) -> int:
    """Load everything into zeroed blocks; the bytes, all of which must be those that were saved."""
    cache.forget()
    if cache.equal_nbytes():
        raise MeasureError("the blocks equal those that were saved before anything was loaded")
    moves.load("kept")
    nbytes = cache.num_pages * cache.fmt.nbytes
    if (equal := cache.equal_nbytes()) != nbytes:
        raise MeasureError(f"{nbytes - equal} of {nbytes} bytes that were loaded are not those that were saved")
    return nbytes


def _hit(stack: Stack, moves: Moves, device: torch.device, num_tokens: int, rounds: int) -> Hit:
    prefill_ms = limits.milliseconds(device, lambda: stack.prefill(num_tokens), _PREFILLS)
    num_pages = num_tokens // PAGE_TOKENS
    loads = [_timed(lambda: moves.load("kept", num_pages)).wall_s for _ in range(rounds)]
    return Hit(num_tokens, statistics.median(loads), statistics.median(prefill_ms) / 1e3)


class _Saved:
    """How far a thread has come that saves over and over."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.times = 0
        self.seconds = 0.0
        self.error: Exception | None = None

    def rate(self, nbytes: int) -> float:
        """Bytes a second, where each time so many were saved."""
        return self.times * nbytes / self.seconds


@contextlib.contextmanager
def _saving(moves: Moves) -> Iterator[_Saved]:
    """Save everything over and over, each time under other keys; the pool evicts what it has no room for."""
    saved = _Saved()

    def work() -> None:
        started = time.perf_counter()
        try:
            while not saved.ended.is_set() or not saved.times:
                moves.save(f"beside {saved.times}")
                saved.times += 1
        except Exception as error:
            saved.error = error
        saved.seconds = time.perf_counter() - started

    thread = threading.Thread(target=work, name="saves")
    thread.start()
    try:
        yield saved
    finally:
        saved.ended.set()
        thread.join()
    if saved.error is not None:
        raise saved.error
