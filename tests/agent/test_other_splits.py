"""Pages that instances with another TP or PP size stored, fetched from a tier and put together."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import xxhash
from agent.flows import settings
from agent.memory_tier import MemoryTier
from agent.stand_in import CAPACITY, Running, configured, tiered, until
from causes import forget_causes
from store.shard_model import UNIT_NBYTES, Model, Reader, ranks

from mooncake_connector.kv.geometry import Shard
from store_client import EmbeddedStore, Lookup
from store_client.agent import splits
from store_client.agent.flow import Flow
from store_client.agent.source import Source
from store_client.agent.tiered import TieredStore
from store_client.sharded import ShardView
from store_client.testing import DEADLINE_S, namespace
from store_client.tiers.base import SpaceName, TierError
from store_client.tiers.seal import seal

WHOLE = Shard(0, 4, 0, 4)
HALVES = (Shard(0, 4, 0, 2), Shard(0, 4, 2, 4))
QUARTERS = tuple(Shard(0, 4, head, head + 1) for head in range(4))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's first word is waited for, however busy the machine is."""
    forget_causes()
    monkeypatch.setattr("store_client.agent.patience.LEAST_S", 60.0)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Model:
    return Model(4, 4, name=request.node.name)


class Host:
    """A pool, its agent and one tier behind it."""

    def __init__(self, pool, flow: Flow, tier: MemoryTier, store: TieredStore, model: Model) -> None:
        self.flow, self.tier, self.store, self.model = flow, tier, store, model

    def give(self, shard: Shard, pages: Iterable[int]) -> None:
        """The tier has these pages of a shard."""
        space = SpaceName(self.model.namespace.digest, shard)
        for page in pages:
            content, key = self.model.stored(page, shard), self.model.keys[page]
            self.tier.pages[space, key] = content, seal(space, key, [content], xxhash.xxh3_64_intdigest(content.data))

    def view(self, shard: Shard) -> ShardView:
        """What a rank sees, once it knows what the tier has."""
        view = ShardView(self.store, self.model.namespace, shard, UNIT_NBYTES)
        known = {name.shard for name, _ in self.tier.pages}
        until(lambda: set(self.store.shards_elsewhere(self.model.namespace)) == known)
        return view

    def check(self, shard: Shard, pages: int) -> None:
        """A rank that announces the chain gets so many leading pages, and they are right."""
        view, reader, keys = self.view(shard), Reader(self.model, shard), self.model.keys
        view.prefetch(keys, prefill_tokens_s=1.0)
        until(lambda: view.lookup(keys) == Lookup(pages), f"{view.lookup(keys)}, not {pages} pages")
        assert view.read(keys, reader.consume) == [page < pages for page in range(len(keys))]
        for page in range(pages):
            assert np.array_equal(reader.page(page), reader.expected(page))

    def fetched(self) -> set[Shard]:
        """Shards of which the pool has got pages."""
        return set(self.store.shards(self.model.namespace))


@contextmanager
def a_host(pool, model: Model, *tiers: MemoryTier) -> Iterator[Host]:
    own = EmbeddedStore(pool, CAPACITY)
    flow = Flow(own, [(settings(f"tier-{n}"), tier) for n, tier in enumerate(tiers)], b"")
    agent = Running(pool, flow, configured(pool))
    try:
        with tiered(pool) as store:
            yield Host(pool, flow, tiers[0], store, model)
    finally:
        for tier in tiers:
            tier.listen.set()
        agent.stop()
        own.close()


@pytest.fixture
def host(pool, model: Model) -> Iterator[Host]:
    with a_host(pool, model, MemoryTier()) as running:
        yield running


SPLITS = {"tp1": ([], 1), "tp2": ([], 2), "tp4": ([], 4), "pp2": ([1], 1), "pp3 tp2": ([1, 2], 2), "tp8": ([], 8)}
PAIRS = list(itertools.permutations(SPLITS, 2))


@pytest.mark.parametrize(("writer", "reader"), PAIRS, ids=[" to ".join(pair) for pair in PAIRS])
def test_every_rank_gets_pages_that_an_instance_with_another_split_stored(host, model, writer, reader):
    for shard in ranks(*SPLITS[writer], model):
        host.give(shard, range(len(model.keys)))
    for shard in ranks(*SPLITS[reader], model):
        host.check(shard, len(model.keys))


def test_pages_are_coming_as_far_as_each_part_has_them(host, model):
    host.give(HALVES[0], range(4))
    host.give(HALVES[1], range(2))
    host.tier.deaf.add("read")
    view = host.view(WHOLE)
    until(lambda: view.lookup(model.keys) == Lookup(0, coming=2))
    host.tier.listen.set()
    host.check(WHOLE, 2)


def test_small_parts_are_fetched_for_what_the_large_ones_lack(host, model):
    host.give(HALVES[0], range(4))
    host.give(HALVES[1], range(2))
    for shard in QUARTERS:
        host.give(shard, range(4))
    host.check(WHOLE, 4)
    assert host.fetched() == {*HALVES, *QUARTERS[2:]}
    pages = {shard: host.store.space(model.namespace, shard).contains(model.keys) for shard in QUARTERS[2:]}
    assert set(map(tuple, pages.values())) == {(False, False, True, True)}, "pages were fetched twice"


def test_where_the_own_shard_is_there_no_other_is_fetched(host, model):
    for shard in (WHOLE, *HALVES):
        host.give(shard, range(4))
    host.check(WHOLE, 4)
    assert host.fetched() == {WHOLE}


