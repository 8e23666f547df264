"""Orders and answers as bytes, and cutting copies into slices, against byte-by-byte models."""

import socket
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.vectors import Pieces, Vector, copy_in, copy_out
from transfer.wire import (
    ANSWER_NBYTES,
    HEADER_NBYTES,
    MAX_ORDER_PIECES,
    Order,
    Status,
    WireError,
    decode_answer,
    decode_columns,
    decode_order,
    encode_answer,
)

KEY = bytes(range(16))
sizes_lists = st.lists(st.integers(0, 50), max_size=30)


def int64(*values):
    return np.array(values, dtype=np.int64)


def parse(data, max_nbytes=1 << 20, columns=2):
    """What a receiver makes of an order."""
    order = decode_order(bytes(data[:HEADER_NBYTES]), max_nbytes)
    rest = np.frombuffer(bytes(data[HEADER_NBYTES:]), dtype=np.uint8)
    if len(rest) != order.pieces * columns * 8:
        raise WireError("a receiver waits for more")
    return order, decode_columns(order, rest)


def test_an_order_comes_out_as_it_went_in():
    columns = int64(1, 2), int64(30, 40), int64(5, 6)
    order, decoded = parse(Order(7, KEY, 2, 70, place=9).encode(*columns), columns=3)
    assert order == Order(7, KEY, 2, 70, 9)
    assert [row.tolist() for row in decoded] == [[1, 2], [30, 40], [5, 6]]


@pytest.mark.parametrize(
    "order, columns",
    [
        (Order(1, KEY, 0, 0), (int64(), int64())),
        (Order(1, KEY, MAX_ORDER_PIECES + 1, 1 << 20), (int64(), int64())),
        (Order(1, KEY, 1, (1 << 20) + 1), (int64(0), int64((1 << 20) + 1))),
        (Order(1, KEY, 2, 1), (int64(0, 0), int64(0, 1))),
        (Order(1, KEY, 2, 10), (int64(0, 0), int64(5, 6))),
        (Order(1, KEY, 2, 10), (int64(0, 0), int64(11, -1))),
        (Order(1, KEY, 2, 10), (int64(0, 0), int64(10, 0))),
        (Order(1, KEY, 2, 2), (int64(0, 0), int64(2**63 - 1, 3 - 2**63))),
        (Order(1, KEY, 3, 2), (int64(0, 0, 0), int64(2**62, 2**62, 2**63 - 1))),
        (Order(1, KEY, 1, 10), (int64(-1), int64(10))),
        (Order(1, KEY, 1, 10), (int64(0), int64(11))),
        (Order(1, KEY, 2, 20), (int64(5, -1), int64(10, 10))),
    ],
)
def test_an_order_that_cannot_be_is_refused(order, columns):
    with pytest.raises(WireError):
        parse(order.encode(*columns))


@given(st.binary(max_size=120))
def test_no_bytes_pass_for_an_order_unless_they_make_sense(data):
    with suppress(WireError):
        order, columns = parse(data)
        assert columns[1].sum() == order.nbytes and columns.min() >= 0


@given(st.data())
def test_a_damaged_order_makes_sense_or_is_refused(data):
    sizes = data.draw(st.lists(st.integers(1, 1000), min_size=1, max_size=6))
    whole = bytearray(Order(1, KEY, len(sizes), sum(sizes)).encode(int64(*range(len(sizes))), int64(*sizes)).tobytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with suppress(WireError):
        order, columns = parse(whole)
        assert columns[1].min() >= 1 and columns[1].sum() == order.nbytes <= 1 << 20 and columns.min() >= 0


@given(st.binary(min_size=ANSWER_NBYTES, max_size=ANSWER_NBYTES))
def test_no_bytes_pass_for_an_answer_unless_a_receiver_says_them(data):
    with suppress(WireError):
        assert encode_answer(*decode_answer(data)) == data


@pytest.mark.parametrize("status", Status)
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
        for a, b, n in zip(part.local.tolist(), part.remote.tolist(), part.nbytes.tolist(), strict=True)
        for i in range(n)
    ]
    wanted = [(int(a) + i, int(b) + i) for a, b, n in zip(local, remote, sizes, strict=True) for i in range(n)]
    assert copied == wanted
    assert all(part.total <= max_nbytes and len(part.nbytes) <= max_pieces for part in slices)
    assert all(part.nbytes.min() > 0 and part.total == part.nbytes.sum() for part in slices)


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
            Vector.over(target).receive(there.fileno())
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


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_gathered_and_scattered_bytes_are_the_same(sizes):
    nbytes = int64(*sizes)
    source = np.random.default_rng(0).integers(0, 256, 40 * len(sizes), dtype=np.uint8)
    ring, target = np.zeros(sum(sizes), dtype=np.uint8), np.zeros_like(source)
    places = 40 * np.random.default_rng(1).permutation(len(sizes))
    copy_in(ring.ctypes.data, source.ctypes.data + places, nbytes)
    assert bytes(ring) == b"".join(bytes(source[p : p + n]) for p, n in zip(places, sizes, strict=True))
    copy_out(ring.ctypes.data, target.ctypes.data + places, nbytes)
    for p, n in zip(places, sizes, strict=True):
        assert np.array_equal(target[p : p + n], source[p : p + n]) and not target[p + n : p + 40].any()
