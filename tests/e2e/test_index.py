"""An agent beside a real vLLM, over HTTP: it says what the server then finds in the pool, and takes and gives pages."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from agent.asking import Answer, Client

from e2e.conftest import Shared
from e2e.index import serving
from e2e.pages import PAGE_TOKENS, Pages, clear
from e2e.questions import Question, draw_tokens
from e2e.said import runs, why
from mooncake_connector.kv.keys import page_keys


@pytest.fixture
def index(shared: Shared, logs: Path) -> Iterator[Client]:
    """A client that has the token."""
    with serving(shared.pool, logs / "index-agent.log") as client:
        yield client


def test_what_the_index_says_of_a_prompt_is_what_the_server_finds(shared: Shared, index: Client, qwen3: Path) -> None:
    server, name = shared.server, qwen3.name
    pages = Pages(shared.pool, qwen3, lambda: server)
    prompt = draw_tokens(random.Random(18), 5 * PAGE_TOKENS + 17)

    def said_and_found() -> tuple[int, int]:
        """Tokens, by the index and then by the server, after which it has saved what it did not find."""
        said = index.query(prompt, model=name)["default"]["one"]
        tokens = int(said["CPU"])
        assert said == {"longest_matched": tokens, "GPU": 0, "CPU": tokens, "DISK": 0, "DP": {"0": tokens}}
        server.reset_prefix_cache()
        found = server.ask(prompt, max_tokens=1).cached_tokens
        pages.wait_for(prompt)
        return tokens, found

    first = draw_tokens(random.Random(19), 2 * PAGE_TOKENS)  # its pages say what the pool calls the model
    server.compute(first)
    pages.wait_for(first)
    assert "remark" not in index.register("one", modelname=name)
    assert replace(index, token="").ask("POST", "/query", {"model": name}).status == 401
    assert said_and_found() == (0, 0)
    assert said_and_found() == (5 * PAGE_TOKENS, 5 * PAGE_TOKENS)
    pages.remove(prompt, 2)
    assert said_and_found() == (2 * PAGE_TOKENS, 2 * PAGE_TOKENS)
    clear(shared.pool)
    assert said_and_found() == (0, 0)


def test_a_page_of_the_server_is_taken_away_and_brought_back_over_http(
    shared: Shared, index: Client, qwen3: Path, questions: dict[str, Question], tmp_path: Path
) -> None:
    server, question = shared.server, questions["fork"]
    pages, taken = Pages(shared.pool, qwen3, lambda: server), 3
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(question.prompt))

    def ask() -> tuple[int, bool]:
        """Tokens found in the pool, and whether the text is right."""
        server.reset_prefix_cache()
        answer = server.ask(question.prompt, max_tokens=len(question.answer))
        return answer.cached_tokens // PAGE_TOKENS, answer.token_ids == question.answer

    def fates() -> list[tuple[int, int, str]]:
        return runs(why(shared.pool, "--url", server.url, "--tokens", str(file)))

    server.compute(question.prompt)
    pages.wait_for(question.prompt)
    parent, key = (each.hex() for each in page_keys(question.prompt, PAGE_TOKENS)[taken - 1 : taken + 1])
    last = question.num_full_pages - 1
    listed = index.ask("GET", "/v1/namespaces").json["namespaces"]
    paths = [f"/v1/pages/{each['namespace']}/{key}?shard={each['shard']}" for each in listed]
    (path,) = [path for path in paths if index.ask("HEAD", path).status == 200]

    def put(page: bytes, of: bytes) -> Answer:
        headers = {"X-Checksum-XXH3-64": f"{xxhash.xxh3_64_intdigest(of):016x}", "X-Parent-Key": parent}
        return index.ask("PUT", path, page, headers)

    got = index.ask("GET", path)
    page = got.body
    assert got.headers["x-checksum-xxh3-64"] == f"{xxhash.xxh3_64_intdigest(page):016x}"
    assert fates() == [(0, last, "hit")] and ask() == (last + 1, True)

    assert index.ask("DELETE", path).status == 204
    assert fates() == [(0, taken - 1, "hit"), (taken, taken, "removed"), (taken + 1, last, "unreached")]
    assert ask() == (taken, True)
    pages.wait_for(question.prompt)  # computed and stored again

    assert index.ask("DELETE", path).status == 204
    wrong = bytes(byte ^ 0x80 if at % 4 == 3 else byte for at, byte in enumerate(page))  # the sign of each float32
    refused = put(wrong, page)
    assert refused.status == 400 and "checksum" in refused.json["error"]
    assert index.ask("HEAD", path).status == 404
    assert put(wrong, wrong).status == 201
    assert ask() == (last + 1, False), "the text comes from what was put"

    assert index.ask("DELETE", path).status == 204
    assert put(page, page).status == 201
    assert fates() == [(0, last, "hit")] and ask() == (last + 1, True)
    assert index.ask("GET", path).body == page