def test_what_the_own_shard_lacks_comes_from_others_behind_it(host, model):
    host.give(WHOLE, range(2))
    for shard in HALVES:
        host.give(shard, range(4))
    host.check(WHOLE, 4)
    assert host.store.space(model.namespace, HALVES[0]).contains(model.keys) == [False, False, True, True]


def test_parts_that_leave_something_out_are_not_asked_for(host, model):
    host.give(HALVES[0], range(4))
    view = host.view(WHOLE)
    view.prefetch(model.keys, prefill_tokens_s=1.0)
    until(lambda: view.lookup(model.keys) == Lookup(0))
    assert not host.tier.made("read") and host.fetched() == set()
    host.give(HALVES[1], range(4))
    host.flow._splits._known.clear()
    host.store._client._places._elsewhere.clear()
    host.check(WHOLE, 4)


def test_a_part_with_a_wrong_byte_ends_the_chain_there(host, model):
    for shard in HALVES:
        host.give(shard, range(4))
    page, sealed = host.tier.pages[SpaceName(model.namespace.digest, HALVES[1]), model.keys[2]]
    page = page.copy()
    page[5] ^= 1
    host.tier.pages[SpaceName(model.namespace.digest, HALVES[1]), model.keys[2]] = page, sealed
    host.check(WHOLE, 2)
    assert host.flow.stats()[0].corrupt_pages == 1


def test_a_tier_that_does_not_say_what_it_has_keeps_no_lookup_waiting(host, model):
    """Whoever asks hears of the own shard, and nothing else is waited for."""
    host.tier.deaf.add("shards")
    view = ShardView(host.store, model.namespace, WHOLE, UNIT_NBYTES)
    until(lambda: host.tier.made("shards"))
    view.prefetch(model.keys)
    until(lambda: view.lookup(model.keys) == Lookup(0))
    assert host.store.shards_elsewhere(model.namespace) == []


def test_a_miss_asks_for_other_shards_of_a_namespace_now_and_then_alone(host, model, monkeypatch):
    monkeypatch.setattr(splits, "_ELSE_GOOD_S", 3600.0)
    monkeypatch.setattr("store_client.agent.places._WHICH_S", 3600.0)
    monkeypatch.setattr("store_client.agent.client._KEPT_S", 3600.0)
    view = ShardView(host.store, model.namespace, WHOLE, UNIT_NBYTES)
    until(lambda: host.tier.made("shards"))
    for _ in range(100):
        assert view.lookup(model.keys).pages == 0
    until(lambda: view.lookup(model.keys) == Lookup(0))
    assert len(host.tier.made("shards")) == 1
    assert len(host.tier.made("contains")) == 1, "another shard was asked for"


def test_what_was_stored_meanwhile_is_heard_of(host, model, monkeypatch):
    monkeypatch.setattr(splits, "_ELSE_GOOD_S", 0.0)
    monkeypatch.setattr("store_client.agent.places._WHICH_S", 0.0)
    view = ShardView(host.store, model.namespace, WHOLE, UNIT_NBYTES)
    until(lambda: view.lookup(model.keys) == Lookup(0))
    host.give(HALVES[0], range(4))
    until(lambda: view.lookup(model.keys) == Lookup(0) and host.store.shards_elsewhere(model.namespace) == [HALVES[0]])
    host.give(HALVES[1], range(4))
    until(lambda: view.lookup([model.keys[1]]).coming or view.lookup([model.keys[1]]).pages)
    asked = len(host.tier.made("shards"))
    for _ in range(10):
        host.store.shards_elsewhere(model.namespace)
        until(lambda: host.store._client._outbox.empty())
    assert len(host.tier.made("shards")) == asked, "what makes a whole model is good for a while"


def test_beyond_what_is_remembered_nobody_who_listens_is_forgotten(monkeypatch):
    monkeypatch.setattr(splits, "_MOST_NAMESPACES", 2)
    tier, told = MemoryTier(), []
    tier.deaf.add("shards")
    source = Source(settings(), tier, b"")
    known = splits.Splits([source])

    def ask(name: str) -> None:
        known.ask(namespace(name), lambda shards, done: told.append((name, done)))

    for name in "abc":
        ask(name)
    assert told == [("a", False), ("b", False), ("c", True)], "there is room for two that are being asked for"
    tier.listen.set()
    until(lambda: {("a", True), ("b", True)} <= set(told))
    ask("c")
    until(lambda: told[-1] == ("c", True) and len(told) == 7)
    assert len(tier.made("shards")) == 3
    assert source.surveys.close(time.monotonic() + DEADLINE_S)


def test_shards_that_the_model_cannot_have_are_left_out_and_a_tier_that_fails_hides_no_other(pool, model):
    broken = MemoryTier()
    broken.failing = TierError("made to fail", "unavailable")
    with a_host(pool, model, MemoryTier(), broken) as host:
        host.give(HALVES[0], [0])
        host.tier.pages[SpaceName(model.namespace.digest, Shard(0, 5, 0, 4)), model.keys[0]] = (np.zeros(1), b"")
        ShardView(host.store, model.namespace, WHOLE, UNIT_NBYTES)
        until(lambda: host.store.shards_elsewhere(model.namespace) == [HALVES[0]])
        until(lambda: host.flow.stats()[1].errors == {"unavailable": 1})
