"""`up --check`: everything is looked at, what is wrong comes with what to do, and nothing is started."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooncake_connector.checks import Verdict
from mooncake_connector.cli.main import app
from mooncake_connector.deploy import checks
from mooncake_connector.deploy.commands import Command, commands
from mooncake_connector.deploy.file import read_deployment


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1024))
    return folder


def listening(name: str, *ports: int) -> Command:
    return Command(name, "decode", ("x",), {}, "", tuple(("127.0.0.1", port) for port in ports))


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = checks.ports_check([listening("decode-0", port)])
    assert found.status is Verdict.FAILED
    assert f"{port} at 127.0.0.1, for decode-0: Address already in use; set other ports" in found.detail


def test_a_port_that_two_processes_want_is_named():
    found = checks.ports_check([listening("prefill-0", 31999), listening("decode-0", 31999)])
    assert found.status is Verdict.FAILED and "31999 is for prefill-0 and for decode-0" in found.detail


def test_an_address_that_stands_for_all_takes_the_port_of_one():
    everywhere = Command("router", "router", ("x",), {}, "", (("0.0.0.0", 31999),))
    for both in ([listening("decode-0", 31999), everywhere], [everywhere, listening("decode-0", 31999)]):
        found = checks.ports_check(both)
        assert found.status is Verdict.FAILED and f"31999 is for {both[0].name} and for {both[1].name}" in found.detail


def test_a_folder_with_a_model_is_fine(model):
    found = checks.model_check("./m", model.parent / "d.yaml")
    assert found.status is Verdict.OK and "1.0 KiB of weights" in found.detail


@pytest.mark.parametrize(
    "gone, words", [("config.json", "has no config.json"), ("model.safetensors", "has no weights (.safetensors")]
)
def test_a_folder_without_a_model_is_refused(model, gone, words):
    (model / gone).unlink()
    found = checks.model_check(str(model), model)
    assert found.status is Verdict.FAILED and words in found.detail


def test_a_model_of_the_hub_is_looked_for_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert checks.model_check("owner/name", tmp_path).status is Verdict.WARNING
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set: unset it" in checks.model_check("owner/name", tmp_path).detail
    (tmp_path / "models--owner--name").mkdir()
    assert checks.model_check("owner/name", tmp_path).status is Verdict.OK
    assert "no name on the hub" in checks.model_check("a b", tmp_path).detail


def test_weights_that_do_not_fit_into_memory_are_a_warning(model, monkeypatch):
    file = model.parent / "d.yaml"
    file.write_text("engine: vllm\nmodel: ./m")
    monkeypatch.setattr(checks, "read_lines", lambda path: ["MemTotal: 9 kB", "MemAvailable:       1 kB"])
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    (found,) = checks.memory_check(read_deployment(file), file)
    assert found.status is Verdict.WARNING and "weights of all instances take 2.0 KiB" in found.detail


def test_an_engine_that_is_not_here_says_where_to_run():
    found = checks.engine_check("no_such_engine", "1")
    assert found.status is Verdict.FAILED and "run mooncake-connector from the environment" in found.detail


def test_a_router_that_is_not_installed_says_how(monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = checks.router_check("vllm-router")
    assert found.status is Verdict.FAILED and "pip install vllm-router" in found.detail
    assert checks.router_check("none").status is Verdict.OK


def test_the_builtin_router_names_what_it_lacks(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    found = checks.router_check("builtin")
    assert found.status is Verdict.FAILED and "pip install httpx uvicorn" in found.detail


def test_logs_need_a_folder_that_can_be_written(tmp_path):
    assert checks.logs_check(tmp_path / "a" / "b").status is Verdict.OK
    (tmp_path / "file").write_text("")
    assert checks.logs_check(tmp_path / "file" / "logs").status is Verdict.FAILED


def test_check_shows_everything_and_fails_where_something_fails(model, pool):
    """No engine is beside these tests, or not this one's model; all the rest is looked at nevertheless."""
    file = model.parent / "d.yaml"
    secret = model.parent / "secret"
    secret.write_text("as long as it has to be")
    secret.chmod(0o644)
    file.write_text(
        f"engine: vllm\nmodel: ./gone\nconnector: {{pool: {pool}, capacity: 2MiB, secret_file: {secret}}}\n"
        "prefill: {port: 31001}\ndecode: {port: 31001}\nrouter: {port: 31003}\n"
    )
    result = CliRunner().invoke(app, ["up", str(file), "--check"])
    assert result.exit_code == 1
    lines = {line[8:22].strip(): line for line in result.stdout.splitlines()}
    assert {"vllm", "plugin", "model", "ports", "pool", "room", "transfers", "router", "logs"} <= lines.keys()
    assert lines["model"].startswith("failed") and lines["ports"].startswith("failed")
    assert lines["transfers"].startswith("failed") and "chmod 600" in lines["transfers"]
    assert lines["pool"].startswith("ok") and not pool.exists() and not (model.parent / "mooncake-logs").exists()


@pytest.mark.parametrize("place", ["of up", "of the file"])
def test_a_setting_of_the_environment_that_does_not_fit_is_found(model, monkeypatch, place):
    file = model.parent / "d.yaml"
    file.write_text("engine: vllm\nmodel: ./m\n")
    if place == "of up":
        monkeypatch.setenv("MOONCAKE_CONNECTOR_PAGE_TOKENS", "63")
    else:
        file.write_text("engine: vllm\nmodel: ./m\ndecode: {env: {MOONCAKE_CONNECTOR_PAGE_TOKENS: 63}}\n")
    result = CliRunner().invoke(app, ["up", str(file), "--check"])
    assert result.exit_code == 1 and "MOONCAKE_CONNECTOR_PAGE_TOKENS is '63'" in result.output


def test_every_port_of_a_deployment_is_looked_at(model):
    file = model.parent / "d.yaml"
    file.write_text("engine: sglang\nmodel: ./m\nprefill: {count: 2, port: 8100}\ndecode: {port: 18101}")
    found = checks.ports_check(commands(read_deployment(file), file))
    assert found.status is Verdict.FAILED and "18101 is for prefill-1 and for decode-0" in found.detail
