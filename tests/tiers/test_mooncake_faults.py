"""The tier `mooncake` on a real cluster that fails: what its calls say, that they end, that it finds back by itself.

A master of another version cannot be had here; how that shows is imitated (see the test).
"""

import pytest
from tiers.mooncake_cluster import LEAVES_OUT, Cluster, cause_of, needs_mooncake, until

from store_client.base import Put
from store_client.testing import PAGE_NBYTES, chain
from store_client.tiers.base import TierError
from store_client.tiers.mooncake.names import page_name
from store_client.tiers.testing import DEADLINE_S, Memory, contains, new_space, read, sealed, write

needs_mooncake()


@pytest.fixture
def cluster():
    with Cluster() as running:
        yield running


@pytest.fixture(scope="module")
def healthy():
    """A cluster that nobody breaks, with leases that outlast a read also on a busy machine."""
    with Cluster(flags=("--default_kv_lease_ttl=60000", "--client_ttl=120")) as running:
        yield running


class Answers:
    """A real client, but for calls that the test answers."""

    def __init__(self, client, **calls):
        self._client = client
        vars(self).update(calls)

    def __getattr__(self, name):
        return getattr(self._client, name)


def stored(tier, memory, keys, space):
    """Whether all pages can be written and read, in spite of what went before."""
    try:
        puts = write(tier, memory, space, keys)
        return Put.FAILED not in puts and all(read(tier, memory, space, keys))
    except TierError:
        return False


def test_a_master_that_is_down_at_the_start_is_found_once_it_is_there(tiers):
    cluster = Cluster(nodes=1)
    tier, memory = tiers(cluster.tier())
    space, keys = new_space(), chain("a", 4)
    with pytest.raises(TierError, match=r"nobody listens at 127\.0\.0\.1") as caught:
        contains(tier, space, keys)
    assert caught.value.cause == "unavailable" and not caught.value.lasting
    assert "nobody listens" in tier.stats().notes["not open"] and "state" not in tier.stats().notes
    with cluster:
        until(lambda: stored(tier, memory, keys, space), "the tier is connected")
        assert tier.stats().notes["state"] == "connected" and "not open" not in tier.stats().notes


def test_a_master_that_is_killed_and_started_again_has_forgotten_all_and_is_used(cluster, tiers):
    tier, memory = tiers(cluster.tier())
    space, keys = new_space(), chain("a", 4)
    assert write(tier, memory, space, keys) == [Put.STORED] * 4
    cluster.master.kill()
    assert cause_of(lambda: read(tier, memory, space, keys)) == "unavailable"
    with pytest.raises(TierError, match="master"):  # at once from here on
        contains(tier, space, keys)
    cluster.master.start()  # on the same port

    def answers():
        return cause_of(lambda: contains(tier, space, keys)) is None

    until(answers, "the master is found again")
    assert contains(tier, space, keys) == [False] * 4
    until(lambda: stored(tier, memory, keys, space), "the nodes are back")


def test_a_master_that_does_not_answer_is_waited_for_no_longer_than_set(cluster, tiers):
    tier, memory = tiers(cluster.tier(timeout_s=4.0))
    space, keys = new_space(), chain("a", 4)
    until(lambda: stored(tier, memory, keys, space), "all is well at first")
    cluster.master.stop()
    try:
        # After a while Mooncake's client itself takes the master for lost.
        assert cause_of(lambda: contains(tier, space, keys)) in ("timeout", "unavailable")
        assert cause_of(lambda: read(tier, memory, space, keys)) in ("timeout", "unavailable")
        assert cause_of(lambda: tier.clear(space.namespace, deadline_s=1)) in ("timeout", "unavailable")
    finally:
        cluster.master.go_on()
    until(lambda: stored(tier, memory, keys, space), "the master answers again")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_pages_of_a_node_that_fails_are_misses_and_the_others_go_on(tiers, how):
    """24 pages on two nodes chosen at random: that each has some is once in eight million tests wrong."""
    with Cluster(flags=("--default_kv_lease_ttl=60000", "--client_ttl=15")) as cluster:  # no lease ends meanwhile
        tier, memory = tiers(cluster.tier())
        space, keys, others = new_space(), chain("a", 24), chain("b", 24)
        assert write(tier, memory, space, keys) == [Put.STORED] * 24
        getattr(cluster.nodes[0], how)()
        try:
            found = read(tier, memory, space, keys)
            assert 0 < sum(found) < 24
            until(lambda: stored(tier, memory, others, space), "the master gives no place on the lost node any more")
        finally:
            if how == "stop":
                cluster.nodes[0].go_on()
        assert [one for one in tier.stats().notes if "transfer" in one], "and it is counted"


