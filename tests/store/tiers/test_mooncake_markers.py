"""Markers of shards in a store that lists nothing, over a dictionary that behaves as Mooncake does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mooncake_connector.kv.geometry import Shard
from store_client.base import Pieces, Put
from store_client.tiers.base import SEAL_NBYTES, Sealed, SpaceName, TierError
from store_client.tiers.mooncake import markers
from store_client.tiers.mooncake.markers import Markers

DEADLINE_S = 60.0
NAMESPACE = bytes(32)
SHARDS = [Shard(0, 8, head, head + 1) for head in range(8)]


class Objects:
    """A put of what is there already is told as a success, and changes nothing."""

    def __init__(self) -> None:
        self.content: dict[str, tuple[bytes, bytes]] = {}
        self.calls: list[str] = []
        self.broken = False

    def markers(self) -> Markers:
        return Markers("test", self.are_there, self.read, self.write, self.remove)

    def are_there(self, names: Sequence[str], deadline_s: float) -> list[bool]:
        self.calls.append("are_there")
        if self.broken:
            raise TierError("made to fail")
        return [name in self.content for name in names]

    def read(
        self, names: Sequence[str], places: Sequence[Pieces], nbytes: int, deadline_s: float
    ) -> list[bytes | None]:
        seals: list[bytes | None] = []
        for name, (piece,) in zip(names, places, strict=True):
            page, seal = self.content[name]
            piece[:] = np.frombuffer(page, dtype=np.uint8)
            seals.append(seal)
        return seals

    def write(self, names: Sequence[str], pages: Sequence[Sealed], nbytes: int, deadline_s: float) -> list[Put]:
        self.calls.append("write")
        for name, page in zip(names, pages, strict=True):
            self.content.setdefault(name, (page.pieces[0].tobytes(), page.seal))
        return [Put.STORED] * len(names)

    def remove(self, names: Sequence[str], deadline_s: float) -> int:
        return sum(self.content.pop(name, None) is not None for name in names)


@pytest.fixture
def objects() -> Objects:
    return Objects()


def told(objects: Objects) -> set[Shard]:
    return set(objects.markers().shards(NAMESPACE, DEADLINE_S))


def note(objects: Objects, shard: Shard) -> None:
    objects.markers().note(SpaceName(NAMESPACE, shard), DEADLINE_S)


def test_hosts_that_note_shards_at_once_lose_none(objects):
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):  # what one has lost to others it notes with its next pages
            list(pool.map(lambda shard: note(objects, shard), SHARDS))
    assert told(objects) == set(SHARDS)


def test_a_marker_that_was_evicted_is_written_anew_in_its_place(objects):
    for shard in SHARDS[:3]:
        note(objects, shard)
    names = list(objects.content)
    del objects.content[names[1]]
    assert told(objects) == {SHARDS[0], SHARDS[2]}
    note(objects, SHARDS[1])
    assert told(objects) == set(SHARDS[:3]) and set(objects.content) == set(names)


@pytest.mark.parametrize("content", [bytes(16), b"\xff" * 16], ids=["an empty shard", "noise"])
def test_what_is_no_marker_stands_for_nothing(objects, content):
    note(objects, SHARDS[0])
    (name,) = objects.content
    objects.content[name] = content, os.urandom(SEAL_NBYTES)
    assert told(objects) == set()
    note(objects, SHARDS[0])
    assert told(objects) == {SHARDS[0]}


def test_a_shard_is_looked_for_once_a_minute_and_sooner_where_that_failed(objects, monkeypatch):
    noting = objects.markers()
    for _ in range(3):
        noting.note(SpaceName(NAMESPACE, SHARDS[0]), DEADLINE_S)
    assert objects.calls.count("write") == 1 and objects.calls.count("are_there") == 2
    monkeypatch.setattr(markers, "_PAUSE_S", 0.0)
    objects.broken = True
    noting.note(SpaceName(NAMESPACE, SHARDS[1]), DEADLINE_S)
    objects.broken = False
    noting.note(SpaceName(NAMESPACE, SHARDS[1]), DEADLINE_S)
    assert told(objects) == set(SHARDS[:2])


@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_marker_that_goes_while_it_is_noted_is_written_with_the_next_pages(objects, all_of_them):
    noting, read = objects.markers(), objects.read

    def clear(*args: Any) -> list[bytes | None]:
        seals = read(*args)
        if all_of_them:
            objects.content.clear()
            noting.look_again()
        else:
            noting.clear(NAMESPACE, DEADLINE_S)
        return seals

    noting._read = clear
    noting.note(SpaceName(NAMESPACE, SHARDS[0]), DEADLINE_S)
    assert told(objects) == set() and objects.calls.count("write") == 1
    noting._read = read
    noting.note(SpaceName(NAMESPACE, SHARDS[0]), DEADLINE_S)
    assert told(objects) == {SHARDS[0]}


def test_whatever_goes_wrong_with_a_marker_the_pages_are_stored(objects, caplog):
    noting = Markers("test", lambda *args: 1 // 0, objects.read, objects.write, objects.remove)
    noting.note(SpaceName(NAMESPACE, SHARDS[0]), DEADLINE_S)
    assert "what shards a model has is not written down now: integer division" in caplog.text


def test_there_are_no_more_than_so_many_and_those_go_with_the_namespace(objects, monkeypatch):
    monkeypatch.setattr(markers, "_NUMBERS", 3)
    noting = objects.markers()
    for shard in SHARDS:
        noting.note(SpaceName(NAMESPACE, shard), DEADLINE_S)
    assert told(objects) == set(SHARDS[:3])
    noting.clear(NAMESPACE, DEADLINE_S)
    assert told(objects) == set()
    noting.note(SpaceName(NAMESPACE, SHARDS[5]), DEADLINE_S)
    assert told(objects) == {SHARDS[5]}
