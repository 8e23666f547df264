"""Models with several KV-cache groups whose pages come from a folder behind the pool: what is asked, and what is a hit.

Each host has a pool and a real agent of its own, as in test_shared_folder.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from cases import steady_runners
from harness import Engine
from hosts import Host, report
from mixes import chunked, full, state, window
from pd import figures
from runner import WrongKV
from simulated.waiting import wait_for

from mooncake_connector.kv.keys import page_keys

MIXES = {
    "window": [full(), window(20)],
    "two windows": [full(), window(33), window(70)],
    "chunked": [full(), chunked(80)],
    "states": [full(), state(), state()],
    "window and state": [full(), window(20), state()],
}
GENEROUS = {"extra": {"state_budget": 1024}}
_RNG = random.Random(17)
PROMPT = [_RNG.randrange(oracle.VOCAB // 2) for _ in range(100)]
"""Six full pages and 4 tokens more."""
KEYS = page_keys(PROMPT, 16)
every_mix = pytest.mark.parametrize("mix", MIXES)


def tail(count: int) -> list[int]:
    """Tokens that no prompt has had."""
    return [_RNG.randrange(oracle.VOCAB // 2, oracle.VOCAB) for _ in range(count)]


def share(host: Host, mix: str, *prompts: Sequence[int], max_tokens: int = 3, **settings: Any) -> Engine:
    """An engine that computes these prompts, of which all pages are in the folder then."""
    engine = host("one", kv_spec=MIXES[mix], **GENEROUS | settings)
    for prompt in prompts or [PROMPT]:
        engine.check(prompt, max_tokens)
    wait_for(lambda: report(engine)["written_pages"] >= engine.num_pages())
    return engine


def other(host: Host, mix: str, **settings: Any) -> Engine:
    return host("other", kv_spec=MIXES[mix], **GENEROUS | settings)


def files_of(shared: Path, engine: Engine, group: int, keys: Sequence[bytes]) -> list[Path]:
    """Where the folder has pages of one group."""
    namespace = engine.prefix._geometry.group_namespace(engine.prefix.namespace(), group)
    names = {key.hex() for key in keys}
    found = [path for path in shared.rglob("*") if path.name in names and namespace.digest.hex() in str(path)]
    assert found, "the folder has none of them"
    return found


@steady_runners
@every_mix
def test_what_one_host_computed_another_goes_on_from(host: Host, mix: str) -> None:
    one = share(host, mix)
    engine = other(host, mix)
    engine.check(PROMPT, 20, computed=4 + 19)
    assert figures(engine)["tier_hit_tokens"] == 96 and "failures" not in figures(engine)
    if mix == "chunked":  # all of whose pages are stored, and one of them is needed
        assert report(engine)["fetched_pages"] == 6 + 1
    else:
        assert report(engine)["fetched_pages"] == one.num_pages()
        for group in range(len(MIXES[mix])):
            assert engine.pages(PROMPT, group=group) == one.pages(PROMPT, group=group)


@every_mix
def test_a_prompt_that_goes_on_ends_its_hit_where_windows_and_states_are(host: Host, mix: str) -> None:
    """Full attention has the answer's pages as well; the others have what is needed at the end of the prompt alone."""
    share(host, mix, max_tokens=60)
    text = [*PROMPT, *oracle.generate(PROMPT, 60)]
    engine = other(host, mix)
    name = engine.add([*text, *tail(30)], 3)
    engine.finish(name)
    assert engine.computed(name) == 190 - (144 if mix == "chunked" else 96) + 2
    assert "failures" not in figures(engine)


@pytest.mark.parametrize("mix", ["window", "states"])
def test_where_the_folder_lacks_one_group_at_the_end_the_hit_is_shorter(host: Host, mix: str, tmp_path: Path) -> None:
    one = share(host, mix, PROMPT[:70], PROMPT)
    for file in files_of(tmp_path / "shared", one, 1, KEYS[4:]):
        file.unlink()
    engine = other(host, mix)
    engine.check(PROMPT, computed=100 - 64 + 2)
    assert "failures" not in figures(engine)
    assert report(engine)["undelivered_pages"] == 0, "what the folder lacks was asked for"


