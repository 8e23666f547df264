"""The index over HTTP, as Mooncake's Conductor documents it, against what is in the pool and in tiers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from agent.asking import UNIT_NBYTES, WHOLE, Client, answers_at, free_port, keys_of, own_addresses, prompt, store_prompt
from agent.flows import flowing, put_into, settings
from agent.memory_tier import MemoryTier
from agent.stand_in import CAPACITY, StandIn, configured, running, tiered, until
from prometheus_client.parser import text_string_to_metric_families

from mooncake_connector.config.sources import load_config
from mooncake_connector.errors import ConfigError
from mooncake_connector.kv.geometry import Shard
from store_client import EmbeddedStore
from store_client.agent import source
from store_client.agent.flow import Flow
from store_client.agent.index.hashes import seq_hashes
from store_client.agent.tiered import TieredStore
from store_client.testing import namespace

TOKENS = prompt(1, 300)
"""Four full pages of 64, and a bit."""
NOTHING = {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0}


@pytest.fixture
def served(pool: Path) -> Iterator[Client]:
    """An agent without tiers."""
    with serving(pool) as client:
        yield client


class serving:
    def __init__(self, pool: Path, fetches: Any = None, **changes: Any) -> None:
        self.client = Client(changes.setdefault("agent_http_port", free_port()))
        self._running = running(pool, fetches, **{"tiers": [], **changes})

    def __enter__(self) -> Client:
        self._running.__enter__()
        until(lambda: reached(self.client), "the server does not answer")
        return self.client

    def __exit__(self, *exc_info: Any) -> None:
        self._running.__exit__(*exc_info)


def reached(client: Client) -> bool:
    try:
        return bool(client.ask("GET", "/health").status)
    except OSError:
        return False


def test_a_prompt_is_on_the_cpu_of_every_instance_of_this_host_as_far_as_the_pool_has_it(served, pool):
    served.register("a", dp_rank=0)
    served.register("a", dp_rank=1)
    served.register("b", endpoint="tcp://192.0.2.1:5557")
    with EmbeddedStore(pool, CAPACITY) as store:
        keys = store_prompt(store, TOKENS)
        here = {"longest_matched": 256, "GPU": 0, "CPU": 256, "DISK": 0, "DP": {"0": 256, "1": 256}}
        assert served.query(TOKENS) == {"default": {"a": here, "b": {**NOTHING, "DP": {"0": 0}}}}
        assert served.query(TOKENS, instance_id="a") == {"default": {"a": here}}
        assert served.query(TOKENS[:255])["default"]["a"]["CPU"] == 192
        assert served.query(TOKENS[:100] + TOKENS)["default"]["a"]["CPU"] == 64, "only the first page is the same"
        store.space(namespace(), WHOLE).remove(keys[2:3])
        assert served.query(TOKENS)["default"]["a"]["CPU"] == 128
        store.clear()
        assert served.query(TOKENS)["default"]["a"]["CPU"] == 0


def test_tenants_models_block_sizes_and_salts_are_kept_apart(served, pool):
    served.register("a")
    served.register("a", tenant_id="t")
    served.register("wide", block_size=128)
    served.register("other", modelname="n")
    with EmbeddedStore(pool, CAPACITY) as store:
        store_prompt(store, TOKENS[:192])
        store_prompt(store, TOKENS[:128], salt="s")
    assert set(served.query(TOKENS)["default"]) == {"a"}
    assert set(served.query(TOKENS, tenant_id="t")) == {"t"}
    assert served.query(TOKENS, tenant_id="nobody") == {"nobody": {}}
    assert set(served.query(TOKENS, model="n")["default"]) == {"other"}
    wide = served.query(TOKENS, block_size=128)["default"]["wide"]
    assert wide["CPU"] == 192, "of 256 tokens in blocks of 128, as many as there are pages"
    assert served.query(TOKENS, cache_salt="s")["default"]["a"]["CPU"] == 128
    assert served.query(TOKENS, cache_salt="x")["default"]["a"]["CPU"] == 0
    assert served.query(TOKENS, lora_name="l")["default"]["a"]["CPU"] == 0, "pages of adapters have other names"


def test_a_page_counts_once_all_shards_of_the_model_are_there(served, pool):
    served.register()
    with EmbeddedStore(pool, CAPACITY) as store:
        store_prompt(store, TOKENS, shard=Shard(0, 4, 0, 1))
        assert served.query(TOKENS)["default"]["a"]["CPU"] == 0
        store_prompt(store, TOKENS[:128], shard=Shard(0, 2, 1, 2))
        store_prompt(store, TOKENS[:192], shard=Shard(2, 4, 1, 2))
        assert served.query(TOKENS)["default"]["a"]["CPU"] == 128


def test_pages_are_found_by_the_name_that_the_model_has_or_by_the_namespace_where_several_fit(served, pool):
    first, second = namespace("m"), namespace("m", kv_dtype="float16")
    with EmbeddedStore(pool, CAPACITY) as store:
        store_prompt(store, TOKENS, first)
        assert "remark" not in served.register("one")
        assert served.query(TOKENS)["default"]["one"]["CPU"] == 256
        store_prompt(store, TOKENS[:64], second)
    remark = served.register("two", namespace="")["remark"]
    assert first.digest.hex()[:12] in remark and second.digest.hex()[:12] in remark
    served.register("three", namespace=second.digest.hex()[:16])
    found = served.query(TOKENS)["default"]
    assert {name: answer["CPU"] for name, answer in found.items()} == {"one": 0, "two": 0, "three": 64}
    assert "fits no namespace" in served.register("four", modelname="gone")["remark"]
    services = {one["instance_id"]: one for one in served.ask("GET", "/services").json["services"]}
    assert services["three"]["namespace"] == second.digest.hex() and services["one"]["namespace"] is None


class Holding(StandIn):
    """Has the tiers of a flow asked."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.holds = flow.holds