@pytest.mark.slow
def test_when_no_node_can_be_reached_the_tier_says_so(tiers):
    with Cluster(flags=LEAVES_OUT) as cluster:
        tier, memory = tiers(cluster.tier())
        space, keys = new_space(), chain("a", 4)
        assert write(tier, memory, space, keys) == [Put.STORED] * 4
        for node in cluster.nodes:
            node.kill()
        with pytest.raises(TierError, match=r"for all 4 pages") as caught:
            read(tier, memory, space, keys)
        assert caught.value.cause == "unavailable"

        until(lambda: contains(tier, space, keys) == [False] * 4, "the master forgets the pages of the lost nodes")
        assert read(tier, memory, space, keys) == [False] * 4


def test_a_full_cluster_refuses_pages_and_still_gives_what_it_has(tiers):
    """Leases hold what was just looked at, so that nothing can be evicted: 16 MiB have no room for 32."""
    with Cluster(nodes=1, node_nbytes=16 << 20, flags=("--default_kv_lease_ttl=600000",)) as cluster:
        tier, memory = tiers(cluster.tier(soft_pin=True, replicas=2))
        space, keys, nbytes = new_space(), chain("a", 32), 1 << 20
        puts = []
        for key in keys:  # one after the other, each leased by a look at once
            page = sealed(Memory(2 << 20), space, key, nbytes)
            puts += tier.write(space, [page], nbytes=nbytes, deadline_s=DEADLINE_S)
            contains(tier, space, keys, nbytes)
        assert Put.FAILED in puts and Put.STORED in puts
        kept = keys[puts.index(Put.STORED)]
        assert read(tier, memory, space, [kept], nbytes) == [True]
        assert any("no node has room" in one for one in tier.stats().notes)


def test_clear_and_remove_leave_the_keys_of_others_alone(healthy, tiers):
    from mooncake.store import MooncakeDistributedStore

    tier, memory = tiers(healthy.tier())
    space, keys = new_space(), chain("a", 4)
    assert write(tier, memory, space, keys) == [Put.STORED] * 4  # which also sets what the library reads
    other = MooncakeDistributedStore()
    assert other.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"127.0.0.1:{healthy.port}") == 0
    strange = ["theirs", f"x/mckv/{space.namespace.hex()}/a", "mckvetch/1", f"MCKV/{space.namespace.hex()}/b"]
    for name in strange:
        assert other.put(name, b"their value") == 0
    assert tier.remove(space, keys[:1], deadline_s=DEADLINE_S) == 1
    assert tier.clear(space.namespace, deadline_s=DEADLINE_S) == 3
    assert write(tier, memory, space, keys) == [Put.STORED] * 4
    assert tier.clear(None, deadline_s=DEADLINE_S) == 4 + 1, "and the marker of the shard"
    assert [other.get(name) for name in strange] == [b"their value"] * 4
    other.close()


def test_values_that_are_none_of_ours_are_misses(healthy, tiers):
    """Another length, under our own names."""
    tier, memory = tiers(healthy.tier())
    space, keys = new_space(), chain("a", 3)
    assert write(tier, memory, space, keys[:1]) == [Put.STORED]
    with tier._link.client(DEADLINE_S) as client:
        for key, value in zip(keys[1:], (b"x", bytes(2 * PAGE_NBYTES)), strict=True):
            assert client.put(page_name(space, key), value) == 0
    assert read(tier, memory, space, keys) == [True, False, False]
    assert read(tier, memory, space, keys[1:]) == [False, False]


