"""Two hosts' pools and one object store between them: what one computes the other has, and nothing of a stranger's."""

import numpy as np
import obstore
import pytest
from agent.flows import SECRET, fetch, flowing, is_right, wait_until
from tiers.s3_servers import environment, opened, settings
from tiers.test_object import bucket, lies_at

from store_client import EmbeddedStore, Put
from store_client.testing import SHARD, chain, namespace, put_chain
from store_client.tiers.base import SpaceName
from store_client.tiers.testing import DEADLINE_S, contains

KEYS = chain("shared", 6)
SPACE = SpaceName(namespace().digest, SHARD)


@pytest.fixture
def hosts(tmp_path, gateway, monkeypatch):
    """Two pools, the tier of each, and its settings."""
    environment(monkeypatch)
    made = []
    for name in "ab":
        tier = opened(gateway.port)
        tier.clear(SPACE.namespace, deadline_s=DEADLINE_S)
        made.append((EmbeddedStore(tmp_path / name, 16 << 20), tier))
    yield made
    for store, tier in made:
        tier.close()
        store.close()


def test_what_one_host_stores_another_one_fetches_and_refuses_what_a_stranger_changed(hosts, gateway):
    (first, to_store), (second, to_fetch) = hosts
    looking = opened(gateway.port)
    with flowing(first, (settings(gateway.port), to_store), secret=SECRET):
        assert put_chain(first.space(namespace(), SHARD), KEYS) == [Put.STORED] * 6
        wait_until(lambda: all(contains(looking, SPACE, KEYS)))
    stranger = bucket(gateway)
    found = np.frombuffer(obstore.get(stranger, lies_at(SPACE, KEYS[3])).bytes(), dtype=np.uint8).copy()
    found[1000] ^= 1
    obstore.put(stranger, lies_at(SPACE, KEYS[3]), found.tobytes())
    with flowing(second, (settings(gateway.port), to_fetch), secret=SECRET) as flow:
        word, _ = fetch(flow, KEYS)
        assert word.landed == 3, "the page that was changed is no page"
        space = second.space(namespace(), SHARD)
        assert [is_right(space, key) for key in KEYS[:3]] == [True] * 3 and not any(space.contains(KEYS[3:4]))
        wait_until(lambda: contains(looking, SPACE, KEYS[3:4]) == [False])
    looking.close()


def test_a_page_of_another_deployment_is_refused(hosts, gateway):
    (first, to_store), (second, to_fetch) = hosts
    looking = opened(gateway.port)
    with flowing(first, (settings(gateway.port), to_store), secret=b"the secret of another deployment"):
        put_chain(first.space(namespace(), SHARD), KEYS)
        wait_until(lambda: all(contains(looking, SPACE, KEYS)))
    with flowing(second, (settings(gateway.port), to_fetch), secret=SECRET) as flow:
        assert fetch(flow, KEYS)[0].landed == 0
    looking.close()
