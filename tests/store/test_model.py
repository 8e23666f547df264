"""A pool against a dict, step by step: the store may forget pages, and may never invent or alter any."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store.audit import audit

from store_client import EmbeddedStore, Put
from store_client.testing import (
    DEADLINE_S,
    SHARD,
    chain,
    follow,
    get_page,
    namespace,
    page_bytes,
    parents_of,
    put_pages,
)

MODELS = ("one", "two")
SIZES = {"one": 4096, "two": 70000}
KEYS = chain("model", 12)
model_names = st.sampled_from(MODELS)
lengths = st.integers(1, len(KEYS))


class PoolAgainstDict(RuleBasedStateMachine):
    @initialize(capacity=st.sampled_from([1 << 20, 4 << 20]))
    def open(self, capacity: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mooncake-model-"))
        self.store = EmbeddedStore(self.folder / "pool", capacity)
        self.known: dict[tuple[str, bytes], bytes] = {}
        self.position = self.store.changes().position
        self.followed: set[tuple[bytes, bytes]] = set()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            audit(self.store)
            self.store.close()
            shutil.rmtree(self.folder)

    def space(self, model: str):  # type: ignore[no-untyped-def]
        return self.store.space(namespace(model), SHARD)

    @rule(model=model_names, length=lengths)
    def put(self, model: str, length: int) -> None:
        keys = KEYS[:length]
        space = self.space(model)
        before = space.contains(keys)
        pages = [page_bytes(key, SIZES[model]) for key in keys]
        outcome = put_pages(space, keys, pages, parents=parents_of(keys), deadline_s=DEADLINE_S)
        for key, page, was, put in zip(keys, pages, before, outcome, strict=True):
            assert (put is Put.PRESENT) == was or put is Put.STORED
            if put is not Put.FAILED:
                self.known[model, key] = page.tobytes()

    @rule(model=model_names, index=st.integers(0, len(KEYS) - 1))
    def get(self, model: str, index: int) -> None:
        got = get_page(self.space(model), KEYS[index], SIZES[model])
        assert got is None or got.tobytes() == self.known[model, KEYS[index]]

    @rule(model=model_names, indices=st.sets(st.integers(0, len(KEYS) - 1)))
    def remove(self, model: str, indices: set[int]) -> None:
        keys = [KEYS[i] for i in indices]
        present = sum(self.space(model).contains(keys))
        assert self.space(model).remove(keys) == present
        assert not any(self.space(model).contains(keys))
        for key in keys:
            self.known.pop((model, key), None)

    @rule(model=model_names)
    def clear(self, model: str) -> None:
        self.store.clear(namespace(model).digest)
        assert not any(self.space(model).contains(KEYS))
        self.known = {name: page for name, page in self.known.items() if name[0] != model}

    @rule(capacity=st.sampled_from([None, 1 << 20, 2 << 20, 4 << 20]))
    def reopen(self, capacity: int | None) -> None:
        self.store.close()
        self.store = EmbeddedStore(self.folder / "pool", capacity)

    @invariant()
    def nothing_is_invented(self) -> None:
        if not hasattr(self, "store"):
            return
        for model in MODELS:
            present = self.space(model).contains(KEYS)
            assert {key for key, there in zip(KEYS, present, strict=True) if there} <= {
                key for name, key in self.known if name == model
            }
            assert self.space(model).lookup(KEYS).pages == [*present, False].index(False)

    @invariant()
    def who_follows_the_changes_knows_what_is_there(self) -> None:
        if not hasattr(self, "store"):
            return
        told, self.position = follow(self.store, self.position)
        for stored, digest, _, key in told:
            (self.followed.add if stored else self.followed.remove)((digest, key))
        for model in MODELS:
            digest = namespace(model).digest
            assert self.space(model).contains(KEYS) == [(digest, key) in self.followed for key in KEYS]

    @invariant()
    def the_capacity_holds(self) -> None:
        if hasattr(self, "store"):
            stats = self.store.stats()
            assert stats.used_nbytes <= stats.capacity_nbytes


PoolAgainstDict.TestCase.settings = settings(
    max_examples=20, stateful_step_count=25, suppress_health_check=list(HealthCheck)
)
TestPoolAgainstDict = PoolAgainstDict.TestCase
