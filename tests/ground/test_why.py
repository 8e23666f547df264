"""`mooncake-connector why`: each reason is provoked in a real pool, and said."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from lock_holder import stopped_holder
from store.pools import as_root, mounted
from typer.testing import CliRunner

from mooncake_connector.cli.main import app
from mooncake_connector.cli.why import prompt
from mooncake_connector.cli.why.reach import reachable_pages
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.identity.checkpoint import weights_digest
from mooncake_connector.kv.identity.model import LORA_FILES, files_digest
from mooncake_connector.kv.keys import adapter_root_digest, page_keys, root_digest
from mooncake_connector.kv.namespace import Namespace, canonical_json
from mooncake_connector.misses import Miss
from mooncake_connector.request_line import RequestLine
from mooncake_connector.request_record import RequestRecord, RunRecord
from store_client import EmbeddedStore, Put, Space
from store_client.embedded.requests import MOST_NBYTES
from store_client.testing import put_chain

SHAPE = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
    "torch_dtype": "bfloat16",
}  # fmt: skip
WHOLE = Shard(0, 2, 0, 2)
TOKENS = list(range(1000, 1000 + 640))
"""Ten pages."""
CAPACITY = 8 << 20


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


KEYS = page_keys(TOKENS, 64)


def stored(space: Space, keys: list[bytes], nbytes: int = 4096) -> None:
    assert put_chain(space, keys, nbytes) == [Put.STORED] * len(keys)


def ask(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["why", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def asked_json(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(*arguments, "--json"))
    return found


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["why", *map(str, arguments)])
    assert result.exit_code != 0
    return result.output


def runs(found: dict[str, Any], group: int = 0) -> list[tuple[int, int, str]]:
    return [(run["first"], run["last"], run.get("cause", run["what"])) for run in found["groups"][group]["runs"]]


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
        with stopped_holder(pool):
            assert space.write(KEYS, lambda i, view: None, nbytes=4096, parents=[None] * 10, deadline_s=0.2)
        said = ask("--model", model, "--tokens", ids)
        assert "pages 0-9 not stored at" in said and "pool unavailable, its lock was held" in said

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
                put_chain(store.space(name, WHOLE), KEYS, 1 << 20)
                said = ask("--model", model, "--tokens", ids)
                assert "pool unavailable, the file system is full" in said
                assert f"why not more: {Miss.of_cause('no_space').words.said}" in said
            (pool / "ballast").unlink()

    def test_a_pool_that_is_not_there_says_so(self, model, ids):
        assert "does not exist" in refused("--model", model, "--tokens", ids)


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


class TestRequests:
    def record(self, name: str, **said: Any) -> RequestRecord:
        line = RequestLine(id=name, prompt_tokens=640, local_tokens=0, hit_tokens=256, miss=Miss.EVICTED)
        told: dict[str, Any] = {
            "at_s": time.time() - 30, "namespace": "ab" * 32, "page_tokens": 64, "missed": {Miss.EVICTED: 384},
            "has_salt": False,
            "runs": [RunRecord(0, 3, "stored"), RunRecord(4, 5, "gone", "pressure", 90.0, 600.0),
                     RunRecord(6, 9, "unknown")],
        }  # fmt: skip
        return RequestRecord.of(line, **{**told, **said})

    def test_one_is_found_by_its_id_or_a_part_of_it(self, store):
        for name in ("cmpl-first-0", "cmpl-second-0", "second"):
            store.note_request(name, self.record(name).encode())
        said = ask("--request", "first")
        assert said.startswith("request cmpl-first-0, 30 s ago, pid ")
        assert "640 tokens: 0 in the engine's own cache, 256 from the pool, 0 from a prefill instance, 384 comp" in said
        assert "pages 0-3 hit, pages 4-5 evicted 2 min ago by pressure, unused for 10 min by then, pages 6-9" in said
        assert f"384 tokens {Miss.EVICTED.words.said}" in said and f"what to do: {Miss.EVICTED.words.do}" in said
        assert [found["id"] for found in json.loads(ask("--request", "second", "--json"))] == ["second"]
        assert ask("--request", "cmpl").count("request cmpl-") == 2

    def test_of_many_the_latest_are_shown(self, store):
        for number in range(8):
            name = f"cmpl-{number}"
            store.note_request(name, self.record(name, at_s=time.time() - 60 + number).encode())
        said = ask("--request", "cmpl")
        assert [line.split(",")[0] for line in said.splitlines() if line.startswith("request ")] == [
            f"request cmpl-{number}" for number in range(3, 8)
        ]
        assert "3 earlier ones have 'cmpl' in their id too" in said
        assert len(json.loads(ask("--request", "cmpl", "--json"))) == 8
        assert "it is empty" in refused("--request", "")

    def test_a_salt_is_said_and_never_shown(self, store):
        store.note_request("a", self.record("a", has_salt=True).encode())
        assert "salt: it shares pages with" in ask("--request", "a")

    def test_one_that_is_not_kept_is_an_error_that_says_what_to_set(self, store):
        assert "MOONCAKE_CONNECTOR_LOG_REQUESTS=1" in refused("--request", "a")
        store.note_request("a", self.record("a").encode())
        assert "is not among the 1 that are kept" in refused("--request", "b")

    @pytest.mark.parametrize("told", [b"{}", b"[]", b"\xff", b"null", b'{"id": 3}'])
    def test_what_is_no_record_is_left_out(self, store, told):
        store.note_request("a", told)
        store.note_request("b", self.record("b").encode())
        assert len(json.loads(ask("--request", "b", "--json"))) == 1

    def test_words_of_another_version_are_shown_as_they_are(self, store):
        odd = msgspec.structs.replace(
            self.record("a"), miss="newer", missed={"newer": 3}, runs=[RunRecord(0, 1, "odd", "odder")]
        )
        store.note_request("a", odd.encode())
        assert "3 tokens newer" in ask("--request", "a")

    def test_a_record_fits_however_much_there_is_to_say(self):
        runs = [RunRecord(i, i, "gone", "pressure", 1234567.123456789, 1234567.123456789) for i in range(10_000)]
        missed = dict.fromkeys(Miss, 1 << 40)
        record = self.record("\u00e9" * 10_000, runs=runs, missed=missed, has_salt=True)
        assert len(record.encode()) <= MOST_NBYTES
        assert RequestRecord.decode(record.encode()) == record


class _Server(BaseHTTPRequestHandler):
    asked: ClassVar[list[dict[str, Any]]] = []
    pages: ClassVar[dict[str, object]] = {}
    """What a GET of a path is answered with: text, or a value as JSON."""

    def do_GET(self) -> None:
        self._answer(self.pages.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if "refuse" in str(body):
            self.send_error(400, "refused")
            return
        self._answer({"tokens": TOKENS, "count": len(TOKENS)} if self.path == "/tokenize" else None)

    def _answer(self, value: object) -> None:
        body = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(404 if value is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def served(model: object, owner: str = "vllm") -> dict[str, object]:
    return {"data": [{"id": "served", "root": str(model), "owned_by": owner}]}


@pytest.fixture
def server(model) -> Iterator[str]:
    """An engine that serves the model, as far as `why` asks it."""
    _Server.asked, _Server.pages = [], {"/v1/models": served(model)}
    with HTTPServer(("127.0.0.1", 0), _Server) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join(60)


class TestPrompts:
    def test_a_server_says_model_and_tokens(self, space, server):
        stored(space, KEYS)
        assert asked_json("--url", f"{server}/", "a prompt")["hit_tokens"] == 640
        assert asked_json("--url", server, "--chat", "a prompt")["hit_tokens"] == 640
        assert [sorted(body) for body in _Server.asked] == [["model", "prompt"], ["messages", "model"]]

    @pytest.mark.parametrize("form", ["{}", "{}/", "{}/v1", "{}/v1/", "{}/metrics", "bare"])
    def test_its_address_in_any_form(self, space, server, form):
        stored(space, KEYS)
        url = server.removeprefix("http://") if form == "bare" else form.format(server)
        assert asked_json("--url", url, "a prompt")["hit_tokens"] == 640

    @pytest.mark.parametrize(
        "owner, path, said, field, value",
        [("vllm", "/metrics", 'vllm:cache_config_info{cache_dtype="fp8",engine="0"} 1.0\n', "kv_dtype", "fp8_e4m3"),
         ("sglang", "/server_info", {"kv_cache_dtype": "auto", "dtype": "float16"}, "kv_dtype", "float16"),
         ("sglang", "/server_info", {"kv_cache_dtype": "bf16", "dtype": "half"}, "kv_dtype", "bfloat16"),
         ("sglang", "/server_info", {"page_size": 128}, "page_tokens", 128)],
    )  # fmt: skip
    def test_a_server_says_what_it_was_started_with(self, store, model, name, server, owner, path, said, field, value):
        _Server.pages |= {"/v1/models": served(model, owner), path: said}
        own = replace(name, **{field: value})
        for each in (own, replace(name, **{field: {"kv_dtype": "float32", "page_tokens": 32}[field]})):
            stored(store.space(each, WHOLE), page_keys(TOKENS, each.page_tokens))
        assert asked_json("--url", server, "a prompt")["namespace"] == own.digest.hex()

    def test_sglang_names_its_folder_apart(self, space, server, model):
        _Server.pages = {"/v1/models": served("served", "sglang"), "/server_info": {"model_path": str(model)}}
        stored(space, KEYS)
        assert asked_json("--url", server, "a prompt")["hit_tokens"] == 640

    def test_a_model_that_is_not_here_is_asked_for(self, store, space, name, server):
        _Server.pages = {"/v1/models": served("/nowhere")}
        stored(space, KEYS)
        assert "(/nowhere) are not here" in refused("--url", server, "a prompt")
        assert asked_json("--url", server, "--namespace", name.digest.hex()[:8], "a prompt")["hit_tokens"] == 640
        assert "no such folder" in refused("--model", "/nowhere", "a prompt")

    def test_a_folder_without_a_model_is_an_error_that_names_it(self, space, model, tmp_path, ids):
        assert "is no model's folder: it has no config.json" in refused("--model", tmp_path, "--tokens", ids)
        stored(space, KEYS)
        assert asked_json("--model", model / "config.json", "--tokens", ids)["hit_tokens"] == 640

    def test_a_router_is_told_from_an_engine(self, space, server, model):
        _Server.pages = {}
        said = refused("--url", server, "a prompt")
        assert "answered 404" in said and "name the port of an engine behind it" in said

    def test_a_server_that_refuses_is_an_error_with_its_words(self, space, server):
        assert "answered 400" in refused("--url", server, "refuse this")
        assert "gives no answer" in refused("--url", "http://127.0.0.1:1", "a prompt")
        assert "expected http://" in refused("--url", "ftp://localhost", "a prompt")
        assert "expected http://" in refused("--url", "gibber ish", "a prompt")

    def test_a_prompt_on_stdin(self, space, server):
        result = CliRunner().invoke(app, ["why", "--url", server, "-"], input="a long prompt\n")
        assert result.exit_code == 0, result.output
        assert _Server.asked[-1]["prompt"] == "a long prompt\n"

    def test_without_a_tokenizer_it_says_what_to_install(self, space, model, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "transformers", None)
        monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
        assert "pip install transformers" in refused("--model", model, "a prompt")
        assert "pip install transformers" in refused("--model", model, "--chat", "a prompt")

    @pytest.mark.parametrize("text", ['{"tokens": [1, 2]}', '{"prompt_token_ids": [1, 2]}', "[1, 2]", "1\n2\n", "1,2"])
    def test_token_files_of_every_form(self, tmp_path, text):
        (tmp_path / "ids").write_text(text)
        assert prompt.read_tokens(tmp_path / "ids") == [1, 2]

    @pytest.mark.parametrize("text", ["", "hello", "[1, -2]", "[1.5]", '{"a": 1}', "[true]", "3", "null", "[" * 100000])
    def test_what_is_no_list_of_tokens_is_an_error(self, space, model, tmp_path, text):
        (tmp_path / "ids").write_text(text)
        assert "token ids" in refused("--model", model, "--tokens", tmp_path / "ids")

    def test_wrong_usage(self, space, model, ids):
        assert "give one of a prompt" in refused("--model", model)
        assert "give one of a prompt" in refused("--model", model, "--tokens", ids, "a prompt")
        assert "--model" in refused("a prompt")
        assert "cannot be read" in refused("--model", model, "--tokens", "/nowhere/ids")