def test_an_empty_value_is_a_miss(healthy, tiers, monkeypatch):
    """This version stores none (-600), so what another would answer to a read of one is imitated."""
    tier, memory = tiers(healthy.tier())
    space, keys = new_space(), chain("a", 2)
    assert write(tier, memory, space, keys[:1]) == [Put.STORED]
    empty = page_name(space, keys[1])
    with tier._link.client(DEADLINE_S) as client:
        assert client.put(empty, b"") in (0, -600)
    assert read(tier, memory, space, keys) == [True, False]

    def moved(names, *buffers):
        codes = client.batch_get_into_multi_buffers(names, *buffers)
        return [0 if name == empty else code for name, code in zip(names, codes, strict=True)]

    monkeypatch.setattr(tier._link, "_client", Answers(client, batch_get_into_multi_buffers=moved))
    assert read(tier, memory, space, keys) == [True, False]
    assert read(tier, memory, space, keys[1:]) == [False]


@pytest.mark.parametrize(("times", "expected"), [(1, True), (1000, False)], ids=["once", "always"])
def test_a_page_whose_lease_ends_while_it_is_read_is_read_once_more(healthy, tiers, monkeypatch, times, expected):
    """Imitated, and nothing of it comes over. Where that is so every time it is a miss, and the others are not."""
    tier, memory = tiers(healthy.tier())
    space, keys = new_space(), chain("a", 4)
    assert write(tier, memory, space, keys) == [Put.STORED] * 4
    names = [page_name(space, key) for key in keys]
    client, asked = tier._link._client, []

    def expired(wanted, *buffers):
        asked.append(wanted)
        if len(asked) > times:
            return client.batch_get_into_multi_buffers(wanted, *buffers)
        left = [at for at, name in enumerate(wanted) if name != names[1]]
        codes = dict.fromkeys(wanted, -707)
        if left:
            some = [[each[at] for at in left] for each in (wanted, *buffers)]
            codes |= zip(some[0], client.batch_get_into_multi_buffers(*some), strict=True)
        return list(codes.values())

    monkeypatch.setattr(tier._link, "_client", Answers(client, batch_get_into_multi_buffers=expired))
    assert read(tier, memory, space, keys) == [True, expected, True, True]
    assert asked == [names, names[1:2]]
    assert tier.stats().notes.get("read: the lease expired while it was read (-707)") == (None if expected else "1")


def test_memory_that_grows_is_registered_from_where_it_ended(healthy, tiers):
    tier = healthy.tier()
    try:
        memory, space, keys = Memory(), new_space(), chain("a", 3)
        end = 4 * PAGE_NBYTES + 100  # in the middle of a page of the longer one
        tier.register(memory.all[:end])
        assert write(tier, memory, space, keys[:1]) == [Put.STORED]
        tier.register(memory.all)
        tier.register(memory.all)
        across = memory.all[end - PAGE_NBYTES // 2 :][:PAGE_NBYTES]
        memory._next = (end // 4096 + 2) * PAGE_NBYTES
        assert write(tier, memory, space, keys[1:]) == [Put.STORED] * 2
        from store_client.tiers.base import Target

        (found,) = tier.read(space, [Target(keys[0], [across])], nbytes=PAGE_NBYTES, deadline_s=DEADLINE_S)
        assert found is not None
        assert read(tier, memory, space, keys) == [True] * 3
        assert len(tier._registered.buffers([across])) == 2, "the piece lies in two registered ranges"
    finally:
        tier.close()


def test_a_master_that_takes_no_puts_is_called_one_of_another_version(healthy, tiers, monkeypatch):
    """Imitated: clients and masters whose versions differ answer -900 to puts alone, as users report it."""
    tier, memory = tiers(healthy.tier())
    space, keys = new_space(), chain("a", 2)
    assert contains(tier, space, keys) == [False] * 2

    def refused(names, *arguments):
        return [-900] * len(names)

    monkeypatch.setattr(tier._link, "_client", Answers(tier._link._client, batch_put_from_multi_buffers=refused))
    assert cause_of(lambda: write(tier, memory, space, keys)) == "unavailable"

    def cause():
        return cause_of(lambda: write(tier, memory, space, keys)) == "version"

    until(cause, "the second refusal is told apart from a master that died")
    with pytest.raises(TierError, match=r"another version.*mooncake-transfer-engine"):
        write(tier, memory, space, keys)
    assert contains(tier, space, keys) == [False] * 2, "reading goes on"