def test_tiers_are_asked_and_nothing_is_fetched(pool):
    disk, cluster, hidden = MemoryTier(), MemoryTier(), MemoryTier()
    keys = keys_of(TOKENS, namespace())
    nbytes = WHOLE.num_units * UNIT_NBYTES
    put_into(disk, keys, nbytes)
    put_into(cluster, keys[:2], nbytes)
    disk_settings, other = settings("disk"), settings("hidden")

    class Cluster:
        """Of kind "mooncake"."""

        kind, title, write, share, timeout_s, bandwidth = "mooncake", "mooncake", "none", False, 60.0, None

    with EmbeddedStore(pool, CAPACITY) as store:
        flow = Flow(store, [(disk_settings, disk), (Cluster(), cluster), (other, hidden)], b"")
        store_prompt(store, TOKENS[:64])
        with serving(pool, Holding(flow)) as client:
            client.register("here")
            client.register("there", endpoint="tcp://192.0.2.1:5557")
            until(lambda: client.query(TOKENS)["default"]["here"]["DISK"] == 256, "the disk does not say in time")
            answer = until(
                lambda: (found := client.query(TOKENS)["default"])["there"]["CPU"] and found, "nor does the cluster"
            )
            assert answer["there"] == {"longest_matched": 128, "GPU": 0, "CPU": 128, "DISK": 0, "DP": {"0": 128}}
        assert store.stats().pages == 1, "nothing is fetched"
        flow.close()


def test_a_tier_that_does_not_answer_has_nothing_for_this_question(pool, monkeypatch):
    """It is not waited for: here it would be until the client gives up."""
    monkeypatch.setattr(source, "GRACE_S", 1000.0)
    hanging = MemoryTier()
    hanging.lying, hanging.deaf = True, {"contains"}
    with EmbeddedStore(pool, CAPACITY) as store, flowing(store, hanging) as flow:
        store_prompt(store, TOKENS[:64])
        with serving(pool, Holding(flow)) as client:
            client.register("here")
            assert client.query(TOKENS)["default"]["here"] == {
                "longest_matched": 64, "GPU": 0, "CPU": 64, "DISK": 0, "DP": {"0": 64},
            }  # fmt: skip
            assert hanging.made("contains")
            hanging.listen.set()
            until(lambda: client.query(TOKENS)["default"]["here"]["DISK"] == 256, "it is not asked again")


def test_hashes_are_those_of_mooncakes_documents_and_pages_count_where_their_keys_are_given(served, pool):
    local = [xxhash.xxh3_64_intdigest(b"".join(t.to_bytes(4, "little") for t in TOKENS[i : i + 64]), 1337)
             for i in (0, 64)]  # fmt: skip
    rolled = xxhash.xxh3_64_intdigest(local[0].to_bytes(8, "little") + local[1].to_bytes(8, "little"), 1337)
    hashes = seq_hashes(np.array(TOKENS, dtype=np.uint32), 64)
    assert hashes[:2] == [local[0], rolled] and len(hashes) == 4
    served.register()
    with EmbeddedStore(pool, CAPACITY) as store:
        keys = [key.hex() for key in store_prompt(store, TOKENS)]
    asked = {"model": "m", "block_size": 64, "seq_hashes": hashes}
    assert served.post("/query_by_hash", **asked)["default"]["a"]["CPU"] == 0
    assert served.post("/query_by_hash", **asked, page_keys=keys)["default"]["a"]["CPU"] == 256
    assert (
        served.post("/query_by_hash", **{**asked, "seq_hashes": hashes[:2]}, page_keys=keys)["default"]["a"]["CPU"]
        == 128
    )


