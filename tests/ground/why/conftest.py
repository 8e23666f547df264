"""A model's folder, the pool of an engine that serves it, and a prompt."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ground.why.asking import CAPACITY, SHAPE, TOKENS, WHOLE

from mooncake_connector.kv.identity.checkpoint import weights_digest
from mooncake_connector.kv.namespace import Namespace
from store_client import EmbeddedStore, Space


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "model.safetensors").write_bytes(os.urandom(4096))
    return folder


@pytest.fixture(autouse=True)
def pool(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "pool"
    monkeypatch.setenv("MOONCAKE_CONNECTOR_POOL", str(folder))
    return folder


@pytest.fixture
def store(pool) -> Iterator[EmbeddedStore]:
    with EmbeddedStore(pool, CAPACITY) as store:
        yield store


@pytest.fixture
def name(model) -> Namespace:
    """What an engine that serves the model uses."""
    return Namespace(
        model_name=str(model), model_digest=weights_digest(str(model), None), kv_dtype="bfloat16", num_layers=2,
        num_kv_heads=2, head_dim=16, page_tokens=64,
    )  # fmt: skip


@pytest.fixture
def space(store, name) -> Space:
    return store.space(name, WHOLE)


@pytest.fixture
def ids(tmp_path) -> Path:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(TOKENS))
    return file
