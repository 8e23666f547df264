"""`config show`: every value with the place that set it, for the command line and for an engine; no secret in it."""

import json
import re

import pytest
from typer.testing import CliRunner

from mooncake_connector.cli.main import app
from mooncake_connector.config.schema import Config


@pytest.fixture(autouse=True)
def sources(tmp_path, monkeypatch):
    """A file, a variable and a secret."""
    secret = tmp_path / "secret"
    secret.write_text("hunter2-hunter2-hunter2")
    secret.chmod(0o600)
    file = tmp_path / "c.toml"
    file.write_text(f'# mine\npage_tokens = 128\ncapacity = "8GB"\nsecret_file = "{secret}"\n')
    monkeypatch.setenv("MOONCAKE_CONNECTOR_CONFIG", str(file))
    monkeypatch.setenv("MOONCAKE_CONNECTOR_CAPACITY", "2Gi")
    monkeypatch.setenv("MOONCAKE_CONNECTOR_TRANSPORTS", "tcp,shm")
    return file


def show(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, ["config", "show", *arguments])
    assert result.exit_code == code, result.output
    return result


def settings(*arguments: str) -> dict:
    return json.loads(show("--json", *arguments).stdout)


def test_every_field_is_there_with_its_value_and_source(sources):
    found = settings()
    assert list(found) == list(Config.__struct_fields__)
    assert found["page_tokens"] == {"value": 128, "source": f"file {sources}, line 2"}
    assert found["capacity"] == {"value": 2 << 30, "source": "environment variable MOONCAKE_CONNECTOR_CAPACITY"}
    assert found["transports"]["value"] == ["tcp", "shm"]
    assert found["load_deadline_s"] == {"value": 5.0, "source": "default"}


def test_tiers_are_shown_by_name_and_with_all_their_fields_in_json(monkeypatch):
    tiers = [{"kind": "disk", "name": "nvme", "path": "/nvme/kv/disk", "capacity": "1TiB"}, "mooncake"]
    monkeypatch.setenv("MOONCAKE_CONNECTOR_TIERS", json.dumps(tiers))
    disk, mooncake = settings()["tiers"]["value"]
    assert disk.items() >= {"kind": "disk", "path": "/nvme/kv/disk", "capacity": 1 << 40, "write": "all"}.items()
    assert mooncake["kind"] == "mooncake" and mooncake["master"] is None
    assert re.search("^tiers +nvme, mooncake  +MOONCAKE_CONNECTOR_TIERS$", show().stdout, re.MULTILINE)


@pytest.mark.parametrize("name", ["c.toml", "c.yaml"])
def test_the_line_of_a_file_is_named(tmp_path, monkeypatch, name):
    path = tmp_path / name
    path.write_text("\n\n" + ("eviction = 'lru'" if name == "c.toml" else "eviction: lru"))
    monkeypatch.setenv("MOONCAKE_CONNECTOR_CONFIG", str(path))
    assert settings()["eviction"]["source"] == f"file {path}, line 3"


def test_people_see_a_table(sources):
    lines = {line.split()[0]: line for line in show().stdout.splitlines() if line}
    assert f"file {sources}, line 2" in lines["page_tokens"] and "128" in lines["page_tokens"]
    assert "2.0 GiB" in lines["capacity"] and "tcp, shm" in lines["transports"]


def test_the_secret_is_never_printed():
    for arguments in ([], ["--json"]):
        assert "hunter2" not in show(*arguments).output


@pytest.mark.parametrize(
    "transfer",
    [
        {"kv_connector": "MooncakeKVConnector", "kv_connector_extra_config": {"page_tokens": 32}},
        {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {
                "connectors": [
                    {"kv_connector": "OffloadingConnector"},
                    {"kv_connector": "MooncakeKVConnector", "kv_connector_extra_config": {"page_tokens": 32}},
                ]
            },
        },
    ],
    ids=["alone", "in a MultiConnector"],
)
def test_what_vllm_would_see(transfer):
    found = settings("--kv-transfer-config", json.dumps(transfer))
    assert found["page_tokens"] == {"value": 32, "source": "the engine's JSON"}
    assert found["capacity"]["source"].startswith("environment")


def test_what_sglang_would_see():
    found = settings("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 64, "page_tokens": 64}')
    assert found["page_tokens"] == {"value": 64, "source": "the engine's JSON"}


def test_what_was_typed_wins_for_the_commands(tmp_path):
    assert settings("--pool", str(tmp_path))["pool"] == {"value": str(tmp_path), "source": "command line, --pool"}


@pytest.mark.parametrize("option", ["--kv-transfer-config", "--hicache-storage-backend-extra-config"])
@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100000, '{"a": ' * 100000, "9" * 10000])
def test_json_that_is_none_is_one_line(option, text):
    result = show("--json", option, text, code=1)
    assert option in json.loads(result.stdout)["error"] and result.stderr.count("\n") == 1


def test_another_connector_is_told():
    result = show("--kv-transfer-config", '{"kv_connector": "NixlConnector"}', code=1)
    assert "MooncakeKVConnector" in result.stderr


OURS = "MooncakeKVConnector"


@pytest.mark.parametrize(
    ("transfer", "reason"),
    [
        ({"kv_connector": OURS, "capacity": "8GiB"}, "capacity is a setting .* put it into kv_connector_extra_config"),
        ({"kv_connector": OURS, "kv_connector_extra_config": [1]}, r"kv_connector_extra_config is \[1\]: expected"),
        ({"kv_connector": OURS, "kv_connector_extra_config": "{}"}, "kv_connector_extra_config is '{}': expected"),
        ({"kv_connector": "MultiConnector", "pool": "/p"}, f"pool is a .* kv_connector_extra_config of {OURS}"),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {"connectors": ["x", {"kv_connector": OURS, "pool": "/p"}]},
            },
            r"config\.connectors\[1\]\.pool is a .* into kv_connector_extra_config\.connectors\[1\]\.kv",
        ),
    ],
)
def test_settings_where_vllm_would_not_hand_them_on_are_an_error(transfer, reason):
    result = show("--kv-transfer-config", json.dumps(transfer), code=1)
    assert re.search(f"--kv-transfer-config: .*{reason}", result.stderr)


def test_a_configuration_that_cannot_be_used_is_an_error(monkeypatch):
    monkeypatch.setenv("MOONCAKE_CONNECTOR_PAGE_TOKENS", "63")
    assert "MOONCAKE_CONNECTOR_PAGE_TOKENS" in json.loads(show("--json", code=1).stdout)["error"]
