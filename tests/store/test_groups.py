"""Groups of a model's layers: windows and states hang on the pages of full attention with the same keys."""

import json
import random

import pytest
import xxhash
from long_form import LONG
from store.audit import audit
from store.pools import CAPACITY

from mooncake_connector.errors import NamespaceError
from mooncake_connector.kv.geometry import Shard
from store_client import EmbeddedStore, Put
from store_client.base import Space
from store_client.embedded.arena import spread
from store_client.testing import DEADLINE_S, SHARD, chain, get_page, namespace, page_bytes, parents_of, put_chain


def space_of(store: EmbeddedStore, kind: str, shard: Shard = SHARD) -> Space:
    return store.space(namespace(group=json.dumps({"kind": kind, "layers": [1, 2]})), shard)


def put(space: Space, keys: list[bytes], parents: list[bytes | None]) -> list[Put]:
    pages = [page_bytes(key) for key in keys]
    nbytes = len(pages[0])

    def fill(i, view):
        view[:] = pages[i]

    return space.write(keys, fill, nbytes=nbytes, parents=parents, deadline_s=DEADLINE_S)


@pytest.mark.long
def test_a_window_goes_before_the_full_pages_it_is_of_no_use_without(pool):
    rng = random.Random(7)
    with EmbeddedStore(pool, CAPACITY) as store:
        full, window, state = (space_of(store, kind) for kind in ("full", "window", "state"))
        chains = [chain(f"{i}", 10) for i in range(40)]
        stored = {id(window): 0, id(state): 0}
        for turn in range(2000 if LONG else 300):
            keys = rng.choice(chains)
            reach = rng.randint(1, 10)
            put_chain(full, keys[:reach])
            for space, some in ((window, list(range(max(0, reach - 2), reach))), (state, [reach - 1])):
                parents = parents_of(keys)
                puts = put(space, [keys[i] for i in some], [parents[i] for i in some])
                stored[id(space)] += puts.count(Put.STORED)
            get_page(rng.choice((full, window, state)), rng.choice(keys))
            for each in chains if turn % 20 == 19 else ():
                whole = full.lookup(each).pages
                assert sum(full.contains(each)) == whole
                for space in (window, state):
                    kept = [i for i, found in enumerate(space.contains(each)) if found]
                    assert all(i < whole for i in kept), "a window or a state outlived the pages before it"
        assert all(count > 40 for count in stored.values())
        assert store.stats().evicted_pages > 200
        audit(store)


def test_a_window_that_is_read_keeps_the_full_pages_before_it(pool):
    keys, other = chain("read", 4), chain("unread", 4)
    with EmbeddedStore(pool, 1 << 20) as store:
        full, window = space_of(store, "full"), space_of(store, "window")
        put_chain(full, other)
        put_chain(full, keys)
        assert put(window, keys[3:], [keys[2]]) == [Put.STORED]
        put_chain(full, other)  # as young as can be
        assert get_page(window, keys[3]) is not None
        put_chain(space_of(store, "full", Shard(0, 4, 1, 2)), chain("new", 8))
        assert full.contains(keys) == [True] * 4 and window.contains(keys[3:]) == [True]
        assert full.lookup(other).pages < 4


def test_a_window_takes_the_place_of_older_pages_as_a_full_page_would(pool):
    """Its parent in its own space is not stored: windows have gaps. It is not lost for that."""
    keys = chain("a", 8)
    with EmbeddedStore(pool, 1 << 20) as store:
        put_chain(space_of(store, "full", Shard(0, 4, 1, 2)), chain("old", 16))
        put_chain(space_of(store, "full"), keys)
        assert put(space_of(store, "window"), keys[6:], [keys[5], keys[6]]) == [Put.STORED] * 2
        for parent in (chain("b", 3)[0], None):  # nothing is evicted for a window without full pages
            assert put(space_of(store, "window"), chain("b", 3)[1:2], [parent]) == [Put.FAILED]
        assert store.stats().failures == {"full": 2}


def test_a_window_that_is_brought_before_its_full_pages_takes_the_place_of_older_ones(pool):
    """Who asked for it asked for those too, and they may land later."""
    keys = chain("b", 3)[1:2]
    page = page_bytes(keys[0])

    def bring(places):
        for _, pieces in places:
            spread(page, pieces)
        return [xxhash.xxh3_64_intdigest(page.data)] * len(places)

    with EmbeddedStore(pool, 1 << 20) as store:
        put_chain(space_of(store, "full"), chain("old", 32))
        window = space_of(store, "window")
        assert put(window, keys, [None]) == [Put.FAILED]
        assert window.receive(keys, bring, nbytes=len(page), parents=[None], deadline_s=DEADLINE_S) == [Put.STORED]
        audit(store)


def test_the_pages_of_any_shard_of_full_attention_will_do(pool):
    keys = chain("a", 3)
    with EmbeddedStore(pool, 1 << 20) as store:
        put_chain(space_of(store, "full", Shard(0, 4, 1, 2)), keys)
        put_chain(space_of(store, "full", Shard(4, 8, 1, 2)), chain("old", 16))
        put_chain(space_of(store, "full", Shard(0, 4, 1, 2)), keys)
        assert put(space_of(store, "window", Shard(0, 9, 0, 1)), keys[2:], [keys[1]]) == [Put.STORED]


@pytest.mark.parametrize("group", ["[]", "{", "1", '"full"', "[" * 100_000])
def test_a_group_that_is_no_object_is_refused(group):
    with pytest.raises(NamespaceError, match="group"):
        namespace(group=group)


def test_the_groups_of_a_model_are_one_family_and_have_names_of_their_own():
    plain, full, window = namespace(), namespace(group='{"kind":"full"}'), namespace(group='{"kind":"window"}')
    assert len({plain.digest, full.digest, window.digest}) == 3
    assert full.family == window.family == plain.digest != namespace("other").family
    assert [name.rests_on_others for name in (plain, full, window)] == [False, False, True]
