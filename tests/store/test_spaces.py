"""A page is read by the namespace and shard it was stored for, whatever becomes of the file that lists them."""

import contextlib
import os

import pytest
from simulated.waiting import wait_for
from store.pools import inside, running, space_in

from mooncake_connector.kv.geometry import Shard
from store_client import EmbeddedStore, Put
from store_client.embedded.names import Spaces, identify
from store_client.testing import chain, get_page, namespace, put_chain


@pytest.mark.parametrize("cut", [1, 2, 30, 10_000])
def test_a_line_cut_short_by_a_full_file_system_mixes_no_namespaces(store, monkeypatch, cut):
    keys = chain("the same prompt", 3)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, line: write(fd, line[: max(0, len(line) - cut)]))
    a, b = space_in(store, "a"), space_in(store, "b")
    with contextlib.suppress(KeyError):
        assert put_chain(a, keys) == [Put.FAILED] * 3
    monkeypatch.undo()
    assert put_chain(b, keys) == [Put.STORED] * 3
    assert a.lookup(keys).pages == 0
    assert a.contains(keys) == [False] * 3
    assert get_page(a, keys[0]) is None
    assert put_chain(a, keys) == [Put.STORED] * 3
    assert {info.namespace.model_name: info.pages for info in store.namespaces()} == {"a": 3, "b": 3}


def test_of_many_pages_at_once_is_said_what_is_said_of_each(store):
    keys = chain("a prompt", 60)
    a, b = space_in(store, "a"), space_in(store, "b")
    put_chain(a, keys[:40])
    a.remove(keys[39:40])
    put_chain(b, keys[50:])
    assert a.present(keys).tolist() == a.contains(keys) == [True] * 39 + [False] * 21
    assert b.present(keys).tolist() == [False] * 50 + [True] * 10 and len(a.present([])) == 0


def test_a_list_that_is_lost_or_swapped_mixes_no_namespaces(pool):
    keys = chain("the same prompt", 3)
    with EmbeddedStore(pool, 4 << 20) as store:
        put_chain(space_in(store, "a"), keys[:1])
        put_chain(space_in(store, "b"), keys[:2])
    (listed,) = pool.glob("*/spaces")
    listed.write_bytes(listed.read_bytes().replace(b'"a"', b'"c"').replace(b'"b"', b'"a"').replace(b'"c"', b'"b"'))
    with EmbeddedStore(pool) as store:
        assert space_in(store, "a").lookup(keys).pages == 1
        assert space_in(store, "b").lookup(keys).pages == 2
    listed.write_bytes(b"")
    with EmbeddedStore(pool) as store:
        assert put_chain(space_in(store, "c"), keys) == [Put.STORED] * 3
        assert space_in(store, "a").lookup(keys).pages == 1
        assert space_in(store, "b").lookup(keys).pages == 2


def test_a_list_of_many_namespaces_is_read_once(store, monkeypatch):
    """An RL loop takes a namespace for each reset, and the list is read under the write lock."""
    keys, listed = chain("a", 1), inside(store).spaces._path
    reader = Spaces(listed)
    learned, learn = [], reader._learn
    monkeypatch.setattr(reader, "_learn", lambda line: (learned.append(line), learn(line)))
    for i in range(50):
        put_chain(space_in(store, f"{i}"), keys, 4096)
        assert len(reader.all()) == i + 1
    assert len(learned) == 50
    listed.write_bytes(b"")
    put_chain(space_in(store, "new"), keys, 4096)
    assert namespace("new").digest in {known.digest for known, _ in reader.all().values()}


def test_every_shard_and_namespace_has_an_identity_of_its_own():
    names = {
        (namespace(model).digest, Shard(0, layers, heads, heads + more))
        for model in "abc" for layers in (1, 2, 256) for heads in (0, 1, 255) for more in (1, 2)
    }  # fmt: skip
    assert len({identify(name) for name in names}) == len(names)


CHURN = """
keys = chain('churn', 500)
for i in range(10**9):
    put_chain(space, keys, 4096)
    if not i: print('ready', flush=True)
    store.clear()
"""


def test_a_look_at_all_pages_stands_that_others_come_and_go(pool):
    """As `mooncake-connector store ls` and `store verify` beside engines that store and evict."""
    with EmbeddedStore(pool, 4 << 20) as store, running(CHURN, pool):
        seen = set()

        def look():
            for info in store.namespaces():
                assert info.oldest_s < 600 and info.idle_s < 600 and (info.nbytes == 0) == (info.pages == 0)
                seen.add(info.pages)
            return len(seen) > 1

        for _ in range(300):
            look()
        wait_for(look)
        assert store.verify().corrupt == 0


FLICKER = """
granules = store._handle.current(store._closed).table.granules
print('ready', flush=True)
while True:
    granules[0] = 0
    granules[0] = 1
"""


def test_a_look_at_all_pages_stands_a_change_in_its_midst(store, pool):
    """Engines that store 4 KiB pages by the thousand make this rare; a slot that comes and goes makes it sure."""
    with running(FLICKER, pool):
        for _ in range(1000):
            assert inside(store).table.live_slots().tolist() in ([], [0])
    inside(store).table.granules[0] = 0
