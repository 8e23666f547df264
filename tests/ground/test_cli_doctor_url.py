"""`mooncake-connector doctor --url`: what it says of a server's figures and of the pool beside it.

Here a small HTTP server says what engines say; real ones are asked in tests/e2e.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mooncake_connector.cli import live
from mooncake_connector.cli.live import is_here
from mooncake_connector.cli.main import app
from mooncake_connector.cli.why import server as why_server
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.misses import Miss
from store_client import EmbeddedStore
from store_client.testing import namespace

VLLM, SGLANG = "vllm:mooncake_connector_", "mooncake_connector_"
Serve = Callable[[Mapping[str, str]], str]


@pytest.fixture(autouse=True)
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configured pool folder, which does not exist yet."""
    folder = tmp_path / "pool"
    monkeypatch.setenv("MOONCAKE_CONNECTOR_POOL", str(folder))
    return folder


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server that answers these paths, others with 404; its URL."""
    servers: list[ThreadingHTTPServer] = []

    def start(pages: Mapping[str, str]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                text = pages.get(self.path)
                self.send_response(404 if text is None else 200)
                self.end_headers()
                self.wfile.write((text or "").encode())

            def log_message(self, *args: Any) -> None:
                """Says nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def figures(prefix: str, hits: float, misses: Mapping[str, float], **more: float) -> str:
    """A page of metrics whose queried tokens are the sum of these."""
    counters = {"hit_tokens": hits, "queried_tokens": hits + sum(misses.values()), **more}
    lines = [f"{prefix}{name}_total {value}" for name, value in counters.items()]
    lines += [f'{prefix}miss_tokens_total{{reason="{why}"}} {tokens}' for why, tokens in misses.items()]
    return "\n".join([*lines, f"{'vllm' if prefix == VLLM else 'sglang'}:prompt_tokens_total 5000", ""])


def doctor(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


def said(url: str, exit_code: int = 0) -> dict[str, list[tuple[str, str]]]:
    """Status and detail of the checks by their name."""
    result = doctor("--url", url, "--json")
    assert result.exit_code == exit_code, result.output
    found: dict[str, list[tuple[str, str]]] = {}
    report = json.loads(result.stdout)
    assert report["ok"] is (exit_code == 0)
    for check in report["checks"]:
        found.setdefault(check["name"], []).append((check["status"], check["detail"]))
    return found


def only(found: dict[str, list[tuple[str, str]]], name: str) -> tuple[str, str]:
    (one,) = found[name]
    return one


def fill(folder: Path, *models: Any, pages: int = 4, capacity: int = 4 << 20) -> None:
    with EmbeddedStore(folder, capacity_nbytes=capacity) as store:
        for number, model in enumerate(models):
            space = store.space(model, Shard(0, 4, 0, 2))
            keys = [np.random.default_rng([number, page]).bytes(32) for page in range(pages)]
            space.write(keys, lambda i, page: page.fill(i), nbytes=1 << 18, parents=[None] * pages, deadline_s=60.0)


# The server


@pytest.mark.parametrize("host, here", [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False)])
def test_which_hosts_are_this_one(host: str, here: bool) -> None:
    assert is_here(f"http://{host}:8000") is here


def test_the_pool_here_is_not_that_of_a_server_elsewhere(
    serve: Serve, pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(pool, namespace())
    url = serve({"/metrics": figures(VLLM, 10, {})})
    assert only(said(url), "pool")[0] == "ok"
    monkeypatch.setattr("mooncake_connector.cli.doctor_url.is_here", lambda url: False)
    status, detail = only(said(url), "pool")
    assert status == "warning" and "is on another host: run this there" in detail


def test_a_server_that_is_not_there() -> None:
    status, detail = only(said("http://127.0.0.1:9", exit_code=1), "server")
    assert status == "failed" and "cannot be reached" in detail


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "/metrics"])
def test_what_is_no_address(url: str) -> None:
    assert "no address of a server" in only(said(url, exit_code=1), "server")[1]


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/metrics", "bare"])
def test_the_address_in_any_form(serve: Serve, form: str) -> None:
    url = serve({"/metrics": figures(VLLM, 10, {})})
    assert only(said(url.removeprefix("http://") if form == "bare" else form.format(url)), "server")[0] == "ok"


