"""Two pools, as of two hosts, each with an agent process of its own, share pages through one real cluster."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from mapped import of_mooncake
from tiers.mooncake_cluster import Cluster, needs_mooncake, until

from mooncake_connector.config.sources import load_config
from store_client.agent.visit import ask_report, ask_to_stop
from store_client.open import open_store
from store_client.testing import PAGE_NBYTES, SHARD, chain, get_page, namespace, page_bytes, put_chain

needs_mooncake()

ENGINE = """
import json, sys, time
from mooncake_connector.config.sources import load_config
from store_client.open import open_store
from store_client.testing import PAGE_NBYTES, SHARD, chain, namespace

with open_store(load_config(json.loads(sys.argv[1]), {})) as store:
    space, keys = store.space(namespace(), SHARD, PAGE_NBYTES), chain("a", 4)
    while space.lookup(keys).pages < len(keys):
        time.sleep(0.05)
    print("all are here", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def pools():
    """Names of two pool folders whose agents are ended with the test."""
    folders = [Path(tempfile.mkdtemp(dir="/dev/shm", prefix="mooncake-connector-test-")) for _ in range(2)]
    found = [folder / "pool" for folder in folders]
    yield found
    for folder in found:
        if folder.exists():
            ask_to_stop(folder, 60)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def settings(pool, cluster):
    tier = {"kind": "mooncake", "master": f"127.0.0.1:{cluster.port}", "host": "127.0.0.1"}
    return {"pool": str(pool), "capacity": 16 << 20, "tiers": [tier]}


def opened(pool, cluster):
    return open_store(load_config(settings(pool, cluster), {}))


def space_of(store):
    return store.space(namespace(), SHARD, PAGE_NBYTES)


def arrived(space, keys):
    """Whether the pages are in the pool now; asks for them if not."""
    return space.lookup(keys).pages == len(keys)


def right(space, keys):
    return all(np.array_equal(get_page(space, key), page_bytes(key)) for key in keys)


def test_what_one_pool_stored_is_found_by_the_other_also_after_its_agent_crashed(pools):
    keys, later = chain("a", 24), chain("b", 8)
    with Cluster() as cluster, ExitStack() as stores:
        first, second = (space_of(stores.enter_context(opened(pool, cluster))) for pool in pools)
        put_chain(first, keys)
        until(lambda: arrived(second, keys), "the pages come from the cluster")
        assert right(second, keys)
        os.kill(until(lambda: ask_report(pools[1]), "the second pool has an agent")["pid"], signal.SIGKILL)
        put_chain(first, later)
        until(lambda: arrived(second, later), "another agent is started, and brings pages")
        assert right(second, later)


def test_mooncakes_library_is_in_the_agent_and_in_no_process_that_uses_it(pools):
    """Although it is installed there."""
    with Cluster(nodes=1) as cluster, opened(pools[0], cluster) as store:
        put_chain(space_of(store), chain("a", 4))
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, json.dumps(settings(pools[1], cluster))], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, cwd="/",  # or it would import the source tree
        )  # fmt: skip
        try:
            assert engine.stdout.readline() == "all are here\n"
            assert of_mooncake(ask_report(pools[1])["pid"])
            assert not of_mooncake(engine.pid)
        finally:
            engine.kill()
            engine.communicate()
