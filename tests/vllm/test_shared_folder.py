"""Engines whose pools are their own, as on hosts of their own, and share a folder behind them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from cases import PROMPT, steady_runners
from faults import Faults
from harness import Engine
from hosts import Host, report
from pd import figures
from simulated.waiting import wait_for

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import page_keys

KEYS = page_keys(PROMPT, 16)
ALL_LOADED = 4 + 2

def elsewhere(engine: Engine) -> list[Shard]:
    """Of which shards the folder has pages, as the scheduler knows."""
    namespace = engine.prefix.namespace()
    assert namespace is not None
    return list(engine.prefix._store.store.shards_elsewhere(namespace))


def share(engine: Engine, pages: int = len(KEYS)) -> None:
    """An engine computes the prompt, and its agent writes its pages to the folder."""
    engine.check(PROMPT)
    wait_for(lambda: report(engine)["written_pages"] >= pages)


@steady_runners
def test_pages_that_one_host_computed_are_loaded_on_another(host: Host, faults: Faults) -> None:
    share(host("one"))
    other = host("other")
    other.check(PROMPT, computed=ALL_LOADED)
    assert figures(other)["tier_hit_tokens"] == 16 * len(KEYS)
    assert report(other)["fetched_pages"] == len(KEYS) and "failures" not in figures(other)


@pytest.mark.parametrize("split", [{"tp_size": 2}, {"pp_size": 2}], ids=["tp2", "pp2"])
def test_every_ranks_pages_are_fetched(host: Host, split: dict[str, int]) -> None:
    share(host("one", **split), 2 * len(KEYS))
    host("other", **split).check(PROMPT, computed=ALL_LOADED)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [({"tp_size": 2}, {}), ({}, {"tp_size": 2}), ({"pp_size": 2}, {}), ({}, {"pp_size": 2})],
    ids=["tp2 to 1", "tp1 to 2", "pp2 to 1", "pp1 to 2"],
)
def test_an_instance_with_another_split_gets_the_pages_too(
    host: Host, writer: dict[str, int], reader: dict[str, int]
) -> None:
    share(host("one", **writer), math.prod(writer.values()) * len(KEYS))
    other = host("other", **reader)
    (*_, view) = other.prefix._views()
    wait_for(lambda: len(elsewhere(other)) == math.prod(writer.values()))
    other.check(PROMPT, computed=ALL_LOADED)
    assert figures(other)["tier_hit_tokens"] == 16 * len(KEYS)
    assert report(other)["fetched_pages"] == math.prod(writer.values()) * len(KEYS), "each page is fetched once"
    assert not all(view.own.contains(KEYS)), "nobody has computed them"


def test_where_one_rank_of_another_split_lacks_pages_those_that_all_have_are_loaded(host: Host, tmp_path: Path) -> None:
    share(host("one", tp_size=2), 2 * len(KEYS))
    for key in KEYS[2:]:
        files = sorted(path for path in (tmp_path / "shared").rglob(key.hex()))
        assert len(files) == 2
        files[0].unlink()
    other = host("other")
    wait_for(lambda: len(elsewhere(other)) == 2)
    other.check(PROMPT, computed=len(PROMPT) - 16 * 2 + 2)


@pytest.mark.parametrize("damage", ["no", "half"])
def test_a_page_of_which_a_part_was_changed_in_the_folder_is_computed(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    if damage == "half":  # a worker may be too late to hear that a page was coming, which never does
        monkeypatch.setattr("store_client.jobs._HEARING_S", 2.0)
    share(host("one", tp_size=2), 2 * len(KEYS))
    if damage == "half":
        file = min(path for path in (tmp_path / "shared").rglob(KEYS[0].hex()))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    other = host("other")
    wait_for(lambda: len(elsewhere(other)) == 2)
    name = other.add(PROMPT)
    other.finish(name)
    nothing = len(PROMPT) + 2
    # On a busy machine the tier's first word may be of some of the pages: the rest is computed then.
    assert other.computed(name) == nothing if damage == "half" else other.computed(name) < nothing
    assert report(other)["corrupt_pages"] == (damage == "half")


def test_what_landed_before_the_requests_turn_is_a_hit_like_any(host: Host) -> None:
    share(host("one"))
    other = host("other")
    name = other.add(PROMPT)
    (view,) = other.prefix._views()
    wait_for(lambda: all(view.contains(KEYS)))
    other.finish(name, computed=ALL_LOADED)


@pytest.mark.parametrize("page", [0, 3])
def test_a_page_that_was_changed_in_the_folder_is_computed(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr("store_client.jobs._HEARING_S", 2.0)
    one = host("one")
    share(one)
    key = KEYS[page]
    (file,) = [path for path in (tmp_path / "shared").rglob("*") if key.hex() in path.name and path.is_file()]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    other = host("other")
    name = other.add(PROMPT)
    other.finish(name)
    assert other.computed(name) >= len(PROMPT) - 16 * page, "a page of wrong bytes was loaded"
    assert report(other)["corrupt_pages"] >= 1
    assert all(other.pages(PROMPT))
