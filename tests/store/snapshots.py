"""What the tests of snapshots share: pools with something to save, and what a pool holds, as plain values."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client import EmbeddedStore, Put
from store_client.snapshot import SnapshotReport, take_snapshot
from store_client.testing import DEADLINE_S, SHARD, chain, namespace, page_bytes, parents_of, put_pages

Name = tuple[bytes, Shard, bytes]
"""Namespace digest, shard and key of a page."""
SPACES = [
    (namespace("m"), SHARD, 4096),
    (namespace("m"), Shard(0, 4, 0, 1), 2048),
    (namespace("other"), SHARD, 10_000),
]
CAPACITY = 8 << 20


class Held(NamedTuple):
    """What a pool knows of a page."""

    parent: Name | None
    idle_ns: int
    nbytes: int


def put_some(store: EmbeddedStore, chains: int = 3, length: int = 8) -> None:
    """Chains in three spaces, with pages of three sizes."""
    for number in range(chains):
        for name, shard, nbytes in SPACES:
            put_one(store, name, shard, f"{number}", length, nbytes)


def put_one(store: EmbeddedStore, name: Namespace, shard: Shard, called: str, length: int, nbytes: int) -> list[bytes]:
    keys = chain(called, length)
    pages = [page_bytes(key, nbytes) for key in keys]
    space = store.space(name, shard)
    stored = put_pages(space, keys, pages, parents=parents_of(keys), deadline_s=DEADLINE_S)
    assert stored == [Put.STORED] * length
    return keys


def held_by(store: EmbeddedStore) -> dict[Name, Held]:
    """Every page of the pool; each of them was read and has the right bytes."""
    survey = store.survey()
    wrong: list[int] = []

    def compare(pages: object) -> None:
        for i, pieces in pages:  # type: ignore[attr-defined]
            right = page_bytes(survey.pages[i]["key"].tobytes(), int(survey.pages[i]["nbytes"]))
            if not np.array_equal(np.concatenate(pieces), right):
                wrong.append(i)

    assert all(store.peek(survey.pages, compare)) and not wrong

    def name_of(i: int) -> Name:
        owner, shard = survey.spaces[int(survey.pages[i]["space"])]
        return owner.digest, shard, survey.pages[i]["key"].tobytes()

    return {
        name_of(i): Held(
            name_of(int(page["parent"])) if page["parent"] >= 0 else None, int(page["idle_ns"]), int(page["nbytes"])
        )
        for i, page in enumerate(survey.pages)
    }


def by_use(held: dict[Name, Held]) -> list[Name]:
    """What was used last first; pages of one put have the same time."""
    return sorted(held, key=lambda name: (held[name].idle_ns, name[2], name[0], name[1].head_stop))


def saved(pool: Path, folder: Path, chains: int = 3, length: int = 8) -> SnapshotReport:
    """A snapshot of a new pool."""
    with EmbeddedStore(pool, CAPACITY) as store:
        put_some(store, chains, length)
        return take_snapshot(store, folder)
