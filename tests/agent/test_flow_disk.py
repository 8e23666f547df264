"""The flow over a real disk: pages come back into a pool that lost them, also after a restart, and damage is a miss."""

from __future__ import annotations

import os

from agent.flows import PATIENT_S, fetch, flowing, is_right, wait_until
from store.audit import audit
from store.pools import CAPACITY, space_in

from mooncake_connector.config.tiers import DiskTier
from store_client.testing import PAGE_NBYTES, SHARD, chain, namespace, put_chain
from store_client.tiers.open import open_tier


def test_what_the_pool_evicted_comes_back_from_the_disk_after_a_restart(store, tmp_path):
    settings = DiskTier(path=tmp_path / "disk", capacity=64 << 20, timeout_s=PATIENT_S)
    space, keys = store.space(namespace(), SHARD), chain("a", 40)
    with flowing(store, (settings, open_tier(settings, b""))) as flow:
        put_chain(space, keys)
        wait_until(lambda: flow.stats()[0].written_pages == 40)
        assert flow.stats()[0].pages == 40
    put_chain(space_in(store, "other"), chain("other", CAPACITY // PAGE_NBYTES))
    assert space.lookup(keys).pages < 40, "the pool has evicted of them"
    with flowing(store, (settings, open_tier(settings, b""))) as flow:
        assert fetch(flow, keys)[0].landed == 40
        assert all(is_right(space, key) for key in keys)
        assert flow.stats()[0].corrupt_pages == 0
    audit(store)


def test_bytes_that_change_on_the_disk_are_a_miss_and_leave_it(store, tmp_path):
    settings = DiskTier(path=tmp_path / "disk", capacity=64 << 20, write="none", direct=False, timeout_s=PATIENT_S)
    giving = DiskTier(path=tmp_path / "disk", capacity=64 << 20, direct=False, timeout_s=PATIENT_S)
    space, keys = store.space(namespace(), SHARD), chain("a", 4)
    with flowing(store, (giving, open_tier(giving, b""))) as flow:
        put_chain(space, keys)
        wait_until(lambda: flow.stats()[0].written_pages == 4)
    space.clear()
    pages = tmp_path / "disk" / "pages"
    with open(pages, "r+b", buffering=0) as file:
        for at in range(0, os.path.getsize(pages), 4096):
            file.seek(at + 100)
            file.write(b"\x5a\xa5" * 8)
    with flowing(store, (settings, open_tier(settings, b""))) as flow:
        word, _ = fetch(flow, keys)
        assert (word.landed, word.cause) == (0, "corrupt")
        assert flow.stats()[0].corrupt_pages == 4
        wait_until(lambda: flow.stats()[0].pages == 0)
    assert space.contains(keys) == [False] * 4
    audit(store)