def test_sglang_without_metrics(serve: Serve) -> None:
    url = serve({"/server_info": '{"enable_metrics": false}'})
    assert "--enable-metrics" in only(said(url, exit_code=1), "server")[1]
    assert "SGLang without" not in only(said(serve({}), exit_code=1), "server")[1]


def test_a_page_that_is_none_of_an_engines(serve: Serve) -> None:
    assert "no page of metrics" in only(said(serve({"/metrics": "<html>{"}), exit_code=1), "server")[1]
    assert "neither vLLM's nor SGLang's" in only(said(serve({"/metrics": "other_total 1\n"}), exit_code=1), "server")[1]


def test_an_engine_without_the_connector(serve: Serve) -> None:
    status, detail = only(said(serve({"/metrics": "vllm:prompt_tokens_total 10\n"}), exit_code=1), "connector")
    assert status == "failed" and "`mooncake-connector doctor vllm`" in detail
    sglang = serve({"/metrics": "sglang:prompt_tokens_total 10\n", "/server_info": "{}"})
    assert "`mooncake-connector doctor sglang`" in only(said(sglang, exit_code=1), "connector")[1]


def test_an_sglang_that_has_asked_for_nothing(serve: Serve) -> None:
    info = '{"hicache_storage_backend": "mooncake_connector"}'
    url = serve({"/metrics": "sglang:prompt_tokens_total 10\n", "/server_info": info})
    status, detail = only(said(url), "connector")
    assert status == "warning" and "prefetch_threshold" in detail


def test_no_request_yet(serve: Serve) -> None:
    page = figures(VLLM, 0, {}).replace("prompt_tokens_total 5000", "prompt_tokens_total 0")
    assert "no request had its turn yet" in only(said(serve({"/metrics": page})), "hit rate")[1]


# The rate


@pytest.mark.parametrize("prefix", [VLLM, SGLANG], ids=["vllm", "sglang"])
@pytest.mark.parametrize("miss", Miss)
def test_each_reason_is_said_with_what_to_do(serve: Serve, prefix: str, miss: Miss) -> None:
    url = serve({"/metrics": figures(prefix, 250, {miss.value: 750})})
    found = said(url, exit_code=int(miss is Miss.UNAVAILABLE))
    assert "25.0%: 250 of 1,000" in only(found, "hit rate")[1]
    status, detail = only(found, "missed")
    assert detail.startswith("75% ") and miss.words.said in detail and miss.words.do in detail
    fine = (Miss.SHORT, Miss.NEVER_STORED, Miss.NOT_CACHED, Miss.ELSEWHERE, Miss.OTHER_NAMESPACE)
    assert (status == "ok") == (miss in fine or miss is Miss.CLEARED)


def test_reasons_come_by_size_and_the_smallest_not_at_all(serve: Serve) -> None:
    url = serve({"/metrics": figures(VLLM, 400, {"short": 100, "late": 497, "damaged": 3, "of a later version": 100})})
    told = [detail for _, detail in said(url)["missed"]]
    assert [detail.split()[0] for detail in told] == ["45%", "9%", "9%"]
    assert Miss.LATE.words.said in told[0] and any("of a later version" in detail for detail in told)


def test_a_rate_of_0_since_prompts_are_shorter_than_a_page(serve: Serve) -> None:
    found = said(serve({"/metrics": figures(VLLM, 0, {"short": 1000})}))
    assert only(found, "hit rate")[0] == "warning"
    status, detail = only(found, "missed")
    assert status == "warning" and "page_tokens" in detail


