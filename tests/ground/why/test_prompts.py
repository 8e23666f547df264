"""Where `why` has a prompt, its tokens and its model from: a server, a folder, a file."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest
from ground.why.asking import KEYS, TOKENS, WHOLE, asked_json, refused, stored
from typer.testing import CliRunner

from mooncake_connector.cli.main import app
from mooncake_connector.cli.why import prompt
from mooncake_connector.cli.why.server import look_up
from mooncake_connector.kv.keys import page_keys


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


AUTO = 'vllm:cache_config_info{cache_dtype="auto",engine="0"} 1.0\n'


def computing(labels: str) -> str:
    """As the connector says on vLLM's /metrics what it cannot be known from the model's files."""
    return f'vllm:mooncake_connector_engine_info{{engine="0",{labels}}} 1.0\n'


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
         ("vllm", "/metrics", AUTO + computing('dtype="float16"'), "kv_dtype", "float16"),
         ("vllm", "/metrics", computing('dtype="bfloat16",page_tokens="128"'), "page_tokens", 128),
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

    @pytest.mark.parametrize(
        "said",
        ['vllm:cache_config_info{cache_dtype="fp8_ds_mla"} 1.0\n' + computing('dtype="float16"'),
         AUTO + computing('dtype="complex64",page_tokens="0"'),
         AUTO + computing(f'page_tokens="{"9" * 5000}"'),
         AUTO + computing('dtype="",page_tokens="-64"')],
        ids=("a packed cache", "no such dtype", "no such page", "nothing"),
    )  # fmt: skip
    def test_what_no_namespace_has_is_not_taken_from_a_server(self, space, server, model, said):
        stored(space, KEYS)
        _Server.pages |= {"/metrics": said}
        assert look_up(server).fields == {}
        assert asked_json("--url", server, "a prompt")["hit_tokens"] == 640

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

    @pytest.mark.parametrize(
        "text",
        ["", "hello", "[1, -2]", "[1.5]", '{"a": 1}', "[true]", "3", "null", "[" * 100000, "7" * 5000],
    )
    def test_what_is_no_list_of_tokens_is_an_error(self, space, model, tmp_path, text):
        (tmp_path / "ids").write_text(text)
        assert "token ids" in refused("--model", model, "--tokens", tmp_path / "ids")

    def test_wrong_usage(self, space, model, ids):
        assert "give one of a prompt" in refused("--model", model)
        assert "give one of a prompt" in refused("--model", model, "--tokens", ids, "a prompt")
        assert "--model" in refused("a prompt")
        assert "cannot be read" in refused("--model", model, "--tokens", "/nowhere/ids")
        assert "it has more than" in refused("--model", model, "--tokens", "/dev/zero")
