"""Pages that lie side by side in the file of a disk are moved by one call."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_connector.config.tiers import DiskTier
from store_client.base import Put
from store_client.testing import chain
from store_client.tiers.base import TierError
from store_client.tiers.disk import Disk
from store_client.tiers.disk.pagefile import GRANULE
from store_client.tiers.disk.runs import MOST_NBYTES, runs_of
from store_client.tiers.disk.tier import AT_ONCE
from store_client.tiers.testing import DEADLINE_S, Memory, new_space, read, write

MIB = 1 << 20
NBYTES = 64 << 10


@st.composite
def _placed(draw: st.DrawFn) -> tuple[int, list[tuple[tuple[int, int], ...]]]:
    """A size, and where pages of it lie: one after the other, with gaps, in several pieces."""
    nbytes = draw(st.sampled_from([4096, 5000, 64 << 10, MIB, 2 * MIB]))
    granules, at, places = -(-nbytes // GRANULE), 1, []
    for kind in draw(st.lists(st.sampled_from(["next", "next", "next", "gap", "before", "pieces"]), max_size=80)):
        at += 3 if kind == "gap" else 0
        if kind == "pieces" and granules > 1:
            places.append(((at, 1), (at + 1, granules - 1)))
        else:
            places.append(((at, granules),))
        if kind == "before":
            places.insert(max(0, len(places) - 2), places.pop())
        at += granules
    return nbytes, places


@given(_placed(), st.integers(1, 20))
def test_runs_are_all_pages_in_order_and_where_these_lie(placed, at_once):
    nbytes, places = placed
    runs = runs_of(places, nbytes, at_once)
    assert [number for run, _ in runs for number in range(len(places))[run]] == list(range(len(places)))
    for run, extents in runs:
        pages = places[run]
        granules = [granule for place in pages for first, count in place for granule in range(first, first + count)]
        assert granules == [granule for first, count in extents for granule in range(first, first + count)]
        if len(pages) > 1:
            assert len(extents) == 1 and nbytes % GRANULE == 0 and len(pages) * nbytes <= MOST_NBYTES
    assert len(runs) >= min(len(places), at_once)


@pytest.fixture
def disk(tmp_path: Path):
    disk = Disk(DiskTier(path=tmp_path / "disk", capacity=16 * MIB))
    yield disk
    disk.close()


def _calls(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The granules of each read and write from now on."""
    moved = list[int]()
    for name in ("read", "write"):
        move = getattr(disk._file, name)

        def counted(extents, pieces, move=move):
            moved.append(sum(granules for _, granules in extents))
            move(extents, pieces)

        monkeypatch.setattr(disk._file, name, counted)
    return moved


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_long_batch_takes_fewer_calls_than_it_has_pages(disk, monkeypatch, pieces):
    space, keys, memory, moved = new_space(), chain("a", 4 * AT_ONCE), Memory(), _calls(disk, monkeypatch)
    assert write(disk, memory, space, keys, NBYTES, pieces) == [Put.STORED] * len(keys)
    assert moved == [4 * NBYTES // GRANULE] * AT_ONCE
    moved.clear()
    assert read(disk, memory, space, keys, NBYTES, pieces) == [True] * len(keys)
    assert moved == [4 * NBYTES // GRANULE] * AT_ONCE
    moved.clear()
    assert read(disk, memory, space, keys[::-1], NBYTES, pieces) == [True] * len(keys)
    assert moved == [NBYTES // GRANULE] * len(keys), "in another order they do not follow each other"


def test_where_pages_went_in_between_each_is_still_its_own(disk):
    space, keys, memory = new_space(), chain("a", 3 * AT_ONCE), Memory(64 * MIB)
    write(disk, memory, space, keys, NBYTES)
    disk.remove(space, keys[::3] + keys[20:24], deadline_s=DEADLINE_S)
    disk.flush()  # their places may be used again from now on
    others = chain("b", 2 * AT_ONCE)
    assert write(disk, memory, space, others, NBYTES, pieces=2) == [Put.STORED] * len(others)
    left = [key not in keys[::3] + keys[20:24] for key in keys]
    assert read(disk, memory, space, keys, NBYTES) == left
    assert read(disk, memory, space, others, NBYTES, pieces=4) == [True] * len(others)


def test_a_call_that_fails_costs_the_pages_it_was_to_move_and_no_others(disk, monkeypatch):
    space, keys, memory = new_space(), chain("a", 4 * AT_ONCE), Memory()
    write(disk, memory, space, keys, NBYTES)
    read_one, failed = disk._file.read, list[int]()

    def fails_once(extents, pieces):
        if not failed:
            failed.append(extents[0][0])
            raise OSError(5, "Input/output error")
        read_one(extents, pieces)

    monkeypatch.setattr(disk._file, "read", fails_once)
    with pytest.raises(TierError):
        read(disk, memory, space, keys, NBYTES)
    found = read(disk, memory, space, keys, NBYTES)
    assert found.count(False) == 4
    gone = found.index(False)
    assert found[gone : gone + 4] == [False] * 4
