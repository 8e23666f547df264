"""The backend over SGLang's own host pools, without a server; see host_pools.py and instances.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from causes import forget_causes
from faults import Faults, faulty_opening
from instances import open_storage
from pd_cases import tidied
from pd_instances import Pair, running
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

import store_client.open
from store_client.open import BackgroundStore


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine all of this lasts longer than an engine cares to wait."""
    first_attempt = BackgroundStore.wait
    monkeypatch.setattr(BackgroundStore, "wait", lambda store, timeout_s: first_attempt(store, 60.0))
    monkeypatch.setattr("sglang_backend.stored_pool._LOOKUP_HANGS_S", 60.0)
    monkeypatch.setattr("sglang_backend.hicache._CLEAR_S", 60.0)
    monkeypatch.setattr("sglang_backend.hicache._CLOSE_S", 60.0)


@pytest.fixture(scope="module")
def pd_settings() -> Iterator[None]:
    """SGLang's for prefill and decode apart, and ours."""
    with pytest.MonkeyPatch.context() as patch, running(patch, transfer_lease_s=60):
        yield


@pytest.fixture(scope="module")
def pair(pd_settings: None) -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.fixture
def tidy(pair: Pair) -> Iterator[Pair]:
    with tidied(pair):
        yield pair


@pytest.fixture
def attach(pool: Path) -> Iterator[Callable[..., HiCacheStorage]]:
    """Attach the backend to a host pool, over this test's pool folder; see `instances.open_storage`."""
    forget_causes()
    attached: list[HiCacheStorage] = []

    def attach_one(host_pool: Any, **options: Any) -> HiCacheStorage:
        storage = open_storage(host_pool, **{"pool": pool, **options})
        attached.append(storage)
        return storage

    yield attach_one
    for storage in attached:
        storage.close()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Every pool that opens during the test is the real one behind these faults."""
    faults = Faults()
    monkeypatch.setattr(store_client.open, "open_store", faulty_opening(faults, store_client.open.open_store))
    yield faults
    faults.release()
