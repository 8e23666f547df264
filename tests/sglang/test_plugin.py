"""The hooks of `sglang_backend.plugin`, in the real SGLang, without a server."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import sglang
from causes import forget_causes
from instances import placed_hooks, server, storage_config
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.unified_cache.storage_attachment import StorageAttachment
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs

import sglang_backend
from sglang_backend import BACKEND, BACKEND_CLASS, BACKEND_MODULE, KNOWN_VERSION, plugin, request_lines
from sglang_backend.calls import our_backend
from sglang_backend.hicache import MooncakeConnectorStorage
from sglang_backend.targets import Target, in_force, place
from sglang_backend.weights import in_memory

DYNAMIC = {"backend_name": BACKEND, "module_path": BACKEND_MODULE, "class_name": BACKEND_CLASS}
OPTION = "--hicache-storage-backend"
UPDATES = [
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
]


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> None:
    """What SGLang does first in each of its processes."""
    load_plugins()


@pytest.fixture
def unhooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's registries as they are before any plugin has been loaded."""
    registry = {name: entry for name, entry in StorageBackendFactory._registry.items() if name != BACKEND}
    monkeypatch.setattr(StorageBackendFactory, "_registry", registry)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def run(code: str, **environ: str) -> str:
    """What `code` prints in a process of its own, after SGLang has loaded its plugins."""
    before = "from sglang.srt.plugins import load_plugins; load_plugins()\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", before + code],
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", **environ},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.stdout + done.stderr


class TestHowSglangFindsUs:
    def test_the_wheel_declares_one_plugin(self):
        found = [point for point in entry_points(group="sglang.srt.plugins") if point.dist.name == "mooncake-connector"]
        assert [(point.name, point.load()) for point in found] == [("mooncake_connector", sglang_backend.register)]

    def test_every_hook_is_in_force_after_sglang_has_loaded_its_plugins(self):
        assert plugin.hooked()

    def test_without_our_plugin_the_name_is_unknown(self):
        printed = run(
            "import argparse\nfrom sglang.srt.server_args import ServerArgs\np = argparse.ArgumentParser()\n"
            f"ServerArgs.add_cli_args(p)\np.parse_args(['--model-path', 'm', '{OPTION}', '{BACKEND}'])",
            SGLANG_PLUGINS="another",
        )
        assert f"invalid choice: '{BACKEND}'" in printed

    def test_registering_again_changes_nothing(self):
        sglang_backend.register()
        hooks = placed_hooks()
        assert all(hooks.count(target.hook) == 1 for target in plugin.TARGETS if target.type is HookType.AFTER)
        assert hooks.count(plugin._reports_weights) == len(UPDATES)
        assert hooks.count(request_lines._looks_up) == hooks.count(request_lines._loads) == 1

    def test_no_function_has_two_hooks_around_it_of_which_sglang_would_warn(self):
        around = [[kind for kind, _, _ in hooks].count(HookType.AROUND) for hooks in HookRegistry._hooks.values()]
        assert max(around) == 1

    def test_hooks_around_one_function_are_around_each_other(self, monkeypatch, unhooked):
        def adds(letter):
            return Target(f"{__name__}.spelled", hook=lambda call, word, **more: call(word + letter, **more) + letter)

        monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(spelled=lambda word, end: word + end))
        first, second = adds("a"), adds("b")
        for targets in ((first,), (second,), (first, second)):
            place(targets)
        assert not in_force((first, second))
        HookRegistry.apply_hooks()
        assert in_force((first, second))
        assert sys.modules[__name__].spelled("", end="-") == "ba-ab"


class TestTheCommandLine:
    def test_it_takes_our_name(self):
        arguments = parser().parse_args(["--model-path", "m", OPTION, BACKEND])
        assert ServerArgs.from_cli_args(arguments).hicache_storage_backend == BACKEND

    def test_it_still_refuses_what_nobody_knows(self, capsys):
        with pytest.raises(SystemExit):
            parser().parse_args(["--model-path", "m", OPTION, "mooncake_conector"])
        assert BACKEND in capsys.readouterr().err  # among what may be chosen

    def test_each_parser_names_it_once(self):
        for made in (parser(), parser()):
            choices = made._option_string_actions[OPTION].choices
            assert choices.count(BACKEND) == 1


