"""`why` asks under the name that the engine uses, and names what differs where the pages have another one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ground.why.asking import KEYS, TOKENS, WHOLE, ask, asked_json, runs, stored

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.identity.model import LORA_FILES, files_digest
from mooncake_connector.kv.keys import adapter_root_digest, page_keys, root_digest
from mooncake_connector.kv.namespace import canonical_json
from mooncake_connector.misses import Miss


class TestNames:
    @pytest.mark.parametrize(
        "field, value", [("kv_dtype", "fp8_e4m3"), ("page_tokens", 128), ("model_digest", "another"), ("num_layers", 3)]
    )
    def test_a_namespace_that_differs_in_one_field_is_named_with_it(
        self, store, name, model, ids, field, value, monkeypatch
    ):
        monkeypatch.setenv("MOONCAKE_CONNECTOR_PAGE_TOKENS", "64")
        asked = ("--model", model, "--tokens", ids, "--kv-dtype", "bfloat16")
        other = replace(name, **{field: value})
        keys = page_keys(TOKENS, other.page_tokens)
        stored(store.space(other, WHOLE), keys)
        found = asked_json(*asked)
        assert found["namespace_pages"] == 0 and found["reason"] == Miss.OTHER_NAMESPACE.value
        (named,) = found["other_namespaces"]
        assert (named["differs_in"], named["pages"]) == ([field], len(keys))
        said = ask(*asked)
        assert f"other namespace: {field} (" in said and f"which has {len(keys):,} pages" in said

    def test_the_right_namespace_is_chosen_beside_others(self, store, name, model, ids):
        stored(store.space(replace(name, kv_dtype="fp8_e4m3"), WHOLE), KEYS)
        stored(store.space(name, WHOLE), KEYS[:3])
        found = asked_json("--model", model, "--tokens", ids)
        assert (found["namespace"], found["hit_tokens"]) == (name.digest.hex(), 192)
        assert found["reason"] == Miss.OTHER_NAMESPACE.value, "the other one has more of it"
        assert [other["hit_pages"] for other in found["other_namespaces"]] == [10]
        asked = asked_json("--model", model, "--tokens", ids, "--kv-dtype", "fp8")
        assert asked["hit_tokens"] == 640

    def test_what_only_an_engine_knows_is_taken_from_the_pool_and_said(self, store, name, model, ids):
        own = replace(name, engine_overrides=canonical_json({"engine": "sglang"}))
        stored(store.space(own, WHOLE), KEYS)
        found = asked_json("--model", model, "--tokens", ids)
        assert (found["hit_tokens"], found["engine_settings"]) == (640, ["engine_overrides"])
        assert "engines were started with engine_overrides" in ask("--model", model, "--tokens", ids)
        stored(store.space(name, WHOLE), KEYS[:1])
        assert asked_json("--model", model, "--tokens", ids)["hit_tokens"] == 64

    @pytest.mark.parametrize("field, value", [("kv_dtype", "float32"), ("page_tokens", 128)])
    def test_what_an_engine_may_be_started_with_is_taken_from_the_pool_and_said(
        self, store, name, model, ids, field, value
    ):
        own = replace(name, **{field: value})
        stored(store.space(own, WHOLE), page_keys(TOKENS, own.page_tokens))
        found = asked_json("--model", model, "--tokens", ids)
        assert (found["namespace"], found["hit_tokens"], found["reason"]) == (own.digest.hex(), 640, None)
        assert (found["engine_settings"], found["other_namespaces"]) == ([field], [])
        said = ask("--model", model, "--tokens", ids)
        assert f"{field} is {value}, not " in said and "the pool has no other pages of this model" in said
        stored(store.space(name, WHOLE), KEYS[:1])
        there = asked_json("--model", model, "--tokens", ids)
        assert (there["namespace"], there["hit_tokens"]) == (name.digest.hex(), 64), "what is asked for goes first"

    def test_so_it_is_where_nothing_of_it_is_left(self, store, name, model, ids):
        own = replace(name, kv_dtype="float32")
        stored(store.space(own, WHOLE), KEYS)
        store.clear()
        found = asked_json("--model", model, "--tokens", ids)
        assert (found["namespace"], found["reason"]) == (own.digest.hex(), Miss.CLEARED.value)
        stored(store.space(replace(name, kv_dtype="float16"), WHOLE), KEYS[:1])
        store.clear()
        assert asked_json("--model", model, "--tokens", ids)["reason"] == Miss.NEVER_STORED.value, "one of two"

    def test_of_two_ways_to_start_an_engine_none_is_taken(self, store, name, model, ids):
        for dtype in ("float32", "float16"):
            stored(store.space(replace(name, kv_dtype=dtype), WHOLE), KEYS)
        found = asked_json("--model", model, "--tokens", ids)
        assert (found["namespace_pages"], found["reason"]) == (0, Miss.OTHER_NAMESPACE.value)
        assert [other["differs_in"] for other in found["other_namespaces"]] == [["kv_dtype"]] * 2
        assert asked_json("--model", model, "--tokens", ids, "--kv-dtype", "float32")["hit_tokens"] == 640

    def test_another_namespace_without_the_prompt_is_no_reason(self, store, name, model, ids):
        stored(store.space(replace(name, num_layers=3), WHOLE), page_keys(range(64), 64))
        found = asked_json("--model", model, "--tokens", ids)
        assert found["reason"] == Miss.NEVER_STORED.value
        assert [other["differs_in"] for other in found["other_namespaces"]] == [["num_layers"]]

    def test_a_namespace_can_be_named(self, store, name, ids):
        stored(store.space(name, WHOLE), KEYS)
        found = asked_json("--namespace", name.digest.hex()[:8], "--tokens", ids)
        assert found["hit_tokens"] == 640
        assert found["other_namespaces"] == []

    def test_parts_of_other_shards_make_a_page(self, store, name, model, ids):
        for heads in ((0, 1), (1, 2)):
            stored(store.space(name, Shard(0, 2, *heads)), KEYS[:4])
        store.space(name, Shard(0, 2, 1, 2)).remove(KEYS[3:4])
        found = asked_json("--model", model, "--tokens", ids)
        assert runs(found) == [(0, 2, "hit"), (3, 3, "removed"), (4, 9, "unknown")]

    def test_a_salt_is_told_from_a_prompt_that_was_never_sent(self, space, model, ids):
        stored(space, KEYS)
        salted = asked_json("--model", model, "--tokens", ids, "--salt", "tenant")
        assert (salted["hit_tokens"], salted["without"]) == (0, {"salt": 10})
        assert "salt: without it 10 pages would hit" in ask("--model", model, "--tokens", ids, "--salt", "tenant")
        stored(space, page_keys(TOKENS, 64, root=root_digest("key", "tenant")))
        both = asked_json("--model", model, "--tokens", ids, "--salt", "tenant", "--extra-key", "key")
        assert both["hit_tokens"] == 640

    def test_an_adapter_has_pages_of_its_own(self, space, model, ids, tmp_path):
        adapter = tmp_path / "adapter"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text("{}")
        stored(space, KEYS)
        assert asked_json("--model", model, "--tokens", ids, "--adapter", adapter)["without"] == {"adapter": 10}
        root = adapter_root_digest(files_digest(adapter, LORA_FILES), None)
        stored(space, page_keys(TOKENS, 64, root=root))
        assert asked_json("--model", model, "--tokens", ids, "--adapter", adapter)["hit_tokens"] == 640
