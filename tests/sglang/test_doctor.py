"""`doctor sglang` in the real SGLang: what it finds in order, and each thing that may be wrong."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace

import pytest
import sglang
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from mooncake_connector.checks import Check, Verdict
from sglang_backend import BACKEND, KNOWN_VERSION, doctor, plugin
from sglang_backend.hicache import MooncakeConnectorStorage


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> None:
    load_plugins()


@pytest.fixture(autouse=True)
def _all_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)


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
    checks = found()
    assert list(checks)[:6] == ["SGLang", "plugin", "hooks", "name", "backend", "take-over"]
    assert {check.status for check in checks.values()} == {Verdict.OK}
    assert sglang.__version__ in checks["SGLang"].detail and checks["take-over"].detail.startswith("off:")


def test_how_to_start_is_what_the_command_line_takes():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    program, command, *arguments = shlex.split(doctor.START.replace("\\\n", ""))
    assert (program, command) == ("sglang", "serve")
    parsed = parser.parse_args(arguments)
    assert (parsed.hicache_storage_backend, parsed.page_size, parsed.enable_hierarchical_cache) == (BACKEND, 64, True)


def test_sglang_missing_is_told_and_nothing_else_looked_at(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert "not installed in" in only_failure("SGLang") and len(found()) == 1


def test_another_version_is_a_warning(monkeypatch):
    monkeypatch.setattr(sglang, "__version__", "0.6.1")
    check = found()["SGLang"]
    assert check.status is Verdict.WARNING and "0.6.1" in check.detail and KNOWN_VERSION in check.detail


def test_a_sglang_without_a_hook_registry_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang_backend.plugin", None)
    monkeypatch.delattr("sglang_backend.plugin")
    assert f"SGLang {sglang.__version__} cannot be hooked" in only_failure("hooks")


def test_a_target_that_is_missing_is_named(monkeypatch):
    gone = replace(plugin.TARGETS[0], path=plugin.TARGETS[0].path + "_of_old")
    monkeypatch.setattr(plugin, "TARGETS", (gone, *plugin.TARGETS[1:]))
    assert gone.path in only_failure("hooks")


def test_a_whitelist_without_us_is_told(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "another, third")
    assert "SGLANG_PLUGINS leaves it out (another,third)" in only_failure("plugin")


def test_a_whitelist_with_us_is_fine(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", f"another, {BACKEND}")
    assert found()["plugin"].status is Verdict.OK


def test_hooks_that_were_not_applied_are_told(monkeypatch):
    monkeypatch.setattr(HookRegistry, "_patched", set())
    assert all("not in force" in found()[what].detail for what in ("hooks", "PD hooks"))


def test_a_command_line_that_refuses_the_name_is_told(monkeypatch):
    monkeypatch.setattr(ServerArgs, "add_cli_args", staticmethod(ServerArgs.add_cli_args.__wrapped__.__wrapped__))
    assert f"invalid choice: '{BACKEND}'" in only_failure("name")


def test_a_backend_that_cannot_be_loaded_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang_backend.hicache", None)
    assert "ImportError" in only_failure("backend")


def test_a_backend_that_does_not_fit_the_interface_is_told(monkeypatch):
    monkeypatch.setattr(MooncakeConnectorStorage, "batch_get_v1", lambda self, keys: [])
    assert "batch_get_v1 takes (self, keys, host_indices, extra_info), not (self, keys)" in only_failure("backend")


def test_a_take_over_is_told(monkeypatch):
    registry = dict(StorageBackendFactory._registry)
    registry[plugin.TAKEN_OVER] = registry[BACKEND]
    monkeypatch.setattr(StorageBackendFactory, "_registry", registry)
    assert found()["take-over"].detail.startswith("on: 'mooncake' is mooncake-connector")