def test_registering_twice_changes_nothing_and_other_values_need_to_be_unregistered_first(served):
    answer = {"status": "registered successfully", "instance_id": "a"}
    assert served.register().items() >= answer.items()
    assert served.register().items() >= answer.items()
    refused = served.ask("POST", "/register", {"instance_id": "a", "type": "x", "modelname": "n", "block_size": 1})
    assert refused.status == 409 and "unregister" in refused.json["error"]
    removed = served.post("/unregister", instance_id="a", tenant_id="default", dp_rank=0, type="vLLM", modelname="m")
    assert removed == {"status": "unregistered successfully", "removed_instances": ["a|default|0"]}
    assert served.ask("POST", "/unregister", {"instance_id": "a", "dp_rank": 0}).status == 404
    assert served.query(TOKENS) == {"default": {}}


REGISTERED = {"instance_id": "a", "type": "vLLM", "modelname": "m", "block_size": 64, "dp_rank": 0}
ASKED = {"model": "m", "block_size": 64, "token_ids": [1]}


REFUSED = [
    ("/query", b"{", 400, "query"),
    ("/query", b"\xff\xfe", 400, "query"),
    ("/query", b"[" * 100_000, 400, "query"),
    ("/query", {"block_size": 64, "token_ids": []}, 400, "model"),
    ("/query", {**ASKED, "block_size": 0}, 400, "block_size"),
    ("/query", {**ASKED, "block_size": "64"}, 400, "block_size"),
    ("/query", {**ASKED, "token_ids": "1,2"}, 400, "token_ids"),
    ("/query", {**ASKED, "token_ids": [1, -5]}, 400, "token_ids[1] is -5"),
    ("/query", {**ASKED, "token_ids": [1 << 32]}, 400, "token_ids[0]"),
    ("/query", {**ASKED, "token_ids": [1 << 70]}, 400, "token_ids[0]"),
    ("/query", {**ASKED, "token_ids": [1.5]}, 400, "token_ids"),
    ("/query", {**ASKED, "token_ids": [[1]]}, 400, "token_ids"),
    ("/query", b'{"model": "m", "block_size": 64, "token_ids": [1 2]}', 400, "query"),
    ("/query", b'{"model": "m", "block_size": 64, "token_ids": [1,,2]}', 400, "query"),
    ("/query", b'{"model": "m", "block_size": 64, "token_ids": [1,]}', 400, "query"),
    ("/query", b'{"model": "m", "block_size": 64, "token_ids": [,1]}', 400, "query"),
    ("/query", b'{"model": "m", "block_size": 64, "token_ids": [1-2]}', 400, "query"),
    ("/query", b'{"model": "m", "block_size": 64, "token_ids": [1', 400, "query"),
    ("/query", b'{"model": "m", "block_size": 64, "lora_id": {"token_ids": [1]}}', 400, "token_ids"),
    ("/query", {**ASKED, "token_ids": [None]}, 400, "token_ids"),
    ("/query", {**ASKED, "token_ids": [0] * ((1 << 20) + 1)}, 400, "1048577 entries"),
    ("/query", {**ASKED, "tenant": "t"}, 400, "tenant"),
    ("/query", {**ASKED, "lora_id": 3}, 400, "lora_name"),
    ("/query", b" " * ((16 << 20) + 1), 413, "16777216"),
    ("/query_by_hash", {"model": "m", "block_size": 64}, 400, "seq_hashes"),
    ("/query_by_hash", {"model": "m", "block_size": 64, "seq_hashes": [-1]}, 400, "seq_hashes[0] is -1"),
    ("/query_by_hash", {"model": "m", "block_size": 64, "seq_hashes": [], "page_keys": ["zz"]}, 400, "page_keys"),
    ("/register", {**REGISTERED, "instance_id": ""}, 400, "instance_id"),
    ("/register", {**REGISTERED, "endpoint": "http://x"}, 400, "endpoint"),
    ("/register", {**REGISTERED, "namespace": "nope"}, 400, "namespace"),
    ("/register", {**REGISTERED, "dp_rank": -1}, 400, "dp_rank"),
    ("/nowhere", {}, 404, "/query_by_hash"),
]  # fmt: skip


def test_what_cannot_be_is_refused_with_its_name(served):
    for path, body, status, named in REFUSED:
        answer = served.ask("POST", path, body)
        assert (answer.status, named in answer.json["error"]) == (status, True), (path, answer.body)
    assert served.ask("GET", "/health").json["status"] == "ok"


