"""How SGLang comes to know the transfer backend: its name, its classes, the take-over; and another SGLang."""

from __future__ import annotations

import argparse
import copy
import logging
import pickle
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import pytest
from instances import placed_hooks, server
from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
from sglang.srt.disaggregation import decode, prefill, utils
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.fake import FakeKVSender
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
from sglang.srt.distributed.device_communicators import mooncake_transfer_engine
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

import sglang_backend
from mooncake_connector.checks import Verdict
from mooncake_connector.log import ROOT_LOGGER
from sglang_backend import BACKEND, KNOWN_VERSION, doctor, plugin
from sglang_backend.pd import offer
from sglang_backend.targets import Target, in_force, misfit

OPTION = "--disaggregation-transfer-backend"
KINDS = ["manager", "sender", "receiver", "bootstrap_server"]


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> None:
    load_plugins()


@pytest.fixture(autouse=True)
def _own_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer, "_taken_over", [])


@pytest.fixture
def taken_over() -> None:
    offer.install(take_over=True)


@pytest.fixture
def unhooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang as it is before any plugin has been loaded."""
    registry = {name: entry for name, entry in StorageBackendFactory._registry.items() if name != BACKEND}
    monkeypatch.setattr(StorageBackendFactory, "_registry", registry)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    DISAGG_TRANSFER_BACKEND_CHOICES.remove(BACKEND)
    for name, without in (("_value2member_map_", BACKEND), ("_member_map_", BACKEND.upper())):
        known = getattr(TransferBackend, name)
        monkeypatch.setitem(known, without, known[without])
        del known[without]
    monkeypatch.setattr(TransferBackend, "_member_names_", [])
    yield
    if BACKEND not in DISAGG_TRANSFER_BACKEND_CHOICES:
        DISAGG_TRANSFER_BACKEND_CHOICES.append(BACKEND)


class TestTheName:
    def test_the_command_line_takes_it_once(self):
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        arguments = parser.parse_args(["--model-path", "m", OPTION, BACKEND])
        assert arguments.disaggregation_transfer_backend == BACKEND
        offer.install(take_over=False)
        assert DISAGG_TRANSFER_BACKEND_CHOICES.count(BACKEND) == 1

    def test_it_is_a_member_of_the_enumeration_like_any_other(self):
        member = TransferBackend(BACKEND)
        assert member is TransferBackend[BACKEND.upper()] is getattr(TransferBackend, BACKEND.upper())
        assert member in TransferBackend and member in list(TransferBackend)
        assert (member.name, member.value) == (BACKEND.upper(), BACKEND)
        assert member != TransferBackend.MOONCAKE and len({member, *TransferBackend}) == len(TransferBackend)
        assert pickle.loads(pickle.dumps(member)) is member is copy.deepcopy(member)
        assert BACKEND in repr(member)

    def test_the_enumeration_refuses_what_nobody_knows(self):
        with pytest.raises(ValueError, match="mooncake_conector"):
            TransferBackend("mooncake_conector")


class TestTheClasses:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("where", [utils, prefill, decode])
    def test_sglangs_modules_get_ours_by_our_name(self, where, kind):
        given = where.get_kv_class(TransferBackend(BACKEND), KVClassType(kind))
        assert given is offer.classes()[kind] and given.__module__.startswith("sglang_backend.pd.")

    def test_they_are_sglangs_own_underneath(self):
        bases = [conn.CommonKVManager, conn.CommonKVSender, conn.CommonKVReceiver, conn.CommonKVBootstrapServer]
        assert all(issubclass(offer.classes()[kind], base) for kind, base in zip(KINDS, bases, strict=True))
        assert not any(getattr(each, "__abstractmethods__", None) for each in offer.classes().values())

    def test_others_are_given_as_before(self):
        assert utils.get_kv_class(TransferBackend.FAKE, KVClassType.SENDER) is FakeKVSender
        assert utils.get_kv_class(TransferBackend(BACKEND), KVClassType.KVARGS).__name__ == "KVArgs"


class TestTheTakeOver:
    @pytest.mark.parametrize("kind", KINDS)
    def test_mooncake_means_ours(self, taken_over, kind):
        assert utils.get_kv_class(TransferBackend.MOONCAKE, KVClassType(kind)) is offer.classes()[kind]
        assert utils.get_kv_class(TransferBackend.FAKE, KVClassType.SENDER) is FakeKVSender

    def started(self, monkeypatch: pytest.MonkeyPatch, **arguments: object) -> bool:
        """Whether SGLang would start Mooncake's transfer engine."""
        started: list[object] = []
        monkeypatch.setattr(mooncake_transfer_engine, "init_mooncake_transfer_engine", lambda **_: started.append(1))
        with server("qwen3", **arguments):
            mooncake_transfer_engine.maybe_init_shared_mooncake_transfer_engine(gpu_id=0)
        return bool(started)

    def test_mooncakes_engine_is_not_started_for_it(self, monkeypatch, taken_over):
        assert not self.started(monkeypatch, disaggregation_mode="prefill", disaggregation_transfer_backend="mooncake")

    def test_without_it_mooncakes_engine_is_started(self, monkeypatch):
        assert self.started(monkeypatch, disaggregation_mode="prefill", disaggregation_transfer_backend="mooncake")

    def test_nor_is_it_for_our_own_name(self, monkeypatch):
        assert not self.started(monkeypatch, disaggregation_mode="prefill", disaggregation_transfer_backend=BACKEND)

    def test_it_is_where_something_else_needs_it(self, monkeypatch, taken_over):
        monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_REUSE_TE", "1")
        arguments = {"enable_hierarchical_cache": True, "hicache_storage_backend": "mooncake"}
        assert self.started(
            monkeypatch,
            disaggregation_mode="prefill",
            disaggregation_transfer_backend="mooncake",
            **arguments,
        )

    def test_the_arguments_are_as_they_were_afterwards(self, monkeypatch, taken_over):
        with server("qwen3", disaggregation_mode="prefill", disaggregation_transfer_backend="mooncake"):
            mooncake_transfer_engine.maybe_init_shared_mooncake_transfer_engine(gpu_id=0)
            assert mooncake_transfer_engine.get_disagg().disaggregation_transfer_backend == "mooncake"


