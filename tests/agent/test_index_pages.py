"""Pages of the pool over HTTP, and the description of all paths in docs/openapi.yaml against the server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import xxhash
import yaml
from agent.asking import UNIT_NBYTES, WHOLE, Answer, Client, free_port, prompt, store_prompt
from agent.stand_in import CAPACITY
from agent.test_index import REFUSED, served, serving

from mooncake_connector.kv.geometry import Shard
from store_client import EmbeddedStore
from store_client.agent.index.requests import Query, QueryByHash, Registration, Unregistration
from store_client.testing import chain, get_page, namespace, page_bytes

__all__ = ["served"]

REPOSITORY = Path(__file__).parents[2]
DOCUMENT = yaml.safe_load((REPOSITORY / "docs" / "openapi.yaml").read_text("utf-8"))
TOKEN = "a token of the test"
DIGEST = namespace().digest.hex()
NBYTES = WHOLE.num_units * UNIT_NBYTES
KEY, OTHER_KEY = chain("over http", 2)
PAGE = page_bytes(KEY, NBYTES).tobytes()


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    return str(file)


@pytest.fixture
def open_to_pages(pool: Path, token_file: str) -> Iterator[Client]:
    with serving(pool, agent_http_token_file=token_file) as client:
        client.token = TOKEN
        yield client


@pytest.fixture
def store(pool: Path, open_to_pages: Client) -> Iterator[EmbeddedStore]:
    with EmbeddedStore(pool, CAPACITY) as store:
        store_prompt(store, prompt(1, 64))  # so that the namespace is known
        yield store


def path(key: bytes = KEY, digest: str = DIGEST, shard: str = "") -> str:
    return f"/v1/pages/{digest}/{key.hex()}" + (f"?shard={shard}" if shard else "")


def checksum(page: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(page):016x}"


def test_a_page_that_is_put_is_what_engines_read_and_the_other_way_round(open_to_pages, store):
    client, space = open_to_pages, store.space(namespace(), WHOLE)
    assert client.ask("GET", path()).status == 404
    stored = client.ask("PUT", path(), PAGE, {"X-Checksum-XXH3-64": checksum(PAGE).upper()})
    assert (stored.status, stored.json) == (201, {"stored": True})
    assert get_page(space, KEY, NBYTES).tobytes() == PAGE
    again = client.ask("PUT", path(), bytes(NBYTES))
    assert (again.status, again.json) == (200, {"stored": False}), "a page never changes"
    got = client.ask("GET", path(digest=DIGEST[:8]))
    assert (got.status, got.body, got.headers["x-checksum-xxh3-64"]) == (200, PAGE, checksum(PAGE))
    head = client.ask("HEAD", path())
    assert (head.body, head.headers["content-length"], head.headers["x-checksum-xxh3-64"]) == (
        b"", str(NBYTES), checksum(PAGE),
    )  # fmt: skip
    assert client.ask("DELETE", path()).status == 204
    assert space.contains([KEY]) == [False]
    assert client.ask("DELETE", path()).status == client.ask("HEAD", path()).status == 404


def test_a_range_is_that_part_of_the_page(open_to_pages, store):
    open_to_pages.ask("PUT", path(), PAGE)
    for asked, first, stop in (
        ("0-9", 0, 10),
        ("100-", 100, NBYTES),
        ("-7", NBYTES - 7, NBYTES),
        (f"9-{1 << 40}", 9, NBYTES),
    ):
        part = open_to_pages.ask("GET", path(), None, {"Range": f"bytes={asked}"})
        assert (part.status, part.body) == (206, PAGE[first:stop]), asked
        assert part.headers["content-range"] == f"bytes {first}-{stop - 1}/{NBYTES}"
        assert part.headers["x-checksum-xxh3-64"] == checksum(PAGE)
    for asked in (f"{NBYTES}-", "-0"):
        assert open_to_pages.ask("GET", path(), None, {"Range": f"bytes={asked}"}).status == 416
    for asked in ("lines=1-2", "bytes=9-3", "bytes=-", "bytes=0-", f"bytes=0-{NBYTES - 1}", f"bytes=-{1 << 40}"):
        whole = open_to_pages.ask("GET", path(), None, {"Range": asked})
        assert (whole.status, whole.body, "content-range" in whole.headers) == (200, PAGE, False), asked


def test_a_page_hangs_on_the_one_that_it_is_put_behind(open_to_pages, store):
    for key, headers in ((KEY, {}), (OTHER_KEY, {"X-Parent-Key": KEY.hex()})):
        assert open_to_pages.ask("PUT", path(key), page_bytes(key, NBYTES).tobytes(), headers).status == 201
    pages = store.survey().pages
    places = {page["key"].tobytes(): place for place, page in enumerate(pages)}
    assert pages["parent"][places[OTHER_KEY]] == places[KEY] and pages["parent"][places[KEY]] < 0


def test_shards_are_told_apart_and_a_new_namespace_is_described(open_to_pages, store):
    client, half = open_to_pages, Shard(0, 4, 0, 1)
    page = page_bytes(KEY, half.num_units * UNIT_NBYTES).tobytes()
    assert client.ask("PUT", path(shard="0-4,0-1"), page).status == 201
    assert get_page(store.space(namespace(), half), KEY, len(page)).tobytes() == page
    unsaid = client.ask("GET", path())
    assert unsaid.status == 400 and "0-4,0-1" in unsaid.json["error"]
    assert client.ask("GET", path(shard="0-4,0-1")).body == page
    new = namespace("another")
    digest, described = new.digest.hex(), {"X-Namespace": json.dumps(new.to_dict())}
    assert client.ask("PUT", path(digest=digest), PAGE).status == 404
    assert client.ask("PUT", path(), PAGE, described).status == 400, "it describes another one than the path says"
    assert client.ask("PUT", path(digest=digest), PAGE, described).status == 201
    listed = {one["namespace"]: one for one in client.ask("GET", "/v1/namespaces").json["namespaces"]}
    assert listed[digest]["pages"] == 1 and listed[digest]["fields"] == new.to_dict()


def test_what_cannot_be_a_page_is_refused(open_to_pages, store):
    client = open_to_pages
    for method, where, body, headers, status, named in (
        ("PUT", path(), PAGE[:-1], {}, 400, f"{NBYTES - 1} bytes: expected {NBYTES}"),
        ("PUT", path(), b"", {}, 400, "0 bytes"),
        ("PUT", path(), PAGE, {"X-Checksum-XXH3-64": "0" * 16}, 400, checksum(PAGE)),
        ("PUT", path(), PAGE, {"X-Parent-Key": "zz"}, 400, "x-parent-key"),
        ("PUT", path(), PAGE, {"X-Namespace": "[]"}, 400, "x-namespace"),
        ("PUT", path(), PAGE, {"Content-Range": f"bytes 0-{NBYTES - 1}/{2 * NBYTES}"}, 400, "content-range"),
        ("PUT", path(), PAGE, {"Content-Encoding": "gzip"}, 400, "content-encoding"),
        ("PUT", path(shard="4-0,0-1"), PAGE, {}, 400, "shard"),
        ("PUT", path(shard="x"), PAGE, {}, 400, "shard"),
        ("PUT", path(shard="0-5,0-2"), PAGE, {}, 400, "0-4,0-2"),
        ("GET", path(digest="0" * 64), None, {}, 404, "/v1/namespaces"),
        ("GET", "/v1/pages/abc/def", None, {}, 404, "64 hexadecimal"),
        ("GET", "/v1/pages/../../etc/passwd", None, {}, 404, "path"),
        ("POST", path(), PAGE, {}, 405, "PUT"),
    ):
        answer = client.ask(method, where, body, headers)
        assert (answer.status, named in answer.json["error"]) == (status, True), (method, where, answer.body)
    assert store.stats().pages == 1


def test_pages_are_closed_without_a_token_on_the_loopback_too(served):
    for method in ("HEAD", "GET", "PUT", "DELETE"):
        refused = served.ask(method, path(), PAGE if method == "PUT" else None)
        assert refused.status == 403, method
    assert "agent_http_token_file" in refused.json["error"]


def test_pages_are_closed_to_another_token(open_to_pages):
    open_to_pages.token = "another token"
    assert open_to_pages.ask("GET", path()).status == 401


# -- the description ----------------------------------------------------------------------------------------------


def described(where: str, method: str) -> dict[str, Any]:
    where = where.partition("?")[0]
    return dict(
        DOCUMENT["paths"]["/v1/pages/{namespace}/{key}" if where.startswith("/v1/pages/") else where][method.lower()]
    )


def fits(answer: Answer, where: str, method: str) -> None:
    """The answer is one of those that the description has."""
    response = described(where, method)["responses"][str(answer.status)]
    if "$ref" in response:
        response = DOCUMENT["components"]["responses"][response["$ref"].rpartition("/")[2]]
    content = response.get("content", {})
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if method != "HEAD" and answer.status != 204:
        assert kind in content
    if kind == "application/json" and answer.body:
        jsonschema.Draft202012Validator({**DOCUMENT, **content[kind]["schema"]}).validate(answer.json)


def test_the_description_has_the_paths_and_methods_that_the_server_has(open_to_pages, store):
    for where, methods in DOCUMENT["paths"].items():
        real = where.replace("{namespace}", DIGEST).replace("{key}", KEY.hex())
        wrong = open_to_pages.ask("OPTIONS", real).json["error"]
        known = {word.lower() for word in wrong.partition("expected ")[2].split(", ")}
        assert known == set(methods) - {"parameters"}, where
    unknown = open_to_pages.ask("GET", "/nowhere").json["error"].partition("expected one of ")[2].split(", ")
    paths = {where.partition("{")[0] for where in DOCUMENT["paths"]}
    assert set(unknown) == paths


def test_bodies_that_are_described_are_those_that_are_read():
    kinds = {"Query": Query, "QueryByHash": QueryByHash, "Registration": Registration, "Unregistration": Unregistration}
    for name, kind in kinds.items():
        fields, schema = msgspec.structs.fields(kind), DOCUMENT["components"]["schemas"][name]
        assert {field.encode_name for field in fields} == set(schema["properties"]), name
        assert {field.encode_name for field in fields if field.required} == set(schema["required"]), name


def test_answers_are_as_they_are_described(open_to_pages, store):
    client, registered = open_to_pages, {"instance_id": "a", "modelname": "m", "block_size": 64, "type": "vLLM"}
    asked = {"model": "m", "block_size": 64}
    for method, where, body in (
        ("POST", "/register", registered),
        ("POST", "/register", {**registered, "instance_id": "b", "modelname": "unknown"}),
        ("POST", "/register", {**registered, "block_size": 16}),
        ("POST", "/query", {**asked, "token_ids": prompt(1, 64)}),
        ("POST", "/query_by_hash", {**asked, "seq_hashes": [1, 2]}),
        ("GET", "/services", None),
        ("GET", "/health", None),
        ("GET", "/metrics", None),
        ("GET", "/v1/stats", None),
        ("GET", "/v1/namespaces", None),
        ("PUT", path(), PAGE),
        ("PUT", path(), PAGE),
        ("GET", path(), None),
        ("HEAD", path(), None),
        ("GET", path(shard="x"), None),
        ("DELETE", path(), None),
        ("DELETE", path(), None),
        ("POST", "/unregister", {"instance_id": "a"}),
        ("POST", "/unregister", {"instance_id": "a"}),
        *(("POST", where, body) for where, body, status, _ in REFUSED if status == 400 and where != "/nowhere"),
    ):
        fits(client.ask(method, where, body), where, method)


# -- clients in other languages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("language", "command"), [("bash", ["bash", "-e"]), ("js", ["node", "--input-type=module"])])
def test_the_examples_of_the_documentation_copy_a_page(open_to_pages, store, tmp_path, language, command):
    for program in (command[0], "curl") if language == "bash" else command[:1]:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    text = (REPOSITORY / "docs" / "index.md").read_text("utf-8")
    example = next(one for one in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if "OTHER_KEY" in one)
    open_to_pages.ask("PUT", path(), PAGE)
    environment = {
        "URL": f"http://127.0.0.1:{open_to_pages.port}", "NAMESPACE": DIGEST, "KEY": KEY.hex(), "TOKEN": TOKEN,
        "OTHER_KEY": OTHER_KEY.hex(), "PATH": "/usr/local/bin:/usr/bin:/bin",
    }  # fmt: skip
    done = subprocess.run(
        command, input=example.encode(), env=environment, cwd=tmp_path, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
    assert get_page(store.space(namespace(), WHOLE), OTHER_KEY, NBYTES).tobytes() == PAGE


def test_the_port_is_free_again_once_the_agent_has_ended(pool):
    port = free_port()
    for _ in range(2):
        with serving(pool, agent_http_port=port) as client:
            assert client.ask("GET", "/health").status == 200