class TestTheFactory:
    @pytest.mark.parametrize("name, extra", [(BACKEND, {}), ("dynamic", DYNAMIC)])
    def test_it_makes_our_backend_by_our_name_and_by_the_dynamic_way(self, name, extra):
        made = StorageBackendFactory.create_backend(name, storage_config(**extra), object())
        assert type(made) is MooncakeConnectorStorage

    def test_without_the_hook_it_refuses_our_name(self):
        unhooked = StorageBackendFactory._create_builtin_backend.__wrapped__
        with pytest.raises(ValueError, match=f"Unknown built-in backend: {BACKEND}"):
            unhooked(StorageBackendFactory, BACKEND, MooncakeConnectorStorage, storage_config(), object())

    def test_it_makes_others_as_before(self, tmp_path):
        made = StorageBackendFactory.create_backend("file", storage_config(file_storage_path=str(tmp_path)), object())
        assert type(made).__name__ == "HiCacheFile"

    def test_our_backend_is_known_inside_sglangs_failure_injector(self, monkeypatch):
        monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.5")
        made = StorageBackendFactory.create_backend(BACKEND, storage_config(), object())
        assert type(made).__name__ == "HiCacheStorageFailureInjector"
        assert type(our_backend(SimpleNamespace(storage_backend=made))) is MooncakeConnectorStorage


class TestTheTakeOver:
    def test_the_name_mooncake_makes_our_backend(self):
        printed = run(
            "import os\nfrom sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig as Config\n"
            "from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory\n"
            "config = Config(0, 1, 0, 1, 0, 1, False, False, True, 'm')\n"
            "print(type(StorageBackendFactory.create_backend('mooncake', config, object())))\n"
            "print('engine', os.environ['SGLANG_HICACHE_MOONCAKE_REUSE_TE'])",
            MOONCAKE_CONNECTOR_SGLANG_TAKEOVER="1",
        )
        assert f"<class '{BACKEND_MODULE}.{BACKEND_CLASS}'>\nengine 0" in printed
        assert "SGLang's storage backend 'mooncake' is mooncake-connector in this process" in printed

    def test_unasked_it_stays_sglangs_own(self):
        assert not plugin.takes_over()
        assert StorageBackendFactory._registry["mooncake"]["class_name"] == "MooncakeStore"

    def test_a_setting_of_the_user_stays(self, monkeypatch, unhooked):
        monkeypatch.setenv("MOONCAKE_CONNECTOR_SGLANG_TAKEOVER", "1")
        monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_REUSE_TE", "1")
        sglang_backend.register()
        assert StorageBackendFactory._registry["mooncake"]["class_name"] == BACKEND_CLASS
        assert os.environ["SGLANG_HICACHE_MOONCAKE_REUSE_TE"] == "1"

    def test_a_configuration_that_cannot_be_used_leaves_it_and_is_told(self, monkeypatch, unhooked, caplog):
        monkeypatch.setenv("MOONCAKE_CONNECTOR_SGLANG_TAKEOVER", "mooncake")
        sglang_backend.register()
        assert StorageBackendFactory._registry["mooncake"]["class_name"] == "MooncakeStore"
        assert "MOONCAKE_CONNECTOR_SGLANG_TAKEOVER is 'mooncake': expected true or false" in caplog.text


class Controller(HiCacheController):
    """The real attachment on a controller that has no device, no threads and no other ranks."""

    def __init__(self) -> None:
        self.enable_storage = False
        self.page_size = 64
        self.host_memory_mode = "cache"
        self.storage_host_pool = self.mem_pool_host = SimpleNamespace(logical_size=1024)
        self.storage_stop_event = SimpleNamespace(clear=lambda: None)

    def _nothing(self, *args: Any) -> list[Any]:
        return []

    _stop_storage_threads = _start_storage_threads = _create_sync_groups = _destroy_sync_groups = _nothing

    def _generate_storage_config(self, model_name: Any = None, extra: Any = None) -> HiCacheStorageConfig:
        return storage_config(**(extra or {}))


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    monkeypatch.setattr(MooncakeConnectorStorage, "register_mem_pool_host", lambda self, pool: None)
    with get_parallel().override(attn_dcp_size=1):
        yield Controller()


