"""Orders and answers as bytes, and cutting copies into slices, against byte-by-byte models."""

import ctypes
import errno
import mmap
import socket
from array import array
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.testing.memory import int64
from transfer.transports import vectors
from transfer.transports.base import FEW
from transfer.transports.passing import MARK_NBYTES
from transfer.transports.vectors import Pieces, Vector, copy_in, copy_out
from transfer.transports.wire import (
    BLOCK_NBYTES,
    HEADER_NBYTES,
    MAX_ORDER_PIECES,
    CopyOrder,
    CopyStatus,
    WireError,
    decode_answer,
    decode_columns,
    decode_order,
    encode_answer,
)

KEY = bytes(range(16))
sizes_lists = st.lists(st.integers(0, 50), max_size=30)


def parse(data, max_nbytes=1 << 20, columns=2):
    """What a receiver makes of an order."""
    if len(data) < BLOCK_NBYTES:
        raise WireError("a receiver waits for more")
    order = decode_order(data, max_nbytes)
    if len(data) < HEADER_NBYTES + order.pieces * columns * 8:
        raise WireError("a receiver waits for more")
    return order, [np.array(column) for column in decode_columns(order, data, columns)]


def test_an_order_comes_out_as_it_went_in():
    columns = int64(1, 2), int64(30, 40), int64(5, 6)
    order, decoded = parse(CopyOrder(7, KEY, 2, 70, place=9).encode(*columns), columns=3)
    assert order == CopyOrder(7, KEY, 2, 70, 9)
    assert [row.tolist() for row in decoded] == [[1, 2], [30, 40], [5, 6]]


@pytest.mark.parametrize("pieces", [1, FEW, 100])
def test_a_marked_order_has_its_mark_behind_what_is_attached(pieces):
    columns = np.arange(1, pieces + 1), np.ones(pieces, dtype=np.int64)
    order = CopyOrder(7, KEY, pieces, pieces)
    plain, marked = (order.encode(*columns, attachment=b"keys", mark=mark) for mark in (b"", b"m" * MARK_NBYTES))
    assert decode_order(marked, 1 << 20, 4) == CopyOrder(7, KEY, pieces, pieces, 0, 4, is_marked=True)
    assert not decode_order(plain, 1 << 20, 4).is_marked
    end = HEADER_NBYTES + 2 * 8 * pieces
    assert marked[end : end + 4 + MARK_NBYTES].tobytes() == b"keys" + b"m" * MARK_NBYTES


@pytest.mark.parametrize(
    "order, columns",
    [
        (CopyOrder(1, KEY, 0, 0), (int64(), int64())),
        (CopyOrder(1, KEY, MAX_ORDER_PIECES + 1, 1 << 20), (int64(), int64())),
        (CopyOrder(1, KEY, 1, (1 << 20) + 1), (int64(0), int64((1 << 20) + 1))),
        (CopyOrder(1, KEY, 2, 1), (int64(0, 0), int64(0, 1))),
        (CopyOrder(1, KEY, 2, 10), (int64(0, 0), int64(5, 6))),
        (CopyOrder(1, KEY, 2, 10), (int64(0, 0), int64(11, -1))),
        (CopyOrder(1, KEY, 2, 10), (int64(0, 0), int64(10, 0))),
        (CopyOrder(1, KEY, 2, 2), (int64(0, 0), int64(2**63 - 1, 3 - 2**63))),
        (CopyOrder(1, KEY, 3, 2), (int64(0, 0, 0), int64(2**62, 2**62, 2**63 - 1))),
        (CopyOrder(1, KEY, 1, 10), (int64(-1), int64(10))),
        (CopyOrder(1, KEY, 1, 10), (int64(0), int64(11))),
        (CopyOrder(1, KEY, 2, 20), (int64(5, -1), int64(10, 10))),
    ],
)
def test_an_order_that_cannot_be_is_refused(order, columns):
    with pytest.raises(WireError):
        parse(order.encode(*columns))


@pytest.mark.parametrize("status", CopyStatus)
def test_an_answer_comes_out_as_it_went_in(status):
    assert decode_answer(encode_answer(2**64 - 1, status)) == (2**64 - 1, status)