def test_a_pool_that_is_too_small(serve: Serve) -> None:
    more = {"evicted_requests": 10, "evicted_unused_seconds": 400, "evicted_reuse_seconds": 3000}
    status, detail = only(said(serve({"/metrics": figures(VLLM, 10, {"evicted": 990}, **more)})), "missed")
    assert status == "warning"
    assert "they went 40 s after their last use, and were asked for 5 min after it" in detail
    assert "about 8 times as large" in detail


def test_failures_by_their_cause(serve: Serve) -> None:
    page = figures(VLLM, 10, {}) + f'{VLLM}failures_total{{cause="load_page_lost"}} 3\n'
    assert "load_page_lost 3" in only(said(serve({"/metrics": page})), "failures")[1]


# The pool beside it


def test_a_pool_that_is_not_here(serve: Serve) -> None:
    status, detail = only(said(serve({"/metrics": figures(VLLM, 10, {})})), "pool")
    assert status == "warning" and "where the server runs" in detail


def test_what_the_pool_holds_and_how_long_pages_stay(serve: Serve, pool: Path) -> None:
    url = serve({"/metrics": figures(VLLM, 10, {})})
    fill(pool, namespace("m"))
    assert "4 pages" in only(said(url), "pool")[1] and "evicted" not in only(said(url), "pool")[1]
    fill(pool, namespace("m"), namespace("n"), pages=16)
    assert "pages were evicted" in only(said(url), "pool")[1]


def test_an_empty_pool(serve: Serve, pool: Path) -> None:
    fill(pool, namespace("m"), pages=0)
    assert "is it the pool of this server" in only(said(serve({"/metrics": figures(VLLM, 10, {})})), "pool")[1]


def test_instances_of_one_model_that_differ(serve: Serve, pool: Path) -> None:
    url = serve({"/metrics": figures(VLLM, 0, {"never_stored": 1000})})
    fill(pool, namespace("m"), namespace("other"), pages=2)
    assert "namespaces" not in said(url), "other models are no concern"
    fill(pool, namespace("m"), replace(namespace("m"), kv_dtype="float16"), pages=2)
    status, detail = only(said(url), "namespaces")
    assert status == "warning" and "kv_dtype (" in detail and "bfloat16" in detail


# The command


def test_text_for_people(serve: Serve) -> None:
    result = doctor("--url", serve({"/metrics": figures(VLLM, 250, {"evicted": 750})}))
    assert result.exit_code == 0 and "warning missed" in result.stdout and "hit rate" in result.stdout


def test_an_answer_that_is_far_too_long_is_none(serve: Serve, monkeypatch) -> None:
    page = figures(VLLM, 250, {"evicted": 750})
    for limit, code, said in ((len(page), 0, "hit rate"), (len(page) - 1, 1, "the answer does not end")):
        monkeypatch.setattr(live, "_MAX_NBYTES", limit)
        result = doctor("--url", serve({"/metrics": page}))
        assert result.exit_code == code and said in result.stdout


@pytest.mark.parametrize("command", [["doctor"], ["why", "prompt"]])
def test_an_answer_that_does_not_end_is_waited_for_for_a_while_and_said(monkeypatch, command) -> None:
    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"a 1\n")
                    time.sleep(0.05)

        def log_message(self, *args: Any) -> None:
            """Says nothing."""

    monkeypatch.setattr(live, "_QUIET_S", 0.1)
    monkeypatch.setattr(live, "_PATIENCE_S", 1.0)
    monkeypatch.setattr(why_server, "_PATIENCE_S", 1.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        result = CliRunner().invoke(app, [*command, "--url", f"http://127.0.0.1:{server.server_address[1]}"])
        server.shutdown()
    assert result.exit_code == 1 and "does not end" in result.output and "at most 1 s" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--json"], ["--url", "http://127.0.0.1:9", "vllm"], ["--pool", "/x", "vllm"], ["--json", "rdma"]]
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert doctor(*arguments).exit_code == 2
