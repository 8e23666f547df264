"""The conformance class: what any back end must do. Inherit it in a test and give it a fixture `make_store`.

class TestMine(StoreConformance):
    @pytest.fixture
    def make_store(self):
        return lambda: MyStore(...)      # an empty store with room for at least 64 pages of 64 KiB
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mooncake_connector.kv.geometry import Shard
from store_client.base import Bytes, Position, Put, Space, Store
from store_client.embedded.hashing import digest
from store_client.fate import Known
from store_client.testing.pages import (
    DEADLINE_S,
    PAGE_NBYTES,
    SHARD,
    chain,
    get_page,
    get_pages,
    namespace,
    page_bytes,
    parents_of,
    put_chain,
    put_pages,
)

MakeStore = Callable[[], Store]

Told = tuple[bool, bytes, Shard, bytes]
"""A change of one page: stored, namespace digest, shard, key."""


def follow(store: Store, since: Position, limit: int = 4096) -> tuple[list[Told], Position]:
    """All that changed since a position, and where that ends."""
    told: list[Told] = []
    while (answer := store.changes(since, limit)).changes:
        for change in answer.changes:
            told += [(change.stored, change.namespace_digest, change.shard, key) for key in change.keys]
        since = answer.position
    assert not answer.gap
    return told, answer.position


def leading(space: Space, keys: Sequence[bytes]) -> int:
    """How many leading pages are present, once that is known."""
    give_up_s = time.monotonic() + DEADLINE_S
    while (found := space.lookup(keys)).pending:
        assert found.pages < len(keys), "pending, although all that was asked for is there"
        assert time.monotonic() < give_up_s, f"a lookup was pending for {DEADLINE_S:g} s"
        time.sleep(0.001)
    return found.pages


class StoreConformance:
    """Claims about every store."""

    @pytest.fixture
    def store(self, make_store: MakeStore) -> Any:
        with make_store() as opened:
            yield opened

    @pytest.fixture
    def space(self, store: Store) -> Space:
        return store.space(namespace(), SHARD)

    def test_an_empty_store_misses_everything(self, space: Space) -> None:
        keys = chain("a", 3)
        assert leading(space, keys) == 0
        assert space.contains(keys) == [False] * 3
        assert get_page(space, keys[0]) is None

    def test_empty_calls_are_allowed(self, space: Space) -> None:
        assert leading(space, []) == 0
        assert space.contains([]) == []
        assert get_pages(space, [], [], nbytes=PAGE_NBYTES) == []
        assert put_pages(space, [], [], parents=[], deadline_s=1) == []
        assert space.remove([]) == 0

    def test_what_was_put_is_read_back(self, space: Space) -> None:
        keys = chain("a", 8)
        assert put_chain(space, keys) == [Put.STORED] * 8
        for key in keys:
            got = get_page(space, key)
            assert got is not None and np.array_equal(got, page_bytes(key))

    def test_page_bytes_of_two_keys_differ(self) -> None:
        first, second = chain("a", 2)
        assert not np.array_equal(page_bytes(first), page_bytes(second))

    def test_a_second_put_leaves_the_first_bytes(self, space: Space) -> None:
        (key,) = chain("a", 1)
        put_chain(space, [key])
        other = np.zeros(PAGE_NBYTES, dtype=np.uint8)
        assert put_pages(space, [key], [other], parents=[None], deadline_s=DEADLINE_S) == [Put.PRESENT]
        got = get_page(space, key)
        assert got is not None and np.array_equal(got, page_bytes(key))

    def test_a_key_twice_in_one_put_is_stored_once(self, space: Space) -> None:
        (key,) = chain("a", 1)
        page = page_bytes(key)
        outcome = put_pages(space, [key, key], [page, page], parents=[None, None], deadline_s=DEADLINE_S)
        assert outcome == [Put.STORED, Put.PRESENT]

    def test_prefix_counts_up_to_the_first_hole(self, space: Space) -> None:
        keys = chain("a", 6)
        put_chain(space, keys)
        assert leading(space, keys) == 6
        space.remove([keys[3]])
        assert leading(space, keys) == 3
        assert space.contains(keys) == [True, True, True, False, True, True]
        assert leading(space, [chain("b", 1)[0], *keys]) == 0

    def test_read_shows_the_bytes_read_only(self, space: Space) -> None:
        keys = chain("a", 3)
        put_chain(space, keys[:2])
        seen: dict[int, Bytes] = {}

        def consume(i: int, view: Bytes) -> None:
            assert not view.flags.writeable
            seen[i] = view.copy()

        assert space.read(keys, consume, nbytes=PAGE_NBYTES) == [True, True, False]
        assert sorted(seen) == [0, 1]
        assert all(np.array_equal(seen[i], page_bytes(keys[i])) for i in seen)

    def test_write_fills_in_place(self, space: Space) -> None:
        keys = chain("a", 3)
        put_chain(space, keys[:1])
        filled = []

        def fill(i: int, view: Bytes) -> None:
            filled.append(i)
            view[:] = page_bytes(keys[i])

        outcome = space.write(keys, fill, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=DEADLINE_S)
        assert outcome == [Put.PRESENT, Put.STORED, Put.STORED]
        assert filled == [1, 2]
        got = get_page(space, keys[2])
        assert got is not None and np.array_equal(got, page_bytes(keys[2]))

    def test_an_exception_of_fill_passes_and_stores_nothing(self, space: Space) -> None:
        keys = chain("a", 2)

        def fill(i: int, view: Bytes) -> None:
            raise RuntimeError("broken source")

        with pytest.raises(RuntimeError, match="broken source"):
            space.write(keys, fill, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=DEADLINE_S)
        assert space.contains(keys) == [False, False]
        assert put_chain(space, keys) == [Put.STORED] * 2

    def test_what_a_read_began_is_over_when_settle_returns(self, space: Space) -> None:
        keys = chain("a", 3)
        put_chain(space, keys[:2])
        begun: dict[int, Bytes] = {}
        seen: list[dict[int, Bytes]] = []

        def settle() -> None:
            seen.append({i: view.copy() for i, view in begun.items()})

        assert space.read(keys, begun.__setitem__, nbytes=PAGE_NBYTES, settle=settle) == [True, True, False]
        assert [sorted(shown) for shown in seen] == [[0, 1]]
        assert all(np.array_equal(page, page_bytes(keys[i])) for i, page in seen[0].items())
        assert not any(view.flags.writeable for view in begun.values())

    def test_a_read_that_shows_no_page_has_nothing_to_settle(self, space: Space) -> None:
        settled = []
        missed = space.read(chain("a", 2), print, nbytes=PAGE_NBYTES, settle=lambda: settled.append(True))
        assert (missed, settled) == ([False, False], [])

    def test_what_a_write_began_is_stored_as_it_is_when_settle_returns(self, space: Space) -> None:
        keys = chain("a", 3)
        put_chain(space, keys[:1])
        begun: dict[int, Bytes] = {}
        visible = []

        def settle(count: int) -> None:
            assert count == len(begun)
            visible.extend(space.contains(keys))
            for i, view in begun.items():
                view[:] = page_bytes(keys[i])

        outcome = space.write(
            keys, begun.__setitem__, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=DEADLINE_S, settle=settle
        )
        assert outcome == [Put.PRESENT, Put.STORED, Put.STORED]
        assert (sorted(begun), visible) == ([1, 2], [True, False, False])
        for key in keys:
            got = get_page(space, key)
            assert got is not None and np.array_equal(got, page_bytes(key))

    def test_digests_that_settle_returns_are_as_good_as_those_that_are_taken_here(self, space: Space) -> None:
        keys = chain("a", 3)
        digests = [digest(page_bytes(keys[0])), None, digest(page_bytes(keys[2]))]

        def fill(i: int, view: Bytes) -> None:
            view[:] = page_bytes(keys[i])

        outcome = space.write(
            keys, fill, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=DEADLINE_S,
            settle=lambda count: digests,
        )  # fmt: skip
        assert outcome == [Put.STORED] * 3
        for key in keys:
            got = get_page(space, key)
            assert got is not None and np.array_equal(got, page_bytes(key))
        assert space.read(keys, lambda i, view: None, nbytes=PAGE_NBYTES, settle=lambda: digests) == [True] * 3

    def test_what_was_begun_is_settled_before_an_exception_passes(self, space: Space) -> None:
        keys = chain("a", 3)
        put_chain(space, keys[:2])
        calls: list[object] = []

        def fail(i: int, view: Bytes) -> None:
            calls.append(i)
            raise RuntimeError("broken source")

        def settle(count: int | None = None) -> None:
            calls.append("settled")

        with pytest.raises(RuntimeError, match="broken source"):
            space.read(keys, fail, nbytes=PAGE_NBYTES, settle=settle)
        with pytest.raises(RuntimeError, match="broken source"):
            space.write(keys, fail, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=DEADLINE_S, settle=settle)
        assert calls == [0, "settled", 2, "settled"]

    def test_an_exception_of_settle_passes_and_stores_nothing(self, space: Space) -> None:
        keys = chain("a", 3)
        put_chain(space, keys[:1])

        def settle(count: int | None = None) -> None:
            raise RuntimeError("broken device")

        with pytest.raises(RuntimeError, match="broken device"):
            space.read(keys, lambda i, view: None, nbytes=PAGE_NBYTES, settle=settle)
        with pytest.raises(RuntimeError, match="broken device"):
            space.write(
                keys, lambda i, view: None, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=DEADLINE_S,
                settle=settle,
            )  # fmt: skip
        assert space.contains(keys) == [True, False, False]
        assert put_chain(space, keys[1:]) == [Put.STORED] * 2

    def test_a_page_of_another_size_is_a_miss(self, space: Space) -> None:
        (key,) = chain("a", 1)
        put_chain(space, [key])
        assert get_page(space, key, PAGE_NBYTES // 2) is None

    def test_odd_sizes_are_kept_exactly(self, space: Space) -> None:
        for nbytes in (1, 4095, 4096, 4097, 65537):
            (key,) = chain(f"odd {nbytes}", 1)
            put_chain(space, [key], nbytes)
            got = get_page(space, key, nbytes)
            assert got is not None and np.array_equal(got, page_bytes(key, nbytes))

    def test_namespaces_and_shards_never_meet(self, store: Store) -> None:
        keys = chain("a", 2)
        put_chain(store.space(namespace(), SHARD), keys)
        others = [(namespace("other"), SHARD), (namespace(), Shard(4, 8, 0, 2)), (namespace(), Shard(0, 4, 2, 4))]
        for name, shard in others:
            assert leading(store.space(name, shard), keys) == 0
        assert leading(store.space(namespace(), SHARD), keys) == 2

    def test_shards_lists_those_that_the_namespace_was_stored_in(self, store: Store) -> None:
        assert store.shards(namespace()) == []
        half = Shard(0, 4, 0, 1)
        for shard in (SHARD, half):
            put_chain(store.space(namespace(), shard), chain("a", 1))
        put_chain(store.space(namespace("other"), Shard(4, 8, 0, 2)), chain("a", 1))
        store.space(namespace(), Shard(0, 4, 1, 2)).lookup(chain("a", 1))
        renamed = namespace(model_name="served under another name", model_digest="m")
        assert sorted(store.shards(renamed), key=str) == sorted([SHARD, half], key=str)
        store.close()
        assert store.shards(namespace()) == []

    def test_the_name_shown_to_people_is_no_identity(self, store: Store) -> None:
        keys = chain("a", 1)
        put_chain(store.space(namespace(), SHARD), keys)
        renamed = namespace(model_name="served under another name", model_digest="m")
        assert leading(store.space(renamed, SHARD), keys) == 1

    def test_remove_and_clear_forget(self, store: Store) -> None:
        keys = chain("a", 4)
        space, other = store.space(namespace(), SHARD), store.space(namespace("other"), SHARD)
        put_chain(space, keys)
        put_chain(other, keys)
        assert space.remove([keys[3], chain("absent", 1)[0]]) == 1
        assert leading(space, keys) == 3
        assert space.clear() == 3
        assert leading(space, keys) == 0
        assert leading(other, keys) == 4
        assert store.clear(namespace("other").digest) == 4
        assert leading(other, keys) == 0

    def test_what_became_of_a_page_is_told_or_unknown(self, space: Space) -> None:
        keys = chain("a", 3)
        put_chain(space, keys[:2])
        space.remove(keys[1:2])
        stored, gone, never = space.explain(keys)
        assert stored.known is Known.STORED and never.known is Known.UNKNOWN
        assert gone.known in (Known.GONE, Known.UNKNOWN)

    def test_stats_and_namespaces_count_what_happened(self, store: Store) -> None:
        keys = chain("a", 3)
        space = store.space(namespace(), SHARD)
        put_chain(space, keys)
        put_chain(space, keys)
        get_page(space, keys[0])
        space.record_lookup(hit_pages=2, missed_pages=1, page_tokens=64)
        stats = store.stats()
        assert (stats.pages, stats.stored_pages, stats.present_pages, stats.read_pages) == (3, 3, 3, 1)
        assert (stats.hit_tokens, stats.missed_tokens) == (128, 64)
        (info,) = store.namespaces()
        assert (info.namespace, info.shard, info.pages) == (namespace(), SHARD, 3)
        assert info.nbytes >= 3 * PAGE_NBYTES

    @pytest.mark.parametrize("limit", [1, 3, 4096])
    def test_changes_tell_what_was_stored_and_what_is_gone(self, store: Store, limit: int) -> None:
        keys, here, there = chain("a", 4), namespace().digest, namespace("other").digest
        space, other = store.space(namespace(), SHARD), store.space(namespace("other"), SHARD)
        put_chain(space, keys[:1])
        start = store.changes(limit=limit)
        assert start.gap and not start.changes, "who has no position yet has to look"
        put_chain(space, keys)
        put_chain(other, keys[:2], 4096)
        space.remove([keys[3]])
        told, position = follow(store, start.position, limit)
        assert told == [
            *((True, here, SHARD, key) for key in keys[1:]),
            *((True, there, SHARD, key) for key in keys[:2]),
            (False, here, SHARD, keys[3]),
        ]
        space.clear()
        told, position = follow(store, position, limit)
        assert sorted(told) == sorted((False, here, SHARD, key) for key in keys[:3])
        assert follow(store, position, limit) == ([], position)

    def test_changes_tell_the_size_of_a_page(self, store: Store) -> None:
        start = store.changes().position
        put_chain(store.space(namespace(), SHARD), chain("a", 2), 4097)
        assert {change.nbytes for change in store.changes(start).changes} == {4097}

    def test_a_closed_store_says_that_it_cannot_tell_what_changed(self, make_store: MakeStore) -> None:
        store = make_store()
        start = store.changes().position
        store.close()
        assert store.changes(start).gap and store.changes().gap

    def test_verify_reads_every_page(self, store: Store) -> None:
        put_chain(store.space(namespace(), SHARD), chain("a", 3))
        steps: list[tuple[int, int]] = []
        report = store.verify(lambda done, total: steps.append((done, total)))
        assert (report.pages, report.nbytes, report.corrupt) == (3, 3 * PAGE_NBYTES, 0)
        assert steps == [(1, 3), (2, 3), (3, 3)]

    def test_mistakes_of_the_caller_are_errors(self, space: Space) -> None:
        (key,) = chain("a", 1)
        page = page_bytes(key)
        with pytest.raises(ValueError, match="31 bytes: expected 32"):
            space.contains([key[:31]])
        with pytest.raises(ValueError, match="0 parents for 1 keys"):
            put_pages(space, [key], [page], parents=[], deadline_s=1)

    def test_a_closed_store_misses_and_fails(self, make_store: MakeStore) -> None:
        store = make_store()
        keys = chain("a", 1)
        space = store.space(namespace(), SHARD)
        put_chain(space, keys)
        store.close()
        store.close()
        assert leading(space, keys) == 0
        assert get_page(space, keys[0]) is None
        assert put_chain(space, keys) == [Put.FAILED]
