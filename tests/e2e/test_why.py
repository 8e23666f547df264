"""`mooncake-connector why` beside a real server: it names the pages that the server stored, and what it found when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from e2e.conftest import Shared
from e2e.pages import PAGE_TOKENS, Pages, wait_for
from e2e.said import explained_in_words, line, runs, told, why, why_in_words
from mooncake_connector.cli.why.server import look_up
from mooncake_connector.kv.keys import page_keys
from mooncake_connector.misses import Miss
from store_client import EmbeddedStore
from store_client.testing import put_chain

TEXT = " ".join(f"Why was page {number} of this prompt computed again?" for number in range(20))
REQUEST = "why-it-missed"


def test_a_prompt_before_and_after_it_was_asked_and_without_a_page(shared: Shared, qwen3: Path) -> None:
    server = shared.server
    pages = Pages(shared.pool, qwen3, lambda: server)
    asked = ("--url", server.url, TEXT)
    before = why(shared.pool, *asked)
    tokens = look_up(server.url).tokens(TEXT, chat=False)
    last = len(tokens) // PAGE_TOKENS - 1
    assert last >= 3, "several pages"
    assert (before["tokens"], before["reason"], runs(before)) == (len(tokens), "never_stored", [(0, last, "unknown")])

    server.ask(TEXT, max_tokens=1)
    pages.wait_for(tokens)
    after = why(shared.pool, *asked)
    assert (runs(after), after["reason"]) == ([(0, last, "hit")], None)
    assert after["engine_settings"] == [], "the server says that it computes in float32, the model's files say bfloat16"
    with_its_own = why(shared.pool, "--model", str(qwen3), "--kv-dtype", "float32", TEXT)
    assert runs(with_its_own) == [(0, last, "hit")], "the tokenizer of the model's folder"
    assert why(shared.pool, "--url", server.url, "--salt", "tenant", TEXT)["without"] == {"salt": last + 1}
    assert why(shared.pool, "--url", server.url, "short")["reason"] == "short"

    pages.remove(tokens, 2)
    server.reset_prefix_cache()
    body = {"model": qwen3.name, "prompt": TEXT, "max_tokens": 1, "request_id": REQUEST}
    server._read(server._send("POST", "/v1/completions", body))
    wait_for(lambda: why(shared.pool, "--request", REQUEST) is not None, "the server leaves what it found", every_s=0.5)
    (record,) = why(shared.pool, "--request", REQUEST)
    assert [run[:4] for run in record["runs"]] == [
        [0, 1, "stored", None], [2, 2, "gone", "removed"], [3, last, "stored", None],
    ]  # fmt: skip
    assert (record["local_tokens"], record["hit_tokens"], record["miss"]) == (0, 2 * PAGE_TOKENS, "cleared")


def test_a_request_for_log_probabilities_of_its_prompt_is_computed(shared: Shared, qwen3: Path) -> None:
    server = shared.server
    server.ask(TEXT, max_tokens=1)
    Pages(shared.pool, qwen3, lambda: server).wait_for(look_up(server.url).tokens(TEXT, chat=False))

    def asked(**more: int) -> dict[str, str]:
        server.reset_prefix_cache()
        body = {"model": qwen3.name, "prompt": TEXT, "max_tokens": 1, **more}
        return line(server, lambda: server._read(server._send("POST", "/v1/completions", body)))

    assert asked()["miss"] == "short", "all pages of it are there"
    said = asked(prompt_logprobs=1)
    assert (said["miss"], said["hit_tokens"]) == ("not_cached", "0")
    explained_in_words(server, shared.pool, said, again=lambda: asked(prompt_logprobs=1))


@contextmanager
def stored_in_bfloat16(pool: Path, namespace: str, tokens: Sequence[int]) -> Iterator[None]:
    """Pages as of a server that computes in bfloat16, beside those in this namespace; its float32 takes twice as much.

    Gone afterwards: other tests look for the only pages of this model.
    """
    keys = page_keys(tokens, PAGE_TOKENS)
    with EmbeddedStore(pool) as store:
        own = next(info for info in store.namespaces() if info.namespace.digest.hex() == namespace)
        space = store.space(replace(own.namespace, kv_dtype="bfloat16"), own.shard)
        put_chain(space, keys, own.nbytes // own.pages // 2)
        try:
            yield
        finally:
            assert space.remove(keys) == len(keys)


def test_pages_of_another_dtype_are_of_another_namespace(shared: Shared, qwen3: Path) -> None:
    """Also where they are in what the model's files say, and the server was told another one."""
    server, text = shared.server, TEXT[::-1]
    server.ask(TEXT, max_tokens=1)
    Pages(shared.pool, qwen3, lambda: server).wait_for(look_up(server.url).tokens(TEXT, chat=False))
    asked = ("--url", server.url, text)
    before, tokens = why(shared.pool, *asked), look_up(server.url).tokens(text, chat=False)
    assert before["reason"] == "never_stored"
    with stored_in_bfloat16(shared.pool, before["namespace"], tokens):
        found, count = why(shared.pool, *asked), len(tokens) // PAGE_TOKENS
        assert (found["reason"], found["hit_tokens"]) == ("other_namespace", 0)
        (other,) = [other for other in found["other_namespaces"] if other["differs_in"] == ["kv_dtype"]]
        assert other["hit_pages"] == other["pages"] == count
        words = why_in_words(shared.pool, *asked)
        differs = f"other namespace: kv_dtype (float32 here, bfloat16 there) differs from {other['namespace'][:8]}"
        assert f"{differs}, which has {count} pages, {count} pages of this prompt\n" in words
        assert f"why not more: {Miss.OTHER_NAMESPACE.words.said}\n" in words
        ((_, detail),) = told(server, shared.pool)["namespaces"]
        assert "kv_dtype (" in detail

        server.reset_prefix_cache()
        said = line(server, lambda: server.ask(text, max_tokens=1))
        assert (said["miss"], said["hit_tokens"]) == ("never_stored", "0"), "an engine looks in its own namespace alone"
        Pages(shared.pool, qwen3, lambda: server).wait_for(tokens)
        assert why(shared.pool, *asked)["reason"] is None
