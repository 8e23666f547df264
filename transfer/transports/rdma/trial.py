"""Whether a card does what it says that it can: tried with numbers, over a connection with itself.

That is to read and fill memory of a device, and to let memory be read by a window, and no longer than that is there.
"""

from __future__ import annotations

import contextlib
import secrets
import time

import numpy as np
import numpy.typing as npt

from transfer.transports.base import Region, TransferError
from transfer.transports.cuda.copier import Copier
from transfer.transports.cuda.direct import DirectMemory
from transfer.transports.rdma.card import CELL_NBYTES, Card
from transfer.transports.rdma.keys import Keys
from transfer.transports.rdma.pair import Pair
from transfer.transports.rdma.queue_pair import Chain
from transfer.transports.rdma.verbs import Queue
from transfer.transports.rdma.windows import Windows
from transfer.transports.rdma.work import Read
from transfer.transports.vectors import Pieces, address_of

TRIED_NBYTES = 64 << 10
WINDOW_PATIENCE_S = 1.0
"""A card that does not answer itself so long has no windows for us; an instance that starts waits for it."""
_POLL_S = 0.001
_REQUESTS = 2
"""Of a queue pair, at a time."""


def try_out(card: Card, memory: DirectMemory, address: int) -> None:
    """Have the card read a number at `address`, memory of the device that it was told of, and write one behind it.

    Raises TransferError with what did not work, OSError.
    """
    what = f"{card.rail.device} does not reach GPU {memory.place.device}"
    with contextlib.ExitStack() as stack:
        copier = Copier(memory.place.driver, memory.place.device)
        stack.callback(copier.close)
        asking, queue, windows = _connected(stack, card)
        cells, number, place = card.cells, secrets.randbits(64), card.cells.place()
        _, read = card.keys()
        opened, keys = windows.open(_number_at(address))
        _copy(copier, np.array([number], dtype=np.uint64), to=address)
        patience_s = 2 * card.settings.lost_after_s
        _read(card, queue, asking, address, keys if opened else read, cells.address_of(place), what, patience_s)
        if not cells.holds(place, number):
            raise TransferError(f"{what}: it read something else than what is there")
        _read(card, queue, asking, cells.address, read, address + CELL_NBYTES, what, patience_s)
        memory.settle()
        found = np.zeros(1, dtype=np.uint64)
        _copy(copier, found, at=address + CELL_NBYTES)
        if int(found[0]) != cells.number:
            raise TransferError(f"{what}: what it wrote is not there")


def without_windows(card: Card) -> str:
    """Why peers cannot read by windows over this card, which has them; empty where they can."""
    what = "it does not read by a window"
    number, place = np.array([secrets.randbits(64)], dtype=np.uint64), card.cells.place()
    region, here = Region(address_of(number), CELL_NBYTES), card.cells.address_of(place)
    try:
        with contextlib.ExitStack() as stack:
            card.register(region, by_window=True)
            stack.callback(card.unregister, region)
            asking, queue, windows = _connected(stack, card)
            opened, keys = windows.open(_number_at(region.address))
            _read(card, queue, asking, region.address, keys, here, what, WINDOW_PATIENCE_S)
            if not card.cells.holds(place, int(number[0])):
                return f"{what}: it read something else than what is there"
            windows.close(opened)
            number[0] ^= np.uint64(1)
            with contextlib.suppress(TransferError):
                _read(card, queue, asking, region.address, keys, here, what, WINDOW_PATIENCE_S)
                return "it reads by a window that is over"
    except (TransferError, OSError) as error:
        return str(error)
    return ""


def _connected(stack: contextlib.ExitStack, card: Card) -> tuple[Pair, Queue, Windows]:
    """A queue pair that reads, with its completion queue, and the windows of the one that answers. Raises OSError."""
    queues, pairs = [], []
    for _ in range(2):
        queues.append(card.completion_queue(2 * _REQUESTS))
        stack.callback(queues[-1].close)
        pairs.append(Pair(card, queues[-1], _REQUESTS))
        stack.callback(pairs[-1].close)
    asking, answering = pairs
    answering.serve(asking.end, 0)
    asking.read_from(answering.end, 0)
    windows = Windows(card, answering, queues[1])
    stack.callback(windows.drop)
    return asking, queues[0], windows


def _number_at(address: int) -> Pieces:
    return Pieces([address], [address], [CELL_NBYTES], CELL_NBYTES)


def _copy(copier: Copier, numbers: npt.NDArray[np.uint64], *, at: int = 0, to: int = 0) -> None:
    """Between the host and the device."""
    source, target = (at, numbers.ctypes.data) if at else (numbers.ctypes.data, to)
    columns = (np.array([value], dtype=np.int64) for value in (source, target, numbers.nbytes))
    copier.run(copier.plan_each(*columns))


def _read(
    card: Card, queue: Queue, pair: Pair, there: int, keys: Keys, here: int, what: str, patience_s: float
) -> None:
    """One number, by these keys. Raises TransferError, OSError."""
    filled, _ = card.keys()
    key, lkey = keys.key_of(there, CELL_NBYTES), filled.key_of(here, CELL_NBYTES)
    assert key is not None and lkey is not None
    chain = Chain(1, 1)
    chain.read(1, Read(there, key, CELL_NBYTES, [(here, CELL_NBYTES, lkey)]))
    pair.post(chain)
    deadline = time.monotonic() + patience_s
    while not (found := queue.poll(1)):
        if time.monotonic() >= deadline:
            raise TransferError(f"{what}: it does not answer")
        time.sleep(_POLL_S)
    if not found[0].is_success:
        raise TransferError(f"{what}: {found[0].status_str}")
