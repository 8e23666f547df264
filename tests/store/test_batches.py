"""Pages that somebody else brings into the pool or takes from it, all of a batch in one call and without a copy."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import xxhash
from lock_holder import stopped_holder
from store.audit import audit
from store.pools import fragment, inside, run, space_in

from store_client import EmbeddedStore, Put
from store_client.base import Pieces
from store_client.embedded import EmbeddedSpace
from store_client.embedded.arena import gather, spread
from store_client.embedded.row import INLINE_EXTENTS
from store_client.embedded.table import BROUGHT, READ
from store_client.testing import PAGE_NBYTES, SHARD, chain, get_page, namespace, page_bytes, parents_of, put_chain

DEADLINE_S = 60.0
Places = Sequence[tuple[int, Pieces]]


@pytest.fixture
def space(store: EmbeddedStore) -> EmbeddedSpace:
    return store.space(namespace(), SHARD)


def bring(keys: Sequence[bytes], places: Places, nbytes: int = PAGE_NBYTES) -> list[int | None]:
    """Fill the places with the right pages."""
    checksums: list[int | None] = []
    for i, pieces in places:
        page = page_bytes(keys[i], nbytes)
        assert sum(map(len, pieces)) == nbytes
        spread(page, pieces)
        checksums.append(xxhash.xxh3_64_intdigest(page.data))
    return checksums


def receive_chain(space: EmbeddedSpace, keys: Sequence[bytes], nbytes: int = PAGE_NBYTES, **more: object) -> list[Put]:
    return space.receive(
        keys, lambda places: bring(keys, places, nbytes), nbytes=nbytes, parents=parents_of(keys),
        deadline_s=DEADLINE_S, **more,
    )  # fmt: skip


def is_right(space: EmbeddedSpace, key: bytes, nbytes: int = PAGE_NBYTES) -> bool:
    got = get_page(space, key, nbytes)
    return got is not None and np.array_equal(got, page_bytes(key, nbytes))


def taken(space: EmbeddedSpace, keys: Sequence[bytes], nbytes: int = PAGE_NBYTES) -> dict[int, np.ndarray]:
    """Copies of all pages that are shown, after their checksums were found right."""
    copies = {}

    def consume(pages: Sequence[tuple[int, Pieces, int]]) -> None:
        for i, pieces, checksum in pages:
            copies[i] = gather(pieces, nbytes)
            assert xxhash.xxh3_64_intdigest(copies[i].data) == checksum

    stayed = space.show(keys, consume, nbytes=nbytes)
    assert [i for i, right in enumerate(stayed) if right] == sorted(copies)
    return copies


# -- receive ----------------------------------------------------------------------------------------------------------


def test_received_pages_are_read_back(space):
    keys = chain("a", 8)
    assert receive_chain(space, keys) == [Put.STORED] * 8
    assert space.lookup(keys).pages == 8 and all(is_right(space, key) for key in keys)


def test_fill_gets_the_absent_pages_alone_and_all_at_once(space):
    keys = chain("a", 6)
    put_chain(space, keys[:2])
    calls = []

    def fill(places: Places) -> list[int | None]:
        calls.append([i for i, _ in places])
        return bring(keys, places)

    outcome = space.receive(keys, fill, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=DEADLINE_S)
    assert outcome == [Put.PRESENT] * 2 + [Put.STORED] * 4
    assert calls == [[2, 3, 4, 5]]
    space.receive(keys, fill, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=DEADLINE_S)
    assert len(calls) == 1, "nothing is absent"


def test_what_did_not_come_is_not_stored_and_its_space_is_free_again(store, space):
    keys = chain("a", 4)

    def fill(places: Places) -> list[int | None]:
        return [checksum if i != 2 else None for (i, _), checksum in zip(places, bring(keys, places), strict=True)]

    outcome = space.receive(keys, fill, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=DEADLINE_S)
    assert outcome == [Put.STORED, Put.STORED, Put.FAILED, Put.STORED]
    assert space.contains(keys) == [True, True, False, True]
    assert store.stats().failures == {}, "a miss of somebody else is no fault of the pool"
    audit(store)


def test_a_page_in_several_extents_has_several_pieces(store, space):
    fragment(store)
    keys = chain("a", 3)
    seen = []

    def fill(places: Places) -> list[int | None]:
        seen.extend(len(pieces) for _, pieces in places)
        return bring(keys, places)

    assert space.receive(keys, fill, nbytes=PAGE_NBYTES, parents=[None] * 3, deadline_s=60) == [Put.STORED] * 3
    assert min(seen) > INLINE_EXTENTS, "more extents than a row has room for"
    shown = []
    space.show(keys, lambda pages: shown.extend(len(pieces) for _, pieces, _ in pages), nbytes=PAGE_NBYTES)
    assert shown == seen
    assert all(is_right(space, key) for key in keys)
    assert all(np.array_equal(page, page_bytes(keys[i])) for i, page in taken(space, keys).items())


def test_an_exception_of_fill_passes_and_stores_nothing(store, space):
    keys = chain("a", 2)

    def fill(places: Places) -> list[int | None]:
        raise RuntimeError("broken source")

    with pytest.raises(RuntimeError, match="broken source"):
        space.receive(keys, fill, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=DEADLINE_S)
    assert space.contains(keys) == [False, False]
    audit(store)


@pytest.mark.parametrize("answer", [[1], [1, 2, 3], [1, 1 << 64], [1, -1]])
def test_wrong_checksums_are_the_callers_mistake_and_no_damage_of_the_pool(space, answer):
    keys = chain("a", 2)
    with pytest.raises(ValueError, match="checksums for 2 pages"):
        space.receive(keys, lambda _: answer, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=DEADLINE_S)
    assert receive_chain(space, keys) == [Put.STORED] * 2


def test_mistakes_of_the_caller_are_errors(space):
    keys = chain("a", 2)
    with pytest.raises(ValueError, match="1 parents for 2 keys"):
        space.receive(keys, lambda _: [], nbytes=PAGE_NBYTES, parents=[None], deadline_s=1)
    with pytest.raises(ValueError, match="31 bytes: expected 32"):
        space.show([keys[0][:31]], lambda _: None, nbytes=PAGE_NBYTES)


def test_a_wrong_checksum_is_found_by_the_next_reader(store, space):
    keys = chain("a", 1)
    space.receive(keys, lambda _: [1], nbytes=PAGE_NBYTES, parents=[None], deadline_s=DEADLINE_S)
    assert get_page(space, keys[0]) is None
    assert store.stats().corrupt_pages == 1


def test_a_pool_that_is_locked_fails_the_pages_after_the_deadline(pool, space):
    keys = chain("a", 2)
    with stopped_holder(pool):
        asked = []
        outcome = space.receive(keys, asked.append, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=0.2)
    assert outcome == [Put.FAILED] * 2 and not asked


def test_pages_behind_others_that_are_on_their_way_evict_for_their_place(store, space):
    put_chain(space_in(store, "old"), chain("old", 128))
    first, second = chain("a", 4)[:2], chain("a", 4)[2:]
    parents = [first[-1], second[0]]

    def receive(follows: Sequence[bytes]) -> list[Put]:
        return space.receive(
            second, lambda places: bring(second, places), nbytes=PAGE_NBYTES, parents=parents, deadline_s=DEADLINE_S,
            follows=follows,
        )  # fmt: skip

    assert receive([]) == [Put.FAILED] * 2, "orphans get what is free, which is nothing"
    assert receive(first) == [Put.STORED] * 2


@pytest.mark.parametrize("cleared", ["all", "namespace", "space", "other"])
def test_nothing_is_stored_that_was_asked_for_before_a_clear(store, space, cleared):
    keys, before = chain("a", 2), store.clears

    def fill(places: Places) -> list[int | None]:
        clear = {
            "all": store.clear, "namespace": lambda: store.clear(namespace().digest), "space": space.clear,
            "other": lambda: space.remove(chain("other", 1)),
        }  # fmt: skip
        clear[cleared]()
        return bring(keys, places)

    parents = parents_of(keys)
    outcome = space.receive(keys, fill, nbytes=PAGE_NBYTES, parents=parents, deadline_s=DEADLINE_S, clears=before)
    assert outcome == [Put.STORED if cleared == "other" else Put.FAILED] * 2
    assert receive_chain(space, keys, clears=store.clears)[0] is not Put.FAILED, "what is asked for after it is stored"
    audit(store)


def test_another_process_hears_of_a_clear(pool, store):
    before = store.clears
    assert run("store.clear()", pool).returncode == 0
    assert store.clears == before + 1


def test_the_pool_knows_which_pages_were_brought_and_which_were_read(store, space):
    keys = chain("a", 4)
    receive_chain(space, keys[:2])
    space.write(
        keys, lambda i, view: view.__setitem__(slice(None), page_bytes(keys[i])), nbytes=PAGE_NBYTES,
        parents=parents_of(keys), deadline_s=DEADLINE_S,
    )  # fmt: skip
    for key in keys[1:3]:
        assert is_right(space, key)
    taken(space, keys)
    put_chain(space, keys)
    table = inside(store).table
    slots = [slot for key in keys for slot in table.slots(np.frombuffer(key, np.uint8).reshape(1, 32), space._number)]
    marks = [int(table.access[slot]) & 3 for slot in slots]
    assert marks == [BROUGHT, BROUGHT | READ, READ, 0], "neither a show nor a second put is a read"
    space.remove(keys)
    put_chain(space, keys)
    slots = [slot for key in keys for slot in table.slots(np.frombuffer(key, np.uint8).reshape(1, 32), space._number)]
    assert [int(table.access[slot]) & 3 for slot in slots] == [0] * 4, "a new page has no marks"


KILLS = {
    "while pages come": "def fill(places): bring(places[:3]); die()",
    "once all have come": "def fill(places): bring(places); die()",
    "before the commit": "Writer.commit = die",
    "in the commit": "Writer._publish = die",
    "before the table shows them": "Table.apply = die",
    "before they are marked": "Table.touch = lambda table, slots, mark=0, use=False: mark and die()",
}
ALL_OR_NOTHING = {"before the table shows them": 6, "before they are marked": 6}


@pytest.mark.parametrize("moment", KILLS)
def test_a_process_killed_while_it_receives_leaves_a_pool_that_adds_up(pool, store, space, moment):
    code = """
        import xxhash
        from store_client.embedded.table import Table
        from store_client.embedded.writer import Writer
        keys = chain("a", 8)
        def die(*arguments): os.kill(os.getpid(), 9)
        def bring(places):
            for i, (piece,) in places: piece[:] = page_bytes(keys[i])
            return [xxhash.xxh3_64_intdigest(piece.data) for _, (piece,) in places]
        fill = bring
        put_chain(space, keys[:2])
    """
    code += (
        f"    {KILLS[moment]}\n        space.receive(keys, fill, nbytes=65536, parents=parents_of(keys), deadline_s=60)"
    )
    assert run(code, pool).returncode == -signal.SIGKILL
    audit(store)
    keys = chain("a", 8)
    there = [key for key, found in zip(keys, space.contains(keys), strict=True) if found]
    assert there == keys[: 2 + ALL_OR_NOTHING.get(moment, 0)]
    assert all(is_right(space, key) for key in there)
    assert set(receive_chain(space, keys)) <= {Put.STORED, Put.PRESENT}
    assert space.lookup(keys).pages == 8


# -- show -------------------------------------------------------------------------------------------------------------


def test_show_hands_out_all_present_pages_at_once_as_they_lie_in_the_arena(store, space):
    keys = chain("a", 4)
    put_chain(space, keys[:1])
    put_chain(space, keys[2:])
    calls = []

    def consume(pages: Sequence[tuple[int, Pieces, int]]) -> None:
        calls.append([i for i, _, _ in pages])
        for _, pieces, _ in pages:
            assert all(not piece.flags.writeable for piece in pieces)
            assert all(np.shares_memory(piece, inside(store).arena._data) for piece in pieces)

    assert space.show(keys, consume, nbytes=PAGE_NBYTES) == [True, False, True, True]
    assert calls == [[0, 2, 3]]
    assert all(np.array_equal(page, page_bytes(keys[i])) for i, page in taken(space, keys).items())


def test_nothing_is_shown_where_no_page_is_present(space):
    def never(_pages: object) -> None:
        raise AssertionError

    assert space.show(chain("a", 2), never, nbytes=PAGE_NBYTES) == [False, False]
    put_chain(space, chain("a", 2))
    assert space.show(chain("a", 2), never, nbytes=4096) == [False, False], "pages of another size"
    assert space.show([], never, nbytes=4096) == []


def test_show_tells_which_pages_changed_while_they_were_shown(space):
    keys = chain("a", 4)
    put_chain(space, keys)

    def consume(pages: object) -> None:
        space.remove(keys[1:2])
        space.remove(keys[3:])
        put_chain(space, keys[3:])

    assert space.show(keys, consume, nbytes=PAGE_NBYTES) == [True, False, True, False]


def test_an_exception_of_consume_passes(space):
    put_chain(space, chain("a", 1))

    def consume(_pages: object) -> None:
        raise RuntimeError("broken sink")

    with pytest.raises(RuntimeError, match="broken sink"):
        space.show(chain("a", 1), consume, nbytes=PAGE_NBYTES)


def test_a_closed_store_receives_and_shows_nothing(store):
    with EmbeddedStore(store.path) as other:
        space = other.space(namespace(), SHARD)
        receive_chain(space, chain("a", 1))
    assert receive_chain(space, chain("b", 1)) == [Put.FAILED]
    assert taken(space, chain("a", 1)) == {}


def test_pages_are_shown_right_or_said_to_have_changed_while_others_evict(store, space):
    stop = threading.Event()

    def churn() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            put_chain(space_in(store, "churn"), chain(f"churn {turn}", 64))

    thread = threading.Thread(target=churn, daemon=True)
    thread.start()
    right = 0
    try:
        for turn in range(200):
            keys = chain(f"a {turn}", 4)
            receive_chain(space, keys)
            copies: dict[int, np.ndarray] = {}

            def consume(pages: Sequence[tuple[int, Pieces, int]], copies: dict[int, np.ndarray] = copies) -> None:
                copies.update({i: gather(pieces, PAGE_NBYTES) for i, pieces, _ in pages})

            for i, stayed in enumerate(space.show(keys, consume, nbytes=PAGE_NBYTES)):
                assert not stayed or np.array_equal(copies[i], page_bytes(keys[i]))
                right += stayed
    finally:
        stop.set()
        thread.join()
    assert right > 0