def test_tokens_are_read_however_they_are_written(served, pool):
    served.register()
    with EmbeddedStore(pool, CAPACITY) as store:
        store_prompt(store, TOKENS)
    plain = json.dumps(TOKENS)
    for listed in (plain, plain.replace(" ", ""), plain.replace(" ", "\n\t"), plain.replace("[", "[ "), "[ ]"):
        for body in (
            f'{{"model": "m", "block_size": 64, "token_ids": {listed}}}',
            f'{{"token_ids" :\n{listed}, "model": "m", "block_size": 64, "cache_salt": ""}}',
            f'{{"token_ids": [7], "model": "m", "block_size": 64, "token_ids": {listed}}}',
        ):
            answer = served.ask("POST", "/query", body.encode())
            assert answer.json["default"]["a"]["CPU"] == (256 if len(listed) > 9 else 0), body[:80]
    text = '"token_ids": [1]'
    assert served.query(TOKENS, cache_salt=text)["default"]["a"]["CPU"] == 0


def test_another_method_is_told_which_are_allowed_and_a_browsers_page_is_refused(served):
    answer = served.ask("GET", "/query")
    assert answer.status == 405 and "POST" in answer.json["error"]
    assert served.ask("POST", "/query", ASKED, {"Origin": "http://evil.example"}).status == 403


def test_who_does_not_send_the_token_is_refused(pool, tmp_path):
    file = tmp_path / "token"
    file.write_text("a token of the test\n")
    file.chmod(0o600)
    with serving(pool, agent_http_token_file=str(file)) as client:
        for wrong in ({}, {"Authorization": "Bearer another token"}, {"Authorization": "Basic YQ=="}):
            refused = client.ask("POST", "/query", ASKED, wrong)
            assert refused.status == 401 and refused.headers["www-authenticate"] == "Bearer"
        client.token = "a token of the test"
        assert client.query(TOKENS) == {"default": {}}


def test_other_hosts_are_let_in_with_a_token_only():
    with pytest.raises(ConfigError, match="agent_http_token_file to a file with a token"):
        load_config({"agent_http_port": 1, "agent_http_host": "0.0.0.0"}, {})
    assert load_config({"agent_http_port": 1, "agent_http_host": "::1"}, {}).agent_http_host == "::1"
    with pytest.raises(ConfigError, match="agent_http_host in the engine's JSON is 'localhost': expected a literal"):
        load_config({"agent_http_host": "localhost"}, {})


def test_its_port_is_open_on_the_loopback_alone_unless_told_otherwise(served, pool, tmp_path):
    assert answers_at(served.port) == {"127.0.0.1"}
    file = tmp_path / "token"
    file.write_text("a token of the test")
    file.chmod(0o600)
    with serving(tmp_path / "other", agent_http_host="0.0.0.0", agent_http_token_file=str(file)) as client:
        assert answers_at(client.port) == own_addresses()


def test_the_hosts_metrics_and_the_indexs_are_there(served, pool):
    served.register()
    served.query(TOKENS)
    served.ask("GET", "/nowhere")
    families = text_string_to_metric_families(served.ask("GET", "/metrics").body.decode())
    found = {(one.name, *sorted(one.labels.values())): one.value for family in families for one in family.samples}
    assert found["mooncake_connector_pool_pages",] == 0
    assert found["mooncake_connector_index_instances",] == 1
    assert found["mooncake_connector_index_http_answers_total", "/query", "200"] == 1
    assert found["mooncake_connector_index_http_answers_total", "404", "unknown"] == 1


def test_a_port_that_is_taken_costs_the_server_alone(pool, caplog):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        running(pool, agent_http_port=taken.getsockname()[1]),
        tiered(pool),
    ):
        pass
    assert any("another `agent_http_port`" in line for line in caplog.messages)


def test_without_tiers_an_engine_has_the_agent_started_and_asks_it_for_nothing(pool):
    fetches = StandIn()
    config = configured(pool, tiers=[], agent_http_port=free_port())
    with (
        running(pool, fetches, tiers=[], agent_http_port=config.agent_http_port),
        TieredStore(EmbeddedStore(pool, CAPACITY), config) as store,
    ):
        until(lambda: store._client.ready)
        space = store.space(namespace(), WHOLE, WHOLE.num_units * UNIT_NBYTES)
        keys = keys_of(TOKENS, namespace())
        found = space.lookup(keys)
        space.prefetch(keys)
        assert (found.pages, found.pending, store.shards_elsewhere(namespace())) == (0, False, [])
    assert fetches.asked == []