@every_mix
def test_where_the_folder_lacks_one_group_nothing_is_promised(host: Host, mix: str, tmp_path: Path) -> None:
    one = share(host, mix)
    for file in files_of(tmp_path / "shared", one, len(MIXES[mix]) - 1, KEYS):
        file.unlink()
    engine = other(host, mix)
    engine.check(PROMPT, computed=100 - (80 if mix == "chunked" else 0) + 2)
    assert "failures" not in figures(engine)
    engine.check([*PROMPT, *tail(9)], 20)


def test_a_miss_costs_no_more_than_for_a_plain_model(host: Host) -> None:
    asked = []
    for name, spec in (("plain", None), ("hybrid", MIXES["window and state"])):
        engine = host(name, kv_spec=spec)
        engine.check(PROMPT)
        asked.append(report(engine)["asked_pages"])
    assert asked[0] == asked[1] > 0


def test_what_is_lost_of_one_group_in_the_pool_comes_back(host: Host) -> None:
    """Full attention has it all: nothing but the windows is fetched."""
    engine = share(host, "two windows")
    for group in (1, 2):
        (view,) = engine.prefix._views(group)
        assert view.own.remove(KEYS) > 0
    assert engine.scheduler.reset_prefix_cache()
    engine.check(PROMPT, 20, computed=4 + 19)
    assert figures(engine)["tier_hit_tokens"] == 96
    assert report(engine)["fetched_pages"] == sum(sum(engine.pages(PROMPT, group=group)) for group in (1, 2))


@pytest.mark.parametrize(("writer", "reader"), [(2, 2), (2, 1), (1, 2)])
def test_windows_come_from_instances_with_another_split(host: Host, writer: int, reader: int) -> None:
    one = host("one", **split(writer))
    one.check(PROMPT)
    wait_for(lambda: report(one)["written_pages"] >= one.num_pages())
    engine = host("other", **split(reader))
    store = engine.prefix._store.store
    for group in (0, 1):
        namespace = engine.prefix._geometry.group_namespace(engine.prefix.namespace(), group)
        wait_for(lambda namespace=namespace: len(store.shards_elsewhere(namespace)) == writer)
    engine.check(PROMPT, 20, computed=4 + 19)


def split(tp_size: int) -> dict[str, Any]:
    """vLLM says what one rank has of a window's heads."""
    heads = 2 // tp_size
    return {"kv_spec": [full(heads=heads), window(20, heads=heads)], "tp_size": tp_size}


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_page_of_any_group_that_was_changed_in_the_folder_is_computed(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    one = share(host, "window and state")
    file = files_of(tmp_path / "shared", one, group, KEYS[5:])[0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    monkeypatch.setattr("store_client.jobs._HEARING_S", 2.0)
    engine = other(host, "window and state")
    engine.check(PROMPT, 20, computed=100 + 19)
    assert report(engine)["corrupt_pages"] in (1, 2), "on a busy machine it is asked for again before it is removed"
    engine.check([*PROMPT, *tail(9)], 20)


@pytest.mark.parametrize("group", [0, 1, 2])
def test_wrong_bytes_from_the_folder_would_be_noticed(
    host: Host, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """The control of these tests: what came from a tier is what the request goes on from, in each group."""
    share(host, "window and state")
    engine = other(host, "window and state")
    target = engine.workers[0].side.memory.groups[group].blocks
    load_page = target.load_page

    def load_wrong(part: Any, table: Any, first: int, page: Any, skip: int) -> None:
        copied = np.array(page)
        copied[-1] ^= 1
        load_page(part, table, first, copied, skip)

    monkeypatch.setattr(target, "load_page", load_wrong)
    with pytest.raises(WrongKV):
        engine.ask(PROMPT)
