"""`mooncake-connector why`: each reason is provoked in a real pool, and said."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace

import pytest
from ground.why.asking import KEYS, SHAPE, WHOLE, ask, asked_json, refused, runs, stored
from lock_holder import stopped_holder
from store.pools import as_root, mounted

from mooncake_connector.cli.why.reach import reachable_pages
from mooncake_connector.kv.identity.checkpoint import weights_digest
from mooncake_connector.kv.keys import page_keys
from mooncake_connector.kv.namespace import Namespace, canonical_json
from mooncake_connector.misses import Miss
from store_client import EmbeddedStore
from store_client.testing import put_chain


def since_when(said: str, cause: str) -> str:
    """The time of day at which pages were refused for this cause."""
    (clock,) = re.findall(rf"not stored at ([0-2]\d:[0-5]\d) \(\d+ (?:s|min) ago\): {cause}", said)
    return str(clock)


def minutes_since(began_s: float) -> list[str]:
    """As a clock shows them; the pool keeps times in units of 67 ms."""
    return [time.strftime("%H:%M", time.localtime(at_s)) for at_s in range(int(began_s - 1), int(time.time()) + 1)]


class TestReasons:
    def test_all_of_it_hits(self, space, model, ids):
        stored(space, KEYS)
        said = ask("--model", model, "--tokens", ids)
        assert "pages 0-9 hit\n" in said and "640 of its 640 tokens" in said
        assert "why not more" not in said
        assert asked_json("--model", model, "--tokens", ids)["reason"] is None

    def test_pages_that_were_evicted_and_such_that_never_were(self, pool, model, name, ids):
        with EmbeddedStore(pool, 1 << 20) as store:
            space = store.space(name, WHOLE)
            stored(space, KEYS[:6], 65536)
            space.lookup(KEYS[:2])
            other = store.space(replace(name, kv_dtype="float16"), WHOLE)
            stored(other, page_keys(range(640), 64), 65536)
            stored(other, page_keys(range(64), 64, root=b"r" * 32), 65536)
            assert store.stats().evicted_pages == 1
            found = asked_json("--model", model, "--tokens", ids)
            assert runs(found) == [(0, 4, "hit"), (5, 5, "pressure"), (6, 9, "unknown")]
            assert found["reason"] == Miss.EVICTED.value
            said = ask("--model", model, "--tokens", ids)
            assert "pages 0-4 hit, page 5 evicted" in said and "by pressure, unused for" in said
            assert "pages 6-9 never stored" in said
            assert f"why not more: {Miss.EVICTED.words.said}" in said

    @pytest.mark.parametrize("forget, said", [("remove", "removed"), ("clear", "cleared")])
    def test_pages_that_somebody_removed(self, space, model, ids, forget, said):
        stored(space, KEYS)
        space.remove(KEYS[4:6]) if forget == "remove" else space.clear()
        text = ask("--model", model, "--tokens", ids)
        assert f"{said} 0 s ago" in text or f"{said} " in text
        assert asked_json("--model", model, "--tokens", ids)["reason"] == Miss.CLEARED.value
        if forget == "remove":
            assert "pages 6-9 stored, but out of reach" in text

    def test_a_prompt_that_nobody_sent(self, space, model, ids):
        stored(space, page_keys(range(64), 64))
        found = asked_json("--model", model, "--tokens", ids)
        assert runs(found) == [(0, 9, "unknown")]
        assert found["reason"] == Miss.NEVER_STORED.value
        assert "pages 0-9 never stored" in ask("--model", model, "--tokens", ids)

    def test_a_prompt_shorter_than_a_page(self, space, model, tmp_path):
        stored(space, KEYS)
        (tmp_path / "short").write_text("1000 1001, 1002\n1003")
        said = ask("--model", model, "--tokens", tmp_path / "short")
        assert "shorter than a page: 4 of 64 tokens" in said and Miss.SHORT.words.said in said

    @pytest.mark.parametrize("there", [{}, {"kv_dtype": "float32"}, {"model_digest": "another"}, {"num_layers": 3}])
    @pytest.mark.parametrize("more", [(), ("--kv-dtype", "bfloat16"), ("--salt", "tenant")])
    def test_a_short_prompt_is_that_whatever_the_pool_has(self, store, model, name, tmp_path, there, more):
        stored(store.space(replace(name, **there), WHOLE), KEYS)
        (tmp_path / "short").write_text("[1000]")
        asked = ("--model", model, "--tokens", tmp_path / "short", *more)
        assert asked_json(*asked)["reason"] == Miss.SHORT.value
        said = ask(*asked)
        assert "shorter than a page: 1 of 64 tokens" in said
        assert "other namespace" not in said and "salt" not in said

    def test_a_hit_below_min_hit_tokens(self, space, model, ids, monkeypatch):
        stored(space, KEYS[:2])
        monkeypatch.setenv("MOONCAKE_CONNECTOR_MIN_HIT_TOKENS", "256")
        assert asked_json("--model", model, "--tokens", ids)["reason"] == Miss.BELOW_MIN_HIT.value
        assert "below min_hit_tokens: 128 tokens hit, 256 are wanted" in ask("--model", model, "--tokens", ids)

    def test_a_page_for_which_no_place_was_found(self, pool, model, name, ids):
        with EmbeddedStore(pool, 1 << 20) as store:
            put_chain(store.space(name, WHOLE), KEYS, 131072)
            found = asked_json("--model", model, "--tokens", ids)
            assert runs(found) == [(0, 7, "hit"), (8, 9, "full")]
            assert found["reason"] == Miss.of_cause("full").value
            assert "pages 8-9 not stored at" in ask("--model", model, "--tokens", ids)

    def test_a_pool_that_was_locked(self, pool, space, model, ids):
        began_s = time.time()
        with stopped_holder(pool):
            assert space.write(KEYS, lambda i, view: None, nbytes=4096, parents=[None] * 10, deadline_s=0.2)
        said = ask("--model", model, "--tokens", ids)
        assert "pages 0-9 not stored at" in said
        assert since_when(said, "pool unavailable, its lock was held") in minutes_since(began_s)

    def test_pages_that_were_found_corrupt(self, pool, store, space, model, ids):
        stored(space, KEYS[:2])
        (arena,) = pool.glob("*/arena")
        content = bytearray(arena.read_bytes())
        content[7::4096] = bytes(byte ^ 1 for byte in content[7::4096])
        with open(arena, "r+b") as file:  # the same file, which is mapped
            file.write(content)
        assert store.verify().corrupt == 2
        assert asked_json("--model", model, "--tokens", ids)["reason"] == Miss.DAMAGED.value
        said = ask("--model", model, "--tokens", ids)
        assert "pages 0-1 dropped" in said and "ago: found corrupt, pages 2-9 never stored" in said

    def test_pages_that_went_when_the_pool_was_made_smaller(self, pool, model, name, ids):
        with EmbeddedStore(pool, 4 << 20) as store:
            stored(store.space(name, WHOLE), KEYS, 256 << 10)
        with EmbeddedStore(pool, 2 << 20):
            found = asked_json("--model", model, "--tokens", ids)
            assert runs(found)[-1][1:] == (9, "shrunk") and 0 < found["hit_tokens"] < 640
            assert found["reason"] == Miss.EVICTED.value
            assert "when the pool was made smaller" in ask("--model", model, "--tokens", ids)

    @as_root
    def test_a_file_system_that_is_full(self, pool, model, name, ids):
        with mounted(pool, "size=64m"):
            with EmbeddedStore(pool, 16 << 20) as store:
                with open(pool / "ballast", "wb") as ballast:
                    room = os.statvfs(pool)
                    os.posix_fallocate(ballast.fileno(), 0, (room.f_bavail - 2) * room.f_frsize)
                began_s = time.time()
                put_chain(store.space(name, WHOLE), KEYS, 1 << 20)
                said = ask("--model", model, "--tokens", ids)
                assert since_when(said, "pool unavailable, the file system is full") in minutes_since(began_s)
                assert f"why not more: {Miss.of_cause('no_space').words.said}" in said
            (pool / "ballast").unlink()

    def test_a_pool_that_is_not_there_says_so(self, model, ids):
        assert "does not exist" in refused("--model", model, "--tokens", ids)

class TestGroups:
    def group(self, name: Namespace, **described: object) -> Namespace:
        return replace(name, group=canonical_json({"layers": [0], "span": None, **described}))

    def test_each_group_has_its_line_and_all_decide(self, store, name, model, ids):
        kinds = ["full_attention", "sliding_attention"]
        (model / "config.json").write_text(json.dumps({**SHAPE, "layer_types": kinds}))
        name = replace(name, model_digest=weights_digest(str(model), None), head_dim=32)
        full = store.space(self.group(name, kind="full"), WHOLE)
        window = store.space(self.group(name, kind="sliding", span=100), WHOLE)
        stored(full, KEYS[:8])
        stored(window, KEYS[2:5])
        found = asked_json("--model", model, "--tokens", ids)
        assert [group["title"] for group in found["groups"]] == ["full attention", "sliding attention of 100"]
        assert found["hit_tokens"] == 5 * 64
        assert found["reason"] == Miss.GROUPS_DISAGREE.value

    @pytest.mark.parametrize(
        "kind, span, there, pages",
        [("state", None, {3}, 4), ("sliding", 65, {5}, 6), ("sliding", 66, {4, 5}, 6), ("sliding", 66, {5}, 0),
         ("chunked", 128, {6}, 7), ("chunked", 128, {3}, 6), ("sliding", 2000, set(range(7)), 7)],
    )  # fmt: skip
    def test_how_far_a_group_lets_a_request_get(self, name, kind, span, there, pages):
        groups = [
            (self.group(name, kind="full"), [True] * 7),
            (self.group(name, kind=kind, span=span), [page in there for page in range(7)]),
        ]
        assert reachable_pages(groups, 64) == pages
