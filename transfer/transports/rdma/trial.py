"""Whether a card reads and fills memory of a device: tried with two numbers, over a connection with itself."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from transfer.transports.base import TransferError
from transfer.transports.cuda.copier import Copier
from transfer.transports.cuda.direct import DirectMemory
from transfer.transports.rdma.card import CELL_NBYTES, Card
from transfer.transports.rdma.pair import Pair
from transfer.transports.rdma.verbs import binding
from transfer.transports.rdma.work import Read

TRIED_NBYTES = 64 << 10
_POLL_S = 0.001


def try_out(card: Card, memory: DirectMemory, address: int) -> None:
    """Have the card read a number at `address`, memory of the device that it was told of, and write one behind it.

    Raises TransferError with what did not work, OSError.
    """
    what = f"{card.rail.device} does not reach GPU {memory.place.device}"
    with contextlib.ExitStack() as stack:
        copier = Copier(memory.place.driver, memory.place.device)
        stack.callback(copier.close)
        queue = card.completion_queue(4)
        stack.callback(queue.close)
        asking, answering = (stack.enter_context(_pair(card, queue)) for _ in range(2))
        answering.serve(asking.end, 0)
        asking.read_from(answering.end, 0)

        cells, number, place = card.cells, secrets.randbits(64), card.cells.place()
        _copy(copier, np.array([number], dtype=np.uint64), to=address)
        _read(card, queue, asking, address, cells.address_of(place), what)
        if not cells.holds(place, number):
            raise TransferError(f"{what}: it read something else than what is there")
        _read(card, queue, asking, cells.address, address + CELL_NBYTES, what)
        memory.settle()
        found = np.zeros(1, dtype=np.uint64)
        _copy(copier, found, at=address + CELL_NBYTES)
        if int(found[0]) != cells.number:
            raise TransferError(f"{what}: what it wrote is not there")


@contextlib.contextmanager
def _pair(card: Card, queue: Any) -> Iterator[Pair]:
    made = Pair(card, queue, 1)
    try:
        yield made
    finally:
        made.close()


def _copy(copier: Copier, numbers: npt.NDArray[np.uint64], *, at: int = 0, to: int = 0) -> None:
    """Between the host and the device."""
    source, target = (at, numbers.ctypes.data) if at else (numbers.ctypes.data, to)
    columns = (np.array([value], dtype=np.int64) for value in (source, target, numbers.nbytes))
    copier.run(copier.plan_each(*columns))


def _read(card: Card, queue: Any, pair: Pair, there: int, here: int, what: str) -> None:
    """One number. Raises TransferError, OSError."""
    filled, read = card.keys()
    key, lkey = read.key_of(there, CELL_NBYTES), filled.key_of(here, CELL_NBYTES)
    assert key is not None and lkey is not None
    request = pair.request(1, Read(there, key, CELL_NBYTES, [(here, CELL_NBYTES, lkey)]))
    request.send_flags = int(binding().SendFlags.SIGNALED)
    pair.queue.post_send([request])
    deadline = time.monotonic() + 2 * card.settings.lost_after_s
    while not (found := queue.poll(1)):
        if time.monotonic() >= deadline:
            raise TransferError(f"{what}: it does not answer")
        time.sleep(_POLL_S)
    if not found[0].is_success:
        raise TransferError(f"{what}: {found[0].status_str}")