@given(sizes_lists, st.integers(1, 40), st.integers(1, 5))
def test_slices_are_the_same_copies_byte_for_byte(sizes, max_nbytes, max_pieces):
    nbytes = int64(*sizes)
    local, remote = 1000 + 100 * np.arange(len(sizes)), 90000 - 100 * np.arange(len(sizes))
    slices = list(Pieces.of(local, remote, nbytes).slices(max_nbytes, max_pieces))
    copied = [
        (a + i, b + i)
        for part in slices
        for a, b, n in zip(*np.array([part.local, part.remote, part.nbytes]).tolist(), strict=True)
        for i in range(n)
    ]
    wanted = [(int(a) + i, int(b) + i) for a, b, n in zip(local, remote, sizes, strict=True) for i in range(n)]
    assert copied == wanted
    assert all(part.total <= max_nbytes and len(part.nbytes) <= max_pieces for part in slices)
    assert all(min(part.nbytes) > 0 and part.total == sum(part.nbytes) for part in slices)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.lists(st.integers(1, 60), max_size=20))
def test_what_is_left_of_a_vector_after_any_steps(sizes, steps):
    addresses = 1000 * np.arange(1, len(sizes) + 1)
    vector = Vector.of(addresses, int64(*sizes))
    left = [int(a) + i for a, n in zip(addresses, sizes, strict=True) for i in range(n)]
    for step in steps:
        step = min(step, len(left))
        vector.advance(step)
        left = left[step:]
        assert [a + i for a, n in vector.pieces() for i in range(n)] == left
        assert vector.left == len(left)


def test_a_vector_goes_through_a_socket_in_as_many_steps_as_it_takes():
    rng = np.random.default_rng(1)
    source, target = rng.integers(0, 256, 3 << 20, dtype=np.uint8), np.zeros(3 << 20, dtype=np.uint8)
    cuts = np.sort(rng.choice(len(source), 3000, replace=False))
    sizes = np.diff(np.concatenate(([0], cuts, [len(source)])))
    sizes = sizes[sizes > 0]
    offsets = np.cumsum(sizes) - sizes
    out, into = (Vector.of(array.ctypes.data + offsets, sizes) for array in (source, target))
    here, there = socket.socketpair()
    with here, there:
        while into.left:
            for step in (lambda: out.left and out.send(here.fileno()), lambda: into.receive(there.fileno())):
                with suppress(BlockingIOError):
                    step()
        with pytest.raises(BlockingIOError):
            Vector.over(array("B", b"nothing")).receive(there.fileno())
    assert np.array_equal(source, target)


def test_a_diverted_vector_leaves_its_memory_alone():
    memory, scratch = np.zeros(100, dtype=np.uint8), np.ones(100, dtype=np.uint8)
    here, there = socket.socketpair()
    with here, there:
        vector = Vector.of(memory.ctypes.data + int64(0, 10, 50), int64(10, 10, 10))
        here.sendall(b"a" * 15)
        vector.receive(there.fileno())
        vector.divert(scratch.ctypes.data, first=0)
        here.sendall(b"b" * 15)
        while vector.left:
            vector.receive(there.fileno())
    assert bytes(memory) == b"a" * 15 + bytes(85)
    assert bytes(scratch[:10]) == b"b" * 10


@pytest.mark.parametrize("scale", [1, 4000, 300_000])
@pytest.mark.parametrize("forbidden", [False, True])
@pytest.mark.parametrize("units", [(3, 1, 2, 1, 1, 4, 2, 1, 1, 5), (1, 2) * vectors._MAX_RUNS], ids=["some", "many"])
def test_gathered_and_scattered_bytes_are_the_same(scale, forbidden, units, monkeypatch):
    """Few and many bytes, long pieces too, of some or many sizes; the kernel may be forbidden to read a process."""

    def refuse(*_):
        ctypes.set_errno(errno.EPERM)
        return -1

    if forbidden:
        monkeypatch.setattr(vectors._releasing_lock, "readv", refuse)
    sizes = [scale * n for n in units]
    places = 5 * scale * np.random.default_rng(1).permutation(len(sizes))
    source = np.random.default_rng(0).integers(0, 256, 5 * scale * len(sizes), dtype=np.uint8)
    ring, target = np.zeros(sum(sizes), dtype=np.uint8), np.zeros_like(source)
    for few in (3, len(sizes)):
        ring[:] = target[:] = 0
        nbytes = int64(*sizes[:few]) if few > FEW else sizes[:few]
        copy_in(ring.ctypes.data, source.ctypes.data + places[:few], nbytes)
        pieces = [(p, p + n) for p, n in zip(places[:few].tolist(), sizes[:few], strict=True)]
        wanted = b"".join(bytes(source[start:stop]) for start, stop in pieces)
        assert bytes(ring[: len(wanted)]) == wanted and not ring[len(wanted) :].any()
        copy_out(ring.ctypes.data, target.ctypes.data + places[:few], nbytes)
        for start, stop in pieces:
            assert np.array_equal(target[start:stop], source[start:stop])
            target[start:stop] = 0
        assert not target.any()


