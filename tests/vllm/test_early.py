"""A wrong setting of ours is found when vLLM reads `--kv-transfer-config`, before it looks at the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import vllm_plugin
from mooncake_connector.errors import ConfigError

WRONG = {"page_tokenz": 64}
NESTED = {"connectors": [{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}, {
    "kv_connector": "MooncakeKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": WRONG}]}  # fmt: skip


def transfer(extra: dict[str, Any], name: str = "MooncakeKVConnector", **more: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra, **more}


@pytest.mark.parametrize(
    "given",
    [
        transfer(WRONG),
        transfer(WRONG, kv_connector_module_path="vllm_plugin.connector"),
        transfer(NESTED, "MultiConnector"),
        transfer({"connectors": [transfer(NESTED, "MultiConnector")]}, "MultiConnector"),
    ],
    ids=["alone", "by module path", "in MultiConnector", "in one within another"],
)
def test_a_wrong_setting_is_found_where_vllm_reads_it(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'page_tokenz' in the engine's JSON \(did you mean page_tokens\?\)"):
        KVTransferConfig(**given)


def test_a_wrong_environment_is_found_there_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_CONNECTOR_PAGE_TOKENS", "48")
    with pytest.raises(ConfigError, match=r"MOONCAKE_CONNECTOR_PAGE_TOKENS is '48': expected a power of two"):
        KVTransferConfig(**transfer({}))


def test_what_was_made_before_the_plugin_was_loaded_is_looked_at_when_the_class_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`LLM(kv_transfer_config=...)` loads plugins afterwards; the class is looked up before the model is."""
    made = KVTransferConfig(**transfer({}))
    made.kv_connector_extra_config = dict(WRONG)
    with pytest.raises(ConfigError, match="page_tokenz"):
        KVConnectorFactory.get_connector_class(made)


def test_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_CONNECTOR_PAGE_TOKENS", "48")
    assert KVTransferConfig(**transfer(WRONG, "ExampleConnector")).kv_connector_extra_config == WRONG
    elsewhere = KVTransferConfig(**transfer(WRONG, kv_connector_module_path="json"))
    with pytest.raises(AttributeError):
        KVConnectorFactory.get_connector_class(elsewhere)
    assert KVTransferConfig().kv_connector is None


def test_what_vllm_refuses_itself_is_still_refused_in_its_words() -> None:
    with pytest.raises(ValidationError, match="kv_producer"):
        KVTransferConfig(**transfer({}) | {"kv_role": "kv_bot"})


def test_registering_again_wraps_nothing_twice() -> None:
    before = KVTransferConfig.__post_init__, KVConnectorFactory.get_connector_class.__func__
    vllm_plugin.register()
    assert before == (KVTransferConfig.__post_init__, KVConnectorFactory.get_connector_class.__func__)


def test_the_server_ends_with_one_message_before_it_looks_at_the_model(tmp_path: Path) -> None:
    """The model's folder is empty, so a server that came as far as its model would complain of that."""
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path)]
    done = subprocess.run(
        [*server, "--kv-transfer-config", json.dumps(transfer(WRONG))],
        env=os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode != 0
    assert "did you mean page_tokens?" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert str(tmp_path) not in done.stderr