class TestTheAttachment:
    @pytest.mark.parametrize("name, extra", [(BACKEND, {}), ("dynamic", DYNAMIC)])
    def test_our_pages_move_without_a_copy(self, controller, name, extra):
        controller.attach_storage_backend(name, storage_backend_extra_config=extra)
        assert type(controller.storage_backend) is MooncakeConnectorStorage
        assert controller.page_get_func == controller._page_get_zero_copy
        assert controller.page_set_func == controller._page_set_zero_copy

    def test_those_of_others_move_as_sglang_decides(self, controller, tmp_path):
        controller.attach_storage_backend("file", storage_backend_extra_config={"file_storage_path": str(tmp_path)})
        assert controller.page_get_func == controller._generic_page_get
        assert controller.page_set_func == controller._generic_page_set


class TestThePrefixes:
    def passed_with(self, backend: Any, name: str) -> bool:
        cache = SimpleNamespace(page_size=64, cache_controller=SimpleNamespace(storage_backend=backend))
        StorageAttachment(cache).apply_runtime_config(
            storage_backend=name,
            prefetch_threshold=256,
            prefetch_timeout_base=1.0,
            prefetch_timeout_per_ki_token=0.25,
            hicache_storage_pass_prefix_keys=False,
            enable_storage=False,
            enable_storage_metrics=False,
            extra_metric_labels=None,
        )
        return cache.hicache_storage_pass_prefix_keys

    def test_our_backend_gets_the_keys_before_a_page(self):
        assert self.passed_with(MooncakeConnectorStorage(storage_config()), BACKEND) is True

    def test_others_get_them_on_request_only(self):
        assert self.passed_with(object(), "file") is False


