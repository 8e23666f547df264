"""What a copy kernel is told to do is what was asked for: every byte once, nothing else, in words that fit."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from transfer.transports.cuda.copier import CHUNK_NBYTES, MAX_WIDTH, launches

SPACE = 1 << 16
SIZES = st.lists(st.one_of(st.integers(0, 70), st.integers(0, 3000), st.sampled_from([256, 1024, 4096])), max_size=12)
GAPS = st.sampled_from([0, 1, 2, 4, 8, 12, 16, 64])


@st.composite
def copies(draw):
    """Sources anywhere, destinations that do not overlap, at all alignments to each other."""
    sizes = draw(SIZES)
    source = [draw(st.integers(0, SPACE - 5000)) for _ in sizes]
    place, destination = draw(GAPS), []
    for size in sizes:
        destination.append(place)
        place += size + draw(GAPS)
    order = draw(st.permutations(range(len(sizes))))
    columns = (source, [destination[i] for i in order], [sizes[i] for i in order])
    return tuple(np.array(column, dtype=np.int64) for column in columns)


def carried_out(parts, memory, size):
    """What the kernel does, and how often it writes each byte."""
    result, writes = np.zeros(size, dtype=np.uint8), np.zeros(size, dtype=int)
    for part in parts:
        for source, destination, nbytes in part.table.T.tolist():
            result[destination : destination + nbytes] = memory[source : source + nbytes]
            writes[destination : destination + nbytes] += 1
    return result, writes


@given(copies(), st.sampled_from([16, 48, 1024, CHUNK_NBYTES]))
def test_every_byte_is_copied_once_and_no_other(pieces, chunk_nbytes):
    memory = np.random.default_rng(1).integers(0, 256, SPACE, dtype=np.uint8)
    expected, once = np.zeros(SPACE, dtype=np.uint8), np.zeros(SPACE, dtype=int)
    for source, destination, nbytes in np.stack(pieces).T.tolist():
        expected[destination : destination + nbytes] = memory[source : source + nbytes]
        once[destination : destination + nbytes] += 1
    result, writes = carried_out(launches(*pieces, chunk_nbytes), memory, SPACE)
    assert np.array_equal(result, expected)
    assert np.array_equal(writes, once)


@given(copies(), st.sampled_from([16, 48, 1024]))
def test_words_fit_both_addresses_and_chunks_are_bounded(pieces, chunk_nbytes):
    parts = launches(*pieces, chunk_nbytes)
    assert [part.width for part in parts] == sorted({part.width for part in parts}, reverse=True)
    for part in parts:
        assert part.width in (16, 8, 4, 2, 1) and part.table.dtype == np.int64
        assert not (part.table % part.width).any()
        assert part.table[2].min() > 0 and part.table[2].max() <= chunk_nbytes


@given(copies())
def test_words_are_as_wide_as_the_distance_of_the_addresses_allows(pieces):
    """What goes byte by byte are a piece's two ends, shorter than a word, and pieces at odd distances."""
    alone = [launches(*(np.array([value]) for value in piece)) for piece in np.stack(pieces).T.tolist()]
    for (source, destination, nbytes), parts in zip(np.stack(pieces).T.tolist(), alone, strict=True):
        width = next(w for w in (16, 8, 4, 2, 1) if (source - destination) % w == 0)
        narrow = sum(int(part.table[2].sum()) for part in parts if part.width < width)
        assert narrow <= nbytes and narrow < 2 * width
        assert all(part.width in (1, width) for part in parts)


def test_pages_of_kv_are_one_launch_of_the_widest_words():
    starts = np.arange(4096) * (64 << 10)
    sizes = np.full(4096, 32 << 10)
    (part,) = launches(1 << 40 | starts, 1 << 41 | starts, sizes)
    assert part.width == MAX_WIDTH and part.table.shape == (3, 4096)


def test_empty_pieces_are_no_chunks():
    sizes = np.array([64, 0, 32])
    (part,) = launches(np.array([64, 256, 128]), np.array([512, 1024, 768]), sizes)
    assert part.table.tolist() == [[64, 128], [512, 768], [64, 32]]
    assert launches(*(np.zeros(3, dtype=np.int64),) * 3) == launches(*(np.zeros(0, dtype=np.int64),) * 3) == []