class Changed:
    """A method like SGLang's that does not use what we rest on."""

    def clear(self) -> None:
        self.states = {}


class TestTargets:
    def test_all_fit_here_and_all_hooks_are_in_force(self):
        assert [misfit(target) for target in offer.TARGETS if misfit(target)] == []
        assert in_force(offer.TARGETS)

    def test_an_attribute_that_is_not_there_any_more_is_named(self, monkeypatch):
        monkeypatch.setattr(conn.CommonKVSender, "clear", Changed.clear)
        (found,) = [misfit(target) for target in offer.TARGETS if misfit(target)]
        assert found.endswith("CommonKVSender.clear does without request_status")

    def test_what_only_has_to_be_there_is_named_where_it_is_not(self):
        assert "cannot be found" in (misfit(Target("sglang.srt.disaggregation.utils.Nothing")) or "")


@pytest.mark.usefixtures("unhooked")
class TestAnotherSglang:
    def offered(self) -> tuple[bool, bool]:
        """The storage backend, and the transfer backend: whole, or nothing of it."""
        hooked = HookRegistry._hooks.keys()
        storage = BACKEND in StorageBackendFactory._registry
        parts = [
            "sglang.srt.disaggregation.utils.get_kv_class" in hooked,
            BACKEND in DISAGG_TRANSFER_BACKEND_CHOICES,
            BACKEND in TransferBackend._value2member_map_,
        ]
        assert all(parts) or not any(parts)
        placed = placed_hooks()
        assert all((target.hook in placed) == storage for target in plugin.TARGETS[1:] if target.hook)
        return storage, all(parts)

    def test_the_known_one_is_offered_both(self, caplog):
        sglang_backend.register()
        assert self.offered() == (True, True) and not caplog.records

    @pytest.mark.parametrize("index", range(len(offer.TARGETS)), ids=lambda i: offer.TARGETS[i].path.split(".")[-1])
    def test_a_target_of_pd_that_is_missing_is_named_and_the_pool_is_offered(self, monkeypatch, caplog, index):
        gone = replace(offer.TARGETS[index], path=offer.TARGETS[index].path + "_of_old")
        monkeypatch.setattr(offer, "TARGETS", (*offer.TARGETS[:index], gone, *offer.TARGETS[index + 1 :]))
        sglang_backend.register()
        ours = [record for record in caplog.records if record.name.startswith(ROOT_LOGGER)]  # asyncio has a say as well
        (record,) = [record for record in ours if record.levelno >= logging.WARNING]
        assert gone.path in record.getMessage() and "the transfer backend" in record.getMessage()
        assert f"sglang=={KNOWN_VERSION}" in record.getMessage()
        assert self.offered() == (True, False)

    def test_pd_is_offered_where_the_pool_does_not_fit(self, monkeypatch):
        gone = replace(plugin.TARGETS[0], path=plugin.TARGETS[0].path + "_of_old")
        monkeypatch.setattr(plugin, "TARGETS", (gone, *plugin.TARGETS[1:]))
        sglang_backend.register()
        assert self.offered() == (False, True)


class TestDoctor:
    def found(self) -> dict[str, object]:
        return {check.name: check for check in doctor.run() if check.name.startswith("PD")}

    def test_it_says_what_stands(self):
        checks = self.found()
        assert list(checks) == ["PD hooks", "PD name", "PD backend", "PD take-over", "PD prompts"]
        assert {check.status for check in checks.values()} == {Verdict.OK}
        assert f"{OPTION} {BACKEND}" in checks["PD name"].detail and "Receiver" in checks["PD backend"].detail

    def test_a_target_that_is_missing_is_named_and_the_pool_looked_at(self, monkeypatch):
        gone = replace(offer.TARGETS[0], path=offer.TARGETS[0].path + "_of_old")
        monkeypatch.setattr(offer, "TARGETS", (gone, *offer.TARGETS[1:]))
        (check,) = self.found().values()
        assert check.status is Verdict.FAILED and gone.path in check.detail
        assert {check.name: check for check in doctor.run()}["backend"].status is Verdict.OK

    def test_classes_of_another_plugin_are_told(self, monkeypatch):
        other = type("Manager", (), {"__module__": "another"})
        monkeypatch.setattr(utils, "get_kv_class", lambda transfer_backend, class_type: other)
        assert "another" in self.found()["PD backend"].detail

    def test_a_take_over_is_told(self, taken_over):
        assert "Receiver" in self.found()["PD take-over"].detail
        assert self.found()["PD take-over"].status is Verdict.OK