class TestWeightUpdates:
    @pytest.fixture
    def changes(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        changes: list[str] = []
        monkeypatch.setattr(in_memory, "changed", lambda: changes.append("changed"))
        return changes

    @pytest.fixture
    def manager(self) -> SchedulerWeightUpdaterManager:
        manager = object.__new__(SchedulerWeightUpdaterManager)
        manager._session = None
        manager.metrics_collector = None
        return manager

    @pytest.mark.parametrize("update", UPDATES)
    def test_an_update_is_noticed_and_its_answer_or_error_kept(self, manager, changes, update):
        if update in ("update_weights_from_disk", "update_weights_from_ipc", "begin_weight_update"):
            with pytest.raises(AttributeError, match=r"tp_worker|selector"):
                getattr(manager, update)(object())
        else:
            answer = getattr(manager, update)(object())  # refused: no update was begun
            assert answer.success is False and "begin_weight_update" in answer.message
        assert changes == ["changed"]

    def test_it_is_noticed_after_the_update(self, monkeypatch, changes):
        done = plugin._reports_weights(lambda manager, request: changes.append("updated") or "answer", None, None)
        assert done == "answer" and changes == ["updated", "changed"]

    @pytest.mark.parametrize(
        ("tags", "options", "lost"),
        [
            (None, {"enable_memory_saver": True}, True),
            (["weights"], {"enable_memory_saver": True}, True),
            (["kv_cache"], {"enable_memory_saver": True}, False),
            (["weights"], {"enable_memory_saver": True, "enable_weights_cpu_backup": True}, False),
            (["weights"], {}, False),
        ],
    )
    def test_weights_that_are_let_go_without_a_copy_are_others(self, manager, changes, tags, options, lost):
        with server("qwen3", **options), pytest.raises(AttributeError):
            manager.release_memory_occupation(SimpleNamespace(tags=tags))
        assert changes == ["changed"] * lost

    @pytest.mark.parametrize("action", ["snapshot", "reset_tensors", "compare", "checksum"])
    def test_weights_that_a_check_makes_up_are_others(self, manager, changes, action):
        assert manager.check_weights(SimpleNamespace(action=action)).success is False  # without a model
        assert changes == ["changed"] * (action == "reset_tensors")

    @pytest.mark.parametrize("idle", [True, False])
    def test_a_flush_is_noticed_where_it_was_made(self, monkeypatch, changes, idle):
        monkeypatch.setattr(in_memory, "caches_emptied", lambda: changes.append("emptied"))
        scheduler = MagicMock()
        scheduler.is_fully_idle.return_value = idle
        assert Scheduler.flush_cache(scheduler, empty_cache=False) is idle
        assert changes == ["emptied"] * idle

    def test_a_fault_of_ours_does_not_reach_the_engine(self, monkeypatch, manager, caplog):
        forget_causes()
        monkeypatch.setattr(in_memory, "changed", lambda: 1 / 0)
        assert manager.end_weight_update(object()).success is False
        assert "_weights_changed failed: ZeroDivisionError" in caplog.text


@pytest.mark.usefixtures("unhooked")
class TestAnotherSglang:
    def offered(self) -> bool:
        hooked = {target.path for target in plugin.TARGETS if target.hook} & HookRegistry._hooks.keys()
        return BACKEND in StorageBackendFactory._registry and bool(hooked)

    def error(self, caplog: pytest.LogCaptureFixture) -> str:
        found = [record for record in caplog.records if record.levelno >= logging.WARNING]
        (record,) = [record for record in found if "transfer backend" not in record.getMessage()]
        assert record.levelno == logging.ERROR
        return record.getMessage()

    @pytest.mark.parametrize("build", ["", "+cpu"])
    def test_the_known_one_is_offered_without_a_word(self, monkeypatch, caplog, build):
        monkeypatch.setattr(sglang, "__version__", KNOWN_VERSION + build)
        sglang_backend.register()
        assert self.offered() and not caplog.records

    def test_another_version_that_fits_is_offered_and_told(self, monkeypatch, caplog):
        monkeypatch.setattr(sglang, "__version__", "0.6.1")
        sglang_backend.register()
        assert self.offered()
        error = self.error(caplog)
        assert "SGLang 0.6.1" in error and KNOWN_VERSION in error

    @pytest.mark.parametrize("index", range(len(plugin.TARGETS)), ids=lambda i: plugin.TARGETS[i].path.split(".")[-1])
    def test_a_target_that_is_missing_is_named_and_nothing_is_offered(self, monkeypatch, caplog, index):
        gone = replace(plugin.TARGETS[index], path=plugin.TARGETS[index].path + "_of_old")
        monkeypatch.setattr(plugin, "TARGETS", (*plugin.TARGETS[:index], gone, *plugin.TARGETS[index + 1 :]))
        monkeypatch.setattr(sglang, "__version__", "0.6.1")
        sglang_backend.register()
        assert not self.offered() and BACKEND not in StorageBackendFactory._registry
        error = self.error(caplog)
        assert "SGLang 0.6.1" in error and gone.path in error and "NOT offered" in error

    def test_a_target_with_other_parameters_is_named_and_nothing_is_offered(self, monkeypatch, caplog):
        monkeypatch.setattr(HiCacheController, "_page_get_zero_copy", lambda self, operation, transfers: 0)
        sglang_backend.register()
        assert not self.offered()
        error = self.error(caplog)
        assert f"SGLang {KNOWN_VERSION}" in error
        assert "HiCacheController._page_get_zero_copy has the parameters (self, operation, transfers)" in error

    def test_a_sglang_without_hooks_at_all_does_not_die_of_us(self, monkeypatch, caplog):
        monkeypatch.setitem(sys.modules, "sglang_backend.plugin", None)
        monkeypatch.delattr(sglang_backend, "plugin")
        sglang_backend.register()
        assert not self.offered() and f"the backend '{BACKEND}' is not offered" in self.error(caplog)
