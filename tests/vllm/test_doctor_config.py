"""`doctor vllm --kv-transfer-config`: what may be wrong with the JSON, each with what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner
from vllm.plugins import load_general_plugins

import mooncake_connector.cli.doctor
from mooncake_connector.checks import Verdict
from mooncake_connector.cli.main import app
from vllm_plugin import doctor

OURS = {"kv_connector": "MooncakeKVConnector", "kv_role": "kv_both"}
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.fixture(autouse=True)
def _plugins_are_loaded() -> None:
    load_general_plugins()


def multi(*children: Any, **more: Any) -> dict[str, Any]:
    extra = {"connectors": list(children)}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra, **more}


def found(given: Any) -> list[tuple[Verdict, str]]:
    text = given if isinstance(given, str) else json.dumps(given)
    return [(check.status, check.detail) for check in doctor.check_config(text)]


def test_what_the_doctor_itself_advises_is_fine() -> None:
    assert found(OURS) == [(Verdict.OK, "kv_connector = MooncakeKVConnector, kv_role = kv_both")]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{kv_connector: x}", ["is no JSON", "at 'kv_connector: x}'", "double quotes", "single quotes"]),
        ("", ["is no JSON"]),
        ("[" * 100_000, ["nested too deeply"]),
        ("[]", ["is []", "expected an object"]),
        ({"kv_conector": "x", "kv_role": "kv_both"}, ["kv_conector is unknown (did you mean kv_connector?)"]),
        (OURS | {"page_tokens": 64}, ["page_tokens is a setting of the connector", "kv_connector_extra_config"]),
        (OURS | {"kv_role": "kv_prodcer"}, ["kv_role is 'kv_prodcer' (did you mean kv_producer?)", "kv_consumer"]),
        ({"kv_connector": "MooncakeKVConnector"}, ["kv_role is missing"]),
        (OURS | {"kv_connector": "MooncakeKVConector"}, ["MooncakeKVConector", "(did you mean MooncakeKVConnector?)"]),
        (OURS | {"kv_connector": "MooncakeConnector"}, ["not of mooncake-connector", "write MooncakeKVConnector"]),
        (OURS | {"kv_connector": 7}, ["kv_connector is 7"]),
        (OURS | {"kv_connector_module_path": "mooncake.connector"}, ["mooncake.connector", "'vllm_plugin.connector'"]),
        (OURS | {"kv_connector_module_path": "json"}, ["finds no MooncakeKVConnector", "leave it out"]),
        (OURS | {"kv_connector_module_path": 3}, ["kv_connector_module_path is 3"]),
        (OURS | {"kv_connector_extra_config": [1]}, ["kv_connector_extra_config is [1]: expected an object"]),
        (OURS | {"kv_load_failure_policy": "recompte"}, ["kv_load_failure_policy is 'recompte'", "recompute"]),
        (multi(), ["connectors is []: expected a list"]),
        (multi(EXAMPLE), ["MultiConnector, ExampleConnector is not of mooncake-connector"]),
        (multi(OURS, OURS), ["listed 2 times"]),
        (multi(OURS, "x"), ["connectors[1] is 'x'"]),
        (multi(OURS | {"kv_role": "both"}), ["connectors[0].kv_role is 'both'"]),
        (multi(OURS | {"engine_id": "a"}), ["connectors[0].engine_id"]),
        (multi(multi(OURS | {"kv_port": "x", "kv_rol": 1})), ["[0].kv_connector_extra_config.connectors[0].kv_rol"]),
    ],
)  # fmt: skip
def test_each_mistake_is_named_with_what_is_allowed(given: Any, said: list[str]) -> None:
    ((status, detail),) = found(given)
    assert status is Verdict.FAILED
    assert all(words in detail for words in said), detail


def test_all_mistakes_are_told_at_once() -> None:
    ((_, detail),) = found({"kv_connector": "x", "kv_role": "y", "z": 1})
    assert all(words in detail for words in ("kv_connector is 'x'", "kv_role is 'y'", "z is unknown"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (OURS | {"kv_load_failure_policy": "fail"}, "'fail', but transfer_failure ('recompute') takes its place"),
        (multi(OURS), "a request whose page is lost fails"),
        (multi(EXAMPLE, OURS, kv_load_failure_policy="recompute"), "ExampleConnector comes before"),
    ],
)
def test_what_works_otherwise_than_one_may_think_is_a_warning(given: Any, said: str) -> None:
    (first, _), (second, detail) = found(given)
    assert (first, second) == (Verdict.OK, Verdict.WARNING) and said in detail


def test_what_the_environment_says_otherwise_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_CONNECTOR_PAGE_TOKENS", "32")
    given = OURS | {"kv_connector_extra_config": {"page_tokens": 128}}
    assert found(given)[1] == (
        Verdict.WARNING,
        "page_tokens is 128 here and '32' in MOONCAKE_CONNECTOR_PAGE_TOKENS: the JSON wins",
    )
    monkeypatch.setenv("MOONCAKE_CONNECTOR_PAGE_TOKENS", "128")
    assert len(found(given)) == 1


@pytest.mark.parametrize("given", [OURS, multi(OURS, kv_load_failure_policy="recompute")], ids=["alone", "multi"])
def test_the_command_looks_at_the_pool_and_settings_of_the_json(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], pool: Any
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(mooncake_connector.cli.doctor, "transfer_checks", lambda config: iter(()))
    ours = given if given["kv_connector"] != "MultiConnector" else given["kv_connector_extra_config"]["connectors"][0]

    def doctor(**extra: Any) -> tuple[int, str]:
        monkeypatch.setitem(ours, "kv_connector_extra_config", extra)
        result = CliRunner().invoke(app, ["doctor", "vllm", "--kv-transfer-config", json.dumps(given)])
        return result.exit_code, result.stdout

    code, said = doctor(pool=str(pool), capacity="8MiB")
    assert code == 0 and f"{pool} will be made" in said, said
    code, said = doctor(page_tokenz=64)
    assert code == 1 and said.count("did you mean page_tokens?") == 1, said
