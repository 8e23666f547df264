"""`doctor vllm` in the real vLLM: what it finds in order, and each thing that may be wrong."""

from __future__ import annotations

import json
import shlex
import sys

import pytest
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from mooncake_connector.checks import Check, Verdict
from vllm_plugin import CONNECTOR, doctor
from vllm_plugin.connector import MooncakeKVConnector


@pytest.fixture(autouse=True)
def _all_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def found() -> dict[str, Check]:
    checks = list(doctor.run())
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def only_failure(name: str) -> str:
    """Detail of the one check that failed, which is `name`."""
    failures = [check for check in found().values() if check.status is Verdict.FAILED]
    assert [check.name for check in failures] == [name]
    return failures[0].detail


def test_here_everything_is_fine():
    """Also in a version of which only a part is tested, and that is said."""
    checks = found()
    assert list(checks) == ["vLLM", "plugin", "connector"]
    version = checks.pop("vLLM")
    assert vllm.__version__ in version.detail
    number = vllm.__version__.partition("+")[0]
    assert version.status is (Verdict.WARNING if number in doctor.PARTLY_KNOWN else Verdict.OK)
    assert {check.status for check in checks.values()} == {Verdict.OK}


def test_how_to_start_is_what_vllm_takes():
    *command, option, transfer = shlex.split(doctor.START.replace("\\\n", ""))
    assert (command, option) == (["vllm", "serve", "MODEL"], "--kv-transfer-config")
    config = KVTransferConfig(**json.loads(transfer))
    assert KVConnectorFactory.get_connector_class(config) is MooncakeKVConnector
    assert config.is_kv_producer and config.is_kv_consumer


def test_vllm_missing_is_told_and_nothing_else_looked_at(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "not installed in" in only_failure("vLLM") and len(found()) == 1


@pytest.mark.parametrize("version", ["0.33.0", "0.34.0+cu130"])
def test_another_version_is_a_warning_that_says_what_is_tested(monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    check = found()["vLLM"]
    assert check.status is Verdict.WARNING and version in check.detail and doctor.KNOWN_VERSION in check.detail
    assert ("its interface and its scheduler alone" in check.detail) is (version == "0.33.0")


@pytest.mark.parametrize("whitelist", ["another", ""])
def test_a_whitelist_without_us_is_told(monkeypatch, whitelist):
    monkeypatch.setenv("VLLM_PLUGINS", whitelist)
    assert f"VLLM_PLUGINS leaves it out ({whitelist})" in only_failure("plugin")


def test_a_whitelist_with_us_is_fine(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another,mooncake_connector")
    assert found()["plugin"].status is Verdict.OK


def test_a_connector_that_the_factory_does_not_know_is_told(monkeypatch):
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    assert f"Connector '{CONNECTOR}' is not registered" in only_failure("connector")


def test_a_connector_that_cannot_be_loaded_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_plugin.connector", None)
    assert "ModuleNotFoundError" in only_failure("connector")


def test_a_connector_that_does_not_fit_the_interface_is_told(monkeypatch):
    monkeypatch.setattr(MooncakeKVConnector, "on_new_request", lambda self: None)
    assert "on_new_request takes (self, request), not (self)" in only_failure("connector")
