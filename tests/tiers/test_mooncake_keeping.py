"""How a real cluster keeps pages is as its tier says: on how many nodes, pinned or not, and for which tenant."""

import pytest
from tiers.mooncake_cluster import LEAVES_OUT, SHORT_LEASES, Cluster, needs_mooncake, until

from store_client.base import Put
from store_client.testing import chain
from store_client.tiers.base import TierError
from store_client.tiers.testing import DEADLINE_S, contains, new_space, read, sealed, write

needs_mooncake()

NBYTES = 1 << 20
"""Of a page where a node is to be filled."""


@pytest.mark.slow
def test_pages_with_two_replicas_outlive_a_node(tiers):
    """With one, some are gone with it: test_pages_of_a_node_that_fails_are_misses_and_the_others_go_on."""
    with Cluster(flags=LEAVES_OUT) as cluster:
        tier, memory = tiers(cluster.tier(replicas=2))
        space, keys = new_space(), chain("a", 24)
        assert write(tier, memory, space, keys) == [Put.STORED] * 24
        cluster.nodes[0].kill()

        def all_are_read():
            memory._next = 0  # room for any number of reads
            try:
                return all(read(tier, memory, space, keys))
            except TierError:  # on a busy machine leases end while the lost node is waited for
                return False

        until(all_are_read, "the master names the other node of every page")


def test_a_pinned_page_is_evicted_after_those_that_are_not(tiers):
    """The pinned ones are the oldest, and of the others there are more than fit."""
    with Cluster(nodes=1, node_nbytes=16 << 20, flags=(SHORT_LEASES,)) as cluster:
        pinning, memory = tiers(cluster.tier(soft_pin=True))
        plain, others = tiers(cluster.tier())
        space, pinned, unpinned = new_space(), chain("a", 4), chain("b", 24)
        assert write(pinning, memory, space, pinned, NBYTES) == [Put.STORED] * 4

        def stored(page):
            return plain.write(space, [page], nbytes=NBYTES, deadline_s=DEADLINE_S) == [Put.STORED]

        for key in unpinned:
            page = sealed(others, space, key, NBYTES)
            until(lambda page=page: stored(page), "there is room for one more page")
        assert contains(plain, space, pinned, NBYTES) == [True] * 4
        assert not all(contains(plain, space, unpinned, NBYTES))


def test_tenants_have_pages_of_their_own(tiers, tmp_path):
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text("version: 1\ntenants:\n  - {name: one, quota: 64MB}\n  - {name: other, quota: 64MB}\n")
    flags = (SHORT_LEASES, "--enable_multi_tenants=true", f"--tenant_quota_connector_uri={quotas}")
    with Cluster(flags=flags) as cluster:
        (one, memory), (other, others) = (tiers(cluster.tier(tenant=name)) for name in ("one", "other"))
        space, keys = new_space(), chain("a", 4)
        assert write(one, memory, space, keys) == [Put.STORED] * 4
        assert contains(other, space, keys) == read(other, others, space, keys) == [False] * 4
        assert write(other, others, space, keys) == [Put.STORED] * 4
        assert other.clear(space.namespace, deadline_s=DEADLINE_S) == 4
        assert contains(other, space, keys) == [False] * 4
        assert read(one, memory, space, keys) == [True] * 4
