"""A node of a real Mooncake cluster that is slow: it never stands still for long, so that it is never dropped."""

import itertools
import threading
import time
from contextlib import contextmanager

import pytest
import xxhash
from agent.flows import ask, fetch, flowing, is_right, settings
from store.audit import audit
from tiers.mooncake_cluster import Cluster, needs_mooncake, until

from store_client import EmbeddedStore
from store_client.base import Put
from store_client.testing import SHARD, chain, namespace, page_bytes
from store_client.tiers.base import Sealed, SpaceName
from store_client.tiers.mooncake.names import page_name
from store_client.tiers.seal import seal
from store_client.tiers.testing import DEADLINE_S, Memory

needs_mooncake()

NBYTES = 1 << 20
"""Of a page: what its node can send before it is stopped again is a few of them."""
STOPS_S, GOES_ON_S = 1.0, 0.001
TIMEOUT_S = 4.0
SPACE = SpaceName(namespace().digest, SHARD)


def given(tier, memory, keys):
    """Have the cluster hold the right pages, sealed as an agent does."""
    memory._next, pages = 0, []
    for key in keys:
        (place,) = memory.page(NBYTES)
        place[:] = page_bytes(key, NBYTES)
        pages.append(Sealed(key, [place], seal(SPACE, key, [place], xxhash.xxh3_64_intdigest(place.data), b"")))
    assert tier.write(SPACE, pages, nbytes=NBYTES, deadline_s=DEADLINE_S) == [Put.STORED] * len(keys)


def nodes_of(tier, keys):
    """What Mooncake calls the node that each page lies on."""
    names = [page_name(SPACE, key) for key in keys]
    with tier._link.client(DEADLINE_S) as client:
        found = client.batch_get_replica_desc(names)
    return [found[name][0].get_memory_descriptor().buffer_descriptor.transport_endpoint for name in names]


@contextmanager
def slow(node):
    """It runs for a moment each second."""
    over = threading.Event()

    def hold_up():
        while not over.is_set():
            node.stop()
            over.wait(STOPS_S)
            node.go_on()
            time.sleep(GOES_ON_S)

    thread = threading.Thread(target=hold_up)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def landed(flow, keys):
    return fetch(flow, keys, nbytes=NBYTES)[0].landed


@pytest.mark.slow
def test_a_slow_node_costs_its_own_pages_and_the_others_keep_coming(pool):
    cluster = Cluster(flags=("--default_kv_lease_ttl=60000", "--client_ttl=120"))
    held_up = cluster.nodes.pop()
    with cluster, EmbeddedStore(pool, 256 << 20) as store:
        tier, memory = cluster.tier(timeout_s=TIMEOUT_S), Memory(32 << 20)
        tier.register(memory.all)
        fast, slowly = [chain(f"fast {number}", 4) for number in range(8)], list[bytes]()
        for keys in fast:
            given(tier, memory, keys)
        cluster.nodes.append(held_up)
        held_up.start()
        good, rounds = nodes_of(tier, fast[0])[0], itertools.count()

        def has_enough():
            keys = chain(f"slow {next(rounds)}", 8)
            given(tier, memory, keys)
            slowly.extend(key for key, node in zip(keys, nodes_of(tier, keys), strict=True) if node != good)
            return len(slowly) >= 16

        until(has_enough, "the second node is given pages")
        with flowing(store, (settings("mooncake", timeout_s=TIMEOUT_S), tier)) as flow:
            with slow(held_up):
                _, heard = ask(flow, slowly[:16], nbytes=NBYTES, deadline_s=3.0)
                for keys in fast:
                    until(lambda keys=keys: landed(flow, keys) == len(keys), "pages of the good node come")
                heard.end()  # by its deadline, whatever has landed
                fetch(flow, slowly[:16], nbytes=NBYTES, deadline_s=3.0)
            until(lambda: landed(flow, slowly[:16]) == 16, "all of them come in the end")
            until(lambda: flow.stats()[0].reads == "closed", "the tier is used as before")
            assert flow.stats()[0].corrupt_pages == 0
            space = store.space(namespace(), SHARD)
            assert all(is_right(space, key, NBYTES) for keys in (*fast, slowly[:16]) for key in keys)
        audit(store)
