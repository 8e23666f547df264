"""Two hosts, each with a pool and an agent of its own, and one shared folder: what one stores the other reads."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from agent.processes import is_alive, pid_of, used_by_one
from agent.stand_in import configured, space_of, tiered, until

from mooncake_connector.config.schema import Config
from store_client import Put
from store_client.agent.tiered import TieredStore
from store_client.agent.visit import ask_report, ask_to_stop
from store_client.testing import DEADLINE_S, chain, get_page, page_bytes, put_chain


@pytest.fixture
def hosts(pool: Path, tmp_path: Path, quick: None) -> Iterator[list[Config]]:
    """Their configurations."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of the deployment")
    secret.chmod(0o600)
    (tmp_path / "shared").mkdir(mode=0o700)
    tiers = [{"kind": "folder", "path": str(tmp_path / "shared")}]
    pools = [pool.with_name(f"host{number}") for number in range(2)]
    yield [configured(each, agent="auto", tiers=tiers, secret_file=str(secret)) for each in pools]
    for each in pools:
        with suppress(Exception):
            ask_to_stop(each, DEADLINE_S)


def given(pool: Path, pages: int) -> None:
    """The tier of a host has been given so many pages."""
    until(lambda: ask_report(pool)["tiers"][0]["written_pages"] >= pages)  # type: ignore[index]


def reads(store: TieredStore, keys: list[bytes]) -> None:
    """All of these pages come, and are right."""
    until(lambda: space_of(store).lookup(keys).pages == len(keys), "the pages did not come")
    assert all(np.array_equal(get_page(space_of(store), key), page_bytes(key)) for key in keys)


def test_pages_that_one_host_stored_come_to_the_other_without_a_lookup_that_waits(hosts):
    keys = chain("a", 12)
    with tiered(hosts[0].pool, hosts[0]) as one, tiered(hosts[1].pool, hosts[1]) as two:
        assert put_chain(space_of(one), keys) == [Put.STORED] * 12
        given(hosts[0].pool, 12)
        space_of(two).prefetch([*keys, *chain("nobody has", 3)], prefill_tokens_s=1.0)
        reads(two, keys)
        assert space_of(two).lookup([*keys, *chain("nobody has", 3)]).pages == 12
        assert ask_report(hosts[1].pool)["tiers"][0]["fetched_pages"] == 12  # type: ignore[index]


def test_what_one_host_clears_comes_from_the_shared_folder_no_more(hosts):
    keys = chain("a", 4)
    with tiered(hosts[0].pool, hosts[0]) as one, tiered(hosts[1].pool, hosts[1]) as two:
        put_chain(space_of(one), keys)
        given(hosts[0].pool, 4)
        assert space_of(one).clear() == 4
        until(lambda: not list(hosts[0].pool.glob("agent.forget.*")))
        other = chain("b", 2)
        put_chain(space_of(one), other)
        given(hosts[0].pool, 6)
        reads(two, other)
        space_of(two).prefetch(keys, prefill_tokens_s=1.0)
        until(lambda: all(asked.done for asked in space_of(two)._asks.values()))
        assert space_of(two).lookup(keys).pages == 0


def test_pages_come_although_the_agents_of_both_hosts_are_killed(hosts):
    with tiered(hosts[0].pool, hosts[0]) as one, tiered(hosts[1].pool, hosts[1]) as two:
        for number in range(2):
            keys = chain(f"{number}", 4)
            pids = [pid_of(host.pool) for host in hosts]
            put_chain(space_of(one), keys[:2])
            os.kill(pids[0], signal.SIGKILL)
            used_by_one(hosts[0].pool, pids[0])
            put_chain(space_of(one), keys[2:])
            given(hosts[0].pool, 2)
            space_of(two).prefetch(keys, prefill_tokens_s=1.0)
            os.kill(pids[1], signal.SIGKILL)
            used_by_one(hosts[1].pool, pids[1])
            reads(two, keys[2:])
            assert not any(map(is_alive, pids))