@pytest.mark.parametrize("at", [0, 3, 8], ids=["below", "between", "above"])
def test_pieces_are_scattered_wherever_the_source_lies(at):
    """`numpy` is told of all memory between its targets, of which the source may be part."""
    nbytes = 100_000
    memory = np.zeros((9, nbytes), dtype=np.uint8)
    memory[at] = np.random.default_rng(0).integers(0, 256, nbytes)
    source, rows = memory[at].copy(), [row for row in (7, 1, 5, 2, 6, 4) if row != at]
    sizes = np.full(len(rows), nbytes // len(rows))
    copy_out(memory[at].ctypes.data, memory.ctypes.data + nbytes * np.array(rows), sizes)
    for number, row in enumerate(rows):
        start = number * sizes[0]
        assert np.array_equal(memory[row, : sizes[0]], source[start : start + sizes[0]])
        memory[row, : sizes[0]] = 0
    assert np.array_equal(memory[at], source)
    memory[at] = 0
    assert not memory.any()


@pytest.fixture
def memory_at():
    """Makers of memory near an address that is free, as a heap and what was mapped are far from each other."""
    library, private_anonymous = ctypes.CDLL(None, use_errno=True), 0x22
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    made = []

    def memory_at(hint, nbytes):
        address = library.mmap(hint, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, private_anonymous, -1, 0)
        made.append((address, nbytes))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    yield memory_at
    for mapped in made:
        library.munmap(*mapped)


@pytest.mark.parametrize("size", [64 << 10, 128 << 10, 512 << 10])
def test_pieces_are_scattered_however_far_apart_they_are(memory_at, size):
    """An array has a limit of its size, which counts rows that overlap as if they did not."""
    source, near, far = (memory_at(hint, 2 * size) for hint in (1 << 39, 1 << 40, 1 << 46))
    assert far.ctypes.data - near.ctypes.data > 1 << 45, "the kernel put it elsewhere"
    source[:] = np.random.default_rng(0).integers(0, 256, 2 * size)
    places = int64(*(memory.ctypes.data + size for memory in (near, far)))
    copy_out(source.ctypes.data, places, int64(size, size))
    assert np.array_equal(near[size:], source[:size]) and np.array_equal(far[size:], source[size:])
    assert not near[:size].any() and not far[:size].any()


@given(
    pieces=st.lists(
        st.tuples(st.sampled_from([1, 3, 64, 4096, 40_000, 70_000]), st.integers(0, 5)), min_size=1, max_size=40
    ),
    place=st.integers(0, 40),
    seed=st.integers(0, 1 << 20),
    order=st.sampled_from(["up", "down", "by size", "any"]),
    is_list=st.booleans(),
)
def test_scattered_pieces_of_any_sizes_in_any_order_are_what_a_loop_would_make(pieces, place, seed, order, is_list):
    """The source lies before, behind or between them."""
    random = np.random.default_rng(seed)
    sizes = int64(*(size for size, _ in pieces))
    total = int(sizes.sum())
    ends = np.cumsum([size + gap for size, gap in pieces])
    offsets = ends - sizes
    start = 0 if place == 0 else int(ends[min(place, len(ends)) - 1])
    offsets[offsets >= start] += total
    memory = np.zeros(int(ends[-1]) + total, dtype=np.uint8)
    memory[start : start + total] = random.integers(1, 256, total)
    turns = {"up": offsets, "down": -offsets, "by size": sizes, "any": random.permutation(len(sizes))}
    chosen = turns[order].argsort(kind="stable")
    offsets, sizes, wanted, done = offsets[chosen], sizes[chosen], memory.copy(), start
    for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
        wanted[offset : offset + size] = memory[done : done + size]
        done += size
    columns = memory.ctypes.data + offsets, sizes
    copy_out(memory.ctypes.data + start, *(column.tolist() if is_list else column for column in columns))
    assert np.array_equal(memory, wanted)
