"""What the `rdma` transport asks of a card, and of which one: without any."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated.verbs import Request, posted

from transfer.control.handshake import Identity
from transfer.transports import registry
from transfer.transports.base import FEW, Region, TransportOptions, Unavailable
from transfer.transports.memory import Memory
from transfer.transports.rdma import abi, opened, verbs
from transfer.transports.rdma.keys import MAX_REGIONS, Keys, decode_keys
from transfer.transports.rdma.pair import End, ack_timeout, decode_end
from transfer.transports.rdma.queue_pair import Chain
from transfer.transports.rdma.work import FewReads, Work, plan
from transfer.transports.vectors import Pieces
from transfer.transports.wire import WireError

THERE = [(Region(0x1000, 0x800), 7), (Region(0x1800, 0x400), 8), (Region(0x4000, 0x1000), 9)]
HERE = [(Region(0x9000, 0x800), 3), (Region(0x9800, 0x800), 4), (Region(0xF000, 0x40), 5)]


def pieces_of(rows: list[tuple[int, int, int]]) -> Pieces:
    """Of (address there, address here, size)."""
    there, here, nbytes = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return Pieces(there, here, nbytes, int(nbytes.sum()))


def reads_of(work: Work | FewReads, most: int = 7, room_nbytes: int = 1 << 40) -> list[Request]:
    """As they are posted, some at a time."""
    found: list[Request] = []
    chain = Chain(most, 16)
    while len(found) < len(work):
        chain.begin()
        start = len(found)
        nbytes = work.fill(chain, 1 + start, start, most, room_nbytes)
        found += posted(chain)
        batch = found[start:]
        sizes = [sum(size for _, size, _ in request.ranges) for request in batch]
        assert len(batch) == chain.count <= most and nbytes == sum(sizes) and sum(sizes[:-1]) < room_nbytes
        assert [request.is_signaled for request in batch] == [False] * (len(batch) - 1) + [True]
        assert len(batch) == most or nbytes >= room_nbytes or len(found) == len(work)
    assert [request.number for request in found] == list(range(1, 1 + len(work)))
    return found


def moved(work: Work | FewReads, room_nbytes: int) -> dict[int, tuple[int, int, int]]:
    """Of each byte here from where it comes, and the keys that are used for it."""
    found = dict[int, tuple[int, int, int]]()
    for read in reads_of(work, room_nbytes=room_nbytes):
        address = read.address
        for target, nbytes, key in read.ranges:
            for i in range(nbytes):
                assert target + i not in found
                found[target + i] = address + i, read.key, key
            address += nbytes
    return found


def key_of(keyed: list[tuple[Region, int]], address: int) -> int:
    return next(key for region, key in keyed if 0 <= address - region.address < region.nbytes)


@st.composite
def some_pieces(draw: st.DrawFn) -> Pieces:
    """Pieces that do not overlap here; there each lies in one region, here in any that touch."""
    rows, place = [], 0x9000
    for _ in range(draw(st.integers(1, 30))):
        place += draw(st.sampled_from([0, 0, 1, 50]))
        nbytes = draw(st.sampled_from([1, 2, 40, 64, 300]))
        region, _ = draw(st.sampled_from(THERE))
        follows = rows and draw(st.booleans())
        start = rows[-1][0] + rows[-1][2] if follows else region.address + draw(st.integers(0, region.nbytes - nbytes))
        if place + nbytes > 0xA000 or not any(0 <= start - r.address <= r.nbytes - nbytes for r, _ in THERE):
            continue
        rows.append((start, place, nbytes))
        place += nbytes
    return pieces_of(draw(st.permutations(rows or [(0x1000, 0x9000, 8)])))


@given(
    some_pieces(), st.sampled_from([16, 100, 1 << 20]), st.sampled_from([1, 3, 16]), st.sampled_from([1, 100, 1 << 40])
)
def test_every_byte_is_read_once_with_the_keys_of_its_regions_and_within_the_limits(
    pieces, max_nbytes, max_ranges, room_nbytes
):
    expected = {}
    for source, target, nbytes in zip(pieces.local, pieces.remote, pieces.nbytes, strict=True):
        for i in range(int(nbytes)):
            a, b = int(source) + i, int(target) + i
            expected[b] = a, key_of(THERE, a), key_of(HERE, b)
    few = [column[:FEW].tolist() for column in (pieces.local, pieces.remote, pieces.nbytes)]
    for form in (pieces, Pieces(*few, sum(few[2]))):
        work = plan(form, Keys.of(THERE), Keys.of(HERE), max_nbytes, max_ranges)
        assert work is not None
        told = {b + i for b, n in zip(form.remote, form.nbytes, strict=True) for i in range(int(n))}
        assert moved(work, room_nbytes) == {target: found for target, found in expected.items() if target in told}
        for read in reads_of(work):
            nbytes = sum(size for _, size, _ in read.ranges)
            assert len(read.ranges) <= max_ranges and nbytes <= 2 * max_nbytes


def test_what_follows_on_one_side_or_both_becomes_one_request():
    def requests(rows: list[tuple[int, int, int]]) -> list[int]:
        work = plan(pieces_of(rows), Keys.of(THERE), Keys.of(HERE), 1 << 20, 4)
        assert work is not None
        return [len(read.ranges) for read in reads_of(work)]

    assert requests([(0x4000 + 16 * i, 0x9000 + 16 * i, 16) for i in range(10)]) == [1]
    assert requests([(0x4000 + 16 * i, 0x9000 + 32 * i, 16) for i in range(10)]) == [4, 4, 2]
    assert requests([(0x4000 + 32 * i, 0x9000 + 16 * i, 16) for i in range(10)]) == [1] * 10
    assert requests([(0x17F0, 0x9000, 16), (0x1800, 0x9010, 16)]) == [1, 1], "two regions have two keys"
    assert requests([(0x4000, 0x97F0, 32)]) == [2], "a granted range may lie in two regions"


@pytest.mark.parametrize("row", [(0x3FFF, 0x9000, 8), (0x1BFF, 0x9000, 2), (0x4000, 0x9FFF, 2), (0x4000, 0x8FFF, 2)])
def test_what_lies_in_no_region_is_not_planned(row):
    assert plan(pieces_of([(0x4000, 0x9000, 8)]), Keys.of(THERE), Keys.of(HERE), 1 << 20, 4) is not None
    assert plan(pieces_of([row]), Keys.of(THERE), Keys.of(HERE), 1 << 20, 4) is None
    assert plan(pieces_of([row]), Keys.of([]), Keys.of(HERE), 1 << 20, 4) is None
    address, target, nbytes = row
    assert plan(Pieces([address], [target], [nbytes], nbytes), Keys.of(THERE), Keys.of(HERE), 1 << 20, 4) is None


def test_keys_travel_of_the_regions_that_are_used():
    told = decode_keys(Keys.of(THERE).encode([0x4010, 0x1801, 0x4020]))
    assert list(zip(told.starts, told.sizes, told.keys, strict=True)) == [(0x1800, 0x400, 8), (0x4000, 0x1000, 9)]
    assert len(decode_keys(Keys.of(THERE).encode([0x10])).starts) == 0
    many = Keys.of((Region(16 * i, 8), i) for i in range(1, MAX_REGIONS + 10))
    assert len(decode_keys(many.encode(many.starts)).starts) == MAX_REGIONS


@given(
    st.lists(st.tuples(st.sampled_from([0x1000, 0x4000]), st.integers(0, 0x3C0), st.integers(1, 0x40)), min_size=1),
    st.integers(0x80, 0x800),
)
def test_windows_are_no_larger_than_a_card_binds_and_each_piece_lies_in_one(rows, most):
    """Pieces that overlap are no more than an order holds, which is less than that."""
    rows, left = list(rows), most
    kept = [(start + offset, nbytes) for start, offset, nbytes in rows if (left := left - nbytes) >= 0]
    kept = kept or [(0x1000, 8)]
    addresses, sizes = (np.array(column, dtype=np.int64) for column in zip(*kept, strict=True))
    keys = Keys.of(THERE)
    spans = keys.spans(addresses, sizes, most)
    told = decode_keys(Keys.of((Region(address, nbytes), 1) for _, address, nbytes in spans).encode(addresses))
    assert told.covers(addresses, sizes) and len(told.starts) == len(spans), "each is of use"
    for index, address, nbytes in spans:
        region, _ = THERE[index]
        assert 0 < nbytes <= most and region.address <= address <= region.address + region.nbytes - nbytes
    whole = keys.spans(addresses, sizes, 1 << 31)
    assert len(whole) == len({index for index, _, _ in spans})
    if all(nbytes <= most for _, _, nbytes in whole):
        assert spans == whole


def keyed(*rows: tuple[int, int, int]) -> bytes:
    return np.array(rows, dtype="<u8").tobytes()


@pytest.mark.parametrize(
    "data",
    [
        b"x", bytes(24), keyed((1, 0, 1)), keyed((1 << 63, 1, 1)), keyed((1, 1 << 63, 1)), keyed((1, 1, 1 << 32)),
        keyed((8, 8, 1), (15, 8, 1)), keyed((16, 8, 1), (8, 8, 1)),
    ],
)  # fmt: skip
def test_keys_that_no_sender_sends_are_refused(data):
    assert len(decode_keys(keyed((8, 8, 1), (16, 8, 1))).keys) == 2
    with pytest.raises(WireError):
        decode_keys(data)


def test_an_end_of_a_queue_pair_travels_and_one_that_is_none_is_refused():
    end = End(0xABCDEF, 0x123456, 7, 5, 16, bytes(range(16)))
    assert decode_end(end.encode()) == end
    for wrong in (
        End(1 << 24, 0, 0, 5, 16, bytes(16)), End(0, 1 << 24, 0, 5, 16, bytes(16)), End(0, 0, 0, 0, 16, bytes(16)),
        End(0, 0, 0, 6, 16, bytes(16)), End(0, 0, 0, 5, 0, bytes(16)),
    ):  # fmt: skip
        with pytest.raises(WireError):
            decode_end(wrong.encode())
    with pytest.raises(WireError):
        decode_end(end.encode()[:-1])


@pytest.mark.parametrize(
    "lost_after_s, retries, code", [(5.0, 7, 17), (10.0, 7, 18), (10.0, 3, 19), (1e-9, 7, 1), (1e9, 7, 31)]
)
def test_a_card_says_again_what_is_not_acknowledged_for_half_to_all_of_the_time(lost_after_s, retries, code):
    assert ack_timeout(lost_after_s, retries) == code


@pytest.mark.parametrize(
    "lacks, says", [("library", "apt-get install libibverbs1"), ("card", "there is no RDMA card")]
)
def test_where_something_is_missing_the_others_serve_and_one_line_says_what(monkeypatch, caplog, lacks, says):
    monkeypatch.setattr(opened, "rails", lambda: ["a card"] if lacks == "library" else [])
    verbs.library.cache_clear()
    monkeypatch.setattr(abi, "LIBRARY", "libibverbs-that-is-not-there.so.1")
    if lacks == "card":
        monkeypatch.setattr(abi, "loaded", lambda: pytest.fail("the library is not needed"))
    options = TransportOptions(Identity(), hosts=("127.0.0.1",))
    for _ in range(2):
        with registry.make_transports(["rdma", "tcp"], Memory(), options) as made:
            assert list(made.listen()) == ["tcp"]
    (record,) = caplog.records
    assert "transport rdma is left out: " in record.getMessage() and says in record.getMessage()
    with registry.make_transports(["rdma"], Memory(), options) as made, pytest.raises(Unavailable, match="rdma: "):
        made.connect({}, deadline_s=1)
