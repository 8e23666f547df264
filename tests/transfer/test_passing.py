"""Checksums that travel with the bytes: what a receiver knows of a batch whose orders came, and what it does not."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from transfer.testing.memory import int64
from transfer.transports.base import Grant
from transfer.transports.memory import Revocable
from transfer.transports.passing import MARK_NBYTES, Mark, Passed, Passing, decode_mark, joined, marker
from transfer.transports.vectors import Pieces

PEER, OTHER = b"p" * 16, b"o" * 16
BATCH = 3
WANTED = int64(100, 200, 210, 400), int64(10, 10, 5, 20)
"""Of which the second and the third touch."""
ORDERS = {0: ([100], [10]), 10: ([200, 210], [10, 5]), 25: ([400], [20])}


def note(passed: Passed, offset: int, pieces: object = None, *, peer: bytes = PEER, batch: int = BATCH) -> None:
    passed.note(peer, Mark(batch, offset, 0), ORDERS[offset] if pieces is None else pieces)


def wrong(passed: Passed, offset: int) -> None:
    passed.note(PEER, Mark(BATCH, offset, 0), None)


def is_whole(passed: Passed, peer: bytes = PEER, batch: int = BATCH) -> bool:
    return passed.is_whole(peer, batch, *WANTED)


@pytest.fixture
def passed() -> Passed:
    return Passed()


@pytest.mark.parametrize("sequence", [(0, 10, 25), (25, 0, 10), (10, 25, 0, 10, 0)])
def test_a_batch_is_whole_in_whichever_sequence_its_orders_come_and_one_that_comes_twice_counts_once(passed, sequence):
    for offset in sequence:
        note(passed, offset)
    assert is_whole(passed)


@pytest.mark.parametrize("missing", ORDERS)
def test_a_batch_of_which_an_order_is_missing_is_not(passed, missing):
    for offset in ORDERS:
        if offset != missing:
            note(passed, offset)
    assert not is_whole(passed)


def test_nothing_is_known_of_a_batch_of_which_nothing_came(passed):
    assert not is_whole(passed)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_an_order_that_was_wrong_once_stays_wrong(passed, first, again):
    """It may have been written after the one that was right."""
    for offset in ORDERS:
        note(passed, offset)
    if first:
        passed = Passed()
        wrong(passed, 10)
        for offset in ORDERS:
            note(passed, offset)
    else:
        wrong(passed, 10)
    if again:
        note(passed, 10)
    assert not is_whole(passed)


@pytest.mark.parametrize(
    "offset, pieces",
    [
        (10, ([200], [15])),
        (10, ([200, 210], [10, 4])),
        (10, ([210, 200], [5, 10])),
        (10, ([201, 211], [10, 5])),
        (10, ([200, 210, 500], [10, 5, 1])),
        (25, ([399], [20])),
        (9, ([200, 210], [10, 5])),
    ],
    ids=["whole: one piece", "short", "in another order", "beside", "long", "beside again", "misnamed"],
)
def test_what_is_expected_is_where_each_byte_of_the_batch_is_and_not_in_how_many_pieces_it_came(passed, offset, pieces):
    for other in ORDERS:
        if other != offset and not (offset == 9 and other == 10):
            note(passed, other)
    note(passed, offset, pieces)
    assert is_whole(passed) == (pieces == ([200], [15]))


def test_what_another_peer_says_or_says_of_another_batch_counts_for_nothing(passed):
    for offset in ORDERS:
        note(passed, offset, peer=OTHER)
        note(passed, offset, batch=BATCH + 1)
    assert not is_whole(passed)
    assert is_whole(passed, OTHER) and is_whole(passed, batch=BATCH + 1)


def test_a_batch_is_asked_for_once(passed):
    """What comes again after that has to come whole."""
    for offset in ORDERS:
        note(passed, offset)
    assert is_whole(passed) and not is_whole(passed)
    note(passed, 0)
    assert not is_whole(passed)


def test_of_more_than_a_peer_may_make_this_side_keep_nothing_is_known(passed, monkeypatch):
    """What was asked for makes room."""
    monkeypatch.setattr("transfer.transports.passing.MAX_NOTED", 4 * 33)
    passed = Passed()
    for batch in (10, 11):
        for offset in ORDERS:
            note(passed, offset, batch=batch)
            passed.note(PEER, Mark(batch, offset, 0), None)
    assert [len(orders) for orders in passed._batches.values()] == [3, 1]
    for offset in ORDERS:
        note(passed, offset)
    assert not is_whole(passed) and not is_whole(passed, batch=10) and not is_whole(passed, batch=11)
    for _ in range(9):
        for offset in ORDERS:
            note(passed, offset)
        assert is_whole(passed)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    gaps=st.lists(st.booleans(), min_size=12, max_size=12),
    max_nbytes=st.integers(1, 80),
    max_pieces=st.integers(1, 4),
    spoilt=st.none() | st.integers(0, 10**6),
    seed=st.integers(0, 99),
)
def test_a_batch_that_was_cut_anyhow_is_whole_if_no_byte_is_wrong(sizes, gaps, max_nbytes, max_pieces, spoilt, seed):
    """From a stage, where its bytes follow each other, to pieces of which some touch."""
    nbytes = int64(*sizes)
    stage = np.random.default_rng(seed).integers(0, 256, int(nbytes.sum()), dtype=np.uint8)
    received = stage.copy()
    if spoilt is not None:
        received[spoilt % len(received)] ^= 1
    local = stage.ctypes.data + nbytes.cumsum() - nbytes
    remote = 5000 + nbytes.cumsum() - nbytes + np.cumsum(gaps[: len(sizes)])
    mark = marker(7, stage.ctypes.data, 0)
    held = Revocable(Grant(b"k" * 16, int64(), int64()))
    parts = list(Pieces.of(local, remote, nbytes).slices(max_nbytes, max_pieces))
    np.random.default_rng(seed).shuffle(parts)
    for part in parts:
        data = mark(part)
        assert len(data) == MARK_NBYTES
        passing = Passing(held, PEER, decode_mark(data), part.remote, part.nbytes)
        start = int(part.local[0]) - stage.ctypes.data
        middle = start + part.total // 2
        for seen in (received[start:middle], received[middle : start + part.total]):
            passing.see(memoryview(seen))
        passing.note()
    assert held.passed.is_whole(PEER, 7, remote, nbytes) == (spoilt is None)


def test_where_an_order_went_is_remembered_though_the_next_one_is_read_into_the_same_memory():
    held, said = Revocable(Grant(b"k" * 16, int64(), int64())), int64(100, 110, 3, 4)
    passing = Passing(held, PEER, Mark(BATCH, 0, xxhash.xxh3_64_intdigest(b"of seven")), said[:2], said[2:])
    passing.see(memoryview(b"of seven"))
    said[:] = 200, 300, 1, 1
    passing.note()
    assert held.passed.is_whole(PEER, BATCH, int64(100, 110), int64(3, 4))


def test_a_mark_has_the_digest_of_its_bytes_and_their_place():
    stage = np.arange(200, dtype=np.uint8)
    start = stage.ctypes.data
    mark = decode_mark(marker(5, start, 1000)(Pieces([start + 30, start + 40], [0, 90], [10, 60], 70)))
    assert mark == Mark(5, 1030, xxhash.xxh3_64_intdigest(stage[30:100]))


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=12))
def test_joined_pieces_are_the_same_bytes_in_the_same_order(pieces):
    sizes = int64(*(size for size, _ in pieces))
    addresses = sizes.cumsum() - sizes + np.cumsum([gap for _, gap in pieces])
    found = joined(addresses, sizes)

    def places(starts, lengths):
        return [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]

    assert places(*found) == places(addresses, sizes)
    assert (found[0][1:] != found[0][:-1] + found[1][:-1]).all()
